"""Small parameters are encoded, and moved, by few kernel calls instead of one each.

A call of a kernel takes several microseconds, in which it could process some ten thousand elements. Small parameters of
a bucket are therefore joined: one table has the runs of all, and leads the kernel to the memory of each
(`thinwire.kernels.joined`). The kernel computes what it would compute in one call per parameter.

Joined are whole parameters in float32 whose memory is contiguous, with native kernels, in a flat topology. If one
gradient of a join is missing, or kernels cannot read it as it is, its parameters are encoded one by one in that step.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import inf
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from thinwire.kernels.joined import JoinedRuns, plain_addresses
from thinwire.kernels.modes import Scale
from thinwire.kernels.ops import Kernels
from thinwire.optimizers.inputs import sample_size, sample_stride
from thinwire.optimizers.rule import Context, UpdateRule
from thinwire.transport.buffers import PacketBuffers, Part
from thinwire.transport.memory import HOST

MOST_ELEMENTS = 1 << 19
"""In one call: so many that its own time does not count, and so few that backward still hides most of the encoding."""


@dataclass(frozen=True)
class Join:
    """Parameters that are encoded or moved together."""

    positions: Sequence[int]
    part: Part
    """Their parts as one. It has the runs of one direction only."""
    index: int
    """The number among all joins."""
    first: int
    """The place of the first parameter among all joined ones."""
    memory: Tensor
    """Leads kernels to their gradients or to themselves, with the runs of `part`."""

    @property
    def places(self) -> slice:
        """Their places among all joined parameters."""
        return slice(self.first, self.first + len(self.positions))


class _Joins:
    """All joins of one direction.

    Args:
        buffers: of a channel.
        alike: by position, what must be equal for parameters to be joined; None for one that cannot be.
        upward: whether for encoding. Then parameters must also follow each other, because compressors have a table of
            sums with a row per run.
        backwards: whether to begin with the last position. The flat space has parameters in reverse order, and a pass
            over memory in ascending order takes less time: processors fetch ahead.
    """

    def __init__(
        self, buffers: PacketBuffers, alike: Sequence[int | None], *, upward: bool, backwards: bool = False
    ) -> None:
        slots, parts = buffers.layout.slots, buffers.parts
        positions_of = [*_grouped(buffers, alike, upward=upward)]
        if backwards:
            positions_of = [positions[::-1] for positions in reversed(positions_of)]
        self._each: list[Join | int] = list(chain.from_iterable(positions_of))
        together = [positions for positions in positions_of if len(positions) > 1]
        self.positions = list(chain.from_iterable(together))
        """Of all joined parameters, join by join."""
        self._numels = [slots[position].numel for position in self.positions]
        tables = [[getattr(parts[i][0], "up_runs" if upward else "down_runs") for i in each] for each in together]
        self._runs = JoinedRuns(tables)
        self._addresses: Sequence[int] | None = None
        """What `point_to_addresses` was given last."""
        self._order: list[Join | int] = []
        """All parameters: joins, and positions of those that are not joined. For encoding, in flat order."""
        self._joins: list[Join] = []
        first = 0
        for positions in positions_of:
            if len(positions) == 1:
                self._order.append(positions[0])
                continue
            part = _joined([parts[position][0] for position in positions], self._runs.tables[len(self._joins)], upward)
            self._joins.append(Join(positions, part, len(self._joins), first, self._runs.memory.as_tensor()))
            self._order.append(self._joins[-1])
            first += len(positions)

        self.join_of: list[Join | None] = [None] * len(slots)
        """By position, the join of a parameter."""
        for join in self._joins:
            for position in join.positions:
                self.join_of[position] = join
        self._samples: JoinedRuns | None = None
        """The runs of a few elements of each tensor, in a table for each join."""
        self._sampled: list[Tensor] = []

    def point_join_to(self, join: Join, tensors: Sequence[Tensor]) -> list[int] | None:
        """Lead the table of one join to its tensors, in its order; their addresses, or None if they are not plain."""
        addresses = plain_addresses(tensors, self._numels[join.places])
        return addresses if addresses and self._runs.point_to(addresses, join.index) else None

    def sample(self, join: Join, addresses: Sequence[int], kernels: Kernels) -> list[Tensor]:
        """The elements that `sample_of` would copy of each tensor of a join, which are plain and at these addresses.
        Valid until the next call for the join."""
        if self._samples is None:
            self._samples = JoinedRuns([_sample_runs(self._numels[each.places]) for each in self._joins])
            self._sampled = [torch.empty(len(table), device=HOST) for table in self._samples.tables]
        self._samples.point_to(addresses, join.index)
        sampled, table = self._sampled[join.index], self._samples.tables[join.index]
        kernels.dense_encode(table, self._samples.memory.as_tensor(), sampled.view(torch.uint8), scale=1.0, largest=inf)
        return list(sampled.split([sample_size(numel) for numel in self._numels[join.places]]))

    def point_to_addresses(self, addresses: Sequence[int]) -> list[Join | int]:
        """The same for tensors that are known to be plain, or without memory, at these addresses, by position. The same
        list always has the same addresses."""
        if addresses is not self._addresses:
            given = [addresses[position] for position in self.positions]
            if not all(given) or not self._runs.point_to(given):
                return self._each
            self._addresses = addresses
        return self._order

    def point_to(self, tensors: Sequence[Tensor | None]) -> list[Join | int]:
        """Lead the tables to tensors, given by position; the joins of which all tensors are plain, and the positions
        of all others."""
        if not self._joins:
            return self._each
        given = [tensors[position] for position in self.positions]
        addresses = plain_addresses(given, self._numels)
        if addresses is not None:
            return self._order if self._runs.point_to(addresses) else self._each
        found = {join.first: plain_addresses(given[join.places], self._numels[join.places]) for join in self._joins}
        somewhere = next((plain[0] for plain in found.values() if plain), 0)  # for tables that are not used
        everywhere = [found[join.first] or [somewhere] * len(join.positions) for join in self._joins]
        if not somewhere or not self._runs.point_to(list(chain.from_iterable(everywhere))):
            return self._each
        order: list[Join | int] = []
        for item in self._order:
            if isinstance(item, Join) and found[item.first] is None:
                order += item.positions
            else:
                order.append(item)
        return order


class JointCalls:
    """Decides which parameters are joined in a step.

    Args:
        rule: bound to a run.
        joinable: by position, whether a parameter may be joined.
    """

    def __init__(self, rule: UpdateRule, joinable: Sequence[bool]) -> None:
        self._rule = rule
        self._context: Context = rule.context
        self._joinable = joinable
        session = self._context.session
        self._possible = session.kernels.name == "native" and session.side is None and session.topology.slices == 1
        self._known: weakref.WeakKeyDictionary[PacketBuffers, dict[bool, tuple[list[int], _Joins]]]
        self._known = weakref.WeakKeyDictionary()
        """For packets and a direction, which groups are alike, and the joins. Weak, because a channel may release its
        packets, of which joins have views."""
        self.begin_step()

    def encodings(self, gradients: Sequence[Tensor | None]) -> list[Join | int] | None:
        """How to encode the gradients of all parameters, by position: joins, and positions of others, in flat order.
        None if each is encoded by itself."""
        joins = self._joins(self._rule.encode_numbers, upward=True)
        return None if joins is None else joins.point_to(gradients)

    def begin_step(self) -> None:
        """Forget the gradients that wait."""
        self._waiting: dict[int, dict[int, tuple[Tensor, Scale]]] = {}
        """By the number of a join, the gradients that have arrived, by position, with their factors."""
        self._upward: _Joins | None = None
        """The joins of this step, if any gradient has arrived."""

    def collect(self, position: int, grad: Tensor, scale: Scale) -> Join | bool:
        """Let a gradient wait for those that are encoded together with it.

        Returns:
            False if it must be encoded by itself; the join, if it is the last one that this was waiting for.
        """
        if self._upward is None:
            self._upward = self._joins(self._rule.encode_numbers, upward=True)
            if self._upward is None:
                return False
        join = self._upward.join_of[position]
        if join is None:
            return False
        arrived = self._waiting.setdefault(join.index, {})
        arrived[position] = grad, scale
        return join if len(arrived) == len(join.positions) else True

    def take(self, join: Join) -> tuple[list[Tensor], Scale, list[int] | None]:
        """The gradients of a join that is complete, in its order, with their factor, and their addresses, to which its
        table leads now. They are None if they must be encoded one by one."""
        assert self._upward is not None, "its gradients have arrived"
        arrived = self._waiting.pop(join.index)
        given = [arrived[position] for position in join.positions]
        gradients, scale = [grad for grad, _ in given], given[0][1]
        alike = all(each is scale or each == scale for _, each in given)
        return gradients, scale, self._upward.point_join_to(join, gradients) if alike else None

    def take_waiting(self) -> list[tuple[int, Tensor, Scale]]:
        """The gradients that still wait, by position, with their factors."""
        waiting = [(position, *each) for arrived in self._waiting.values() for position, each in arrived.items()]
        self._waiting.clear()
        return sorted(waiting, key=itemgetter(0))

    def sample(self, join: Join, addresses: Sequence[int]) -> list[Tensor]:
        """Copies of a few elements of each gradient of a join, in its order, as `sample_of` makes them. Valid until the
        next step."""
        assert self._upward is not None, "its gradients have arrived"
        return self._upward.sample(join, addresses, self._context.kernels)

    def movements(self, positions: Sequence[int], addresses: Sequence[int] | None) -> Sequence[Join | int]:
        """How to move the parameters at these positions: joins, and positions of others.

        Args:
            positions: those that move.
            addresses: of all parameters, by position, if they still have the properties with which they were joined.
        """
        joins = self._joins(self._rule.apply_numbers, upward=False)
        if joins is None:
            return positions
        if not self._rule.moves_parameters:
            items = joins.point_to(self._rule.targets())
        elif addresses is not None:
            items = joins.point_to_addresses(addresses)
        else:
            return positions
        if len(positions) == len(self._joinable):
            return items
        wanted = set(positions)
        some: list[Join | int] = []
        for item in items:
            if not isinstance(item, Join):
                some += [item] if item in wanted else []
            elif wanted.issuperset(item.positions):
                some.append(item)
            else:
                some += [position for position in item.positions if position in wanted]
        return some

    def _joins(self, numbers: Sequence[str] | None, *, upward: bool) -> _Joins | None:
        """The joins of parameters whose groups have these numbers in common, for the packets of this step."""
        if not self._possible or numbers is None:
            return None
        context = self._context
        buffers = context.session.channel.buffers
        values = [tuple(_plain(group[name]) for name in numbers) for group in context.groups]
        # The numbers change in every step, but rarely which of them are equal.
        alike = list(map(values.index, values))
        known = self._known.setdefault(buffers, {})
        if upward not in known or known[upward][0] != alike:
            of_positions = [
                alike[group] if joinable else None
                for group, joinable in zip(context.group_index, self._joinable, strict=True)
            ]
            backwards = not upward and self._rule.moves_parameters
            known[upward] = alike, _Joins(buffers, of_positions, upward=upward, backwards=backwards)
        return known[upward][1]


def _grouped(buffers: PacketBuffers, alike: Sequence[int | None], *, upward: bool) -> Iterator[list[int]]:
    """All positions, in lists of those that are joined. See `_Joins`."""
    open_lists: dict[tuple[int, int], tuple[list[int], int]] = {}
    for position, kind in enumerate(alike):
        parts, numel = buffers.parts[position], buffers.layout.slots[position].numel
        if kind is None or len(parts) != 1 or numel > MOST_ELEMENTS:
            if upward:
                yield from _closed(open_lists)
            yield [position]
            continue
        key = (parts[0].frame.bucket.index, kind)
        if upward and key not in open_lists:
            yield from _closed(open_lists)
        positions, elements = open_lists.get(key, ([], 0))
        if elements + numel > MOST_ELEMENTS:
            yield positions
            positions, elements = [], 0
        positions.append(position)
        open_lists[key] = positions, elements + numel
    yield from _closed(open_lists)


def _closed(open_lists: dict[tuple[int, int], tuple[list[int], int]]) -> Iterator[list[int]]:
    yield from (positions for positions, _ in open_lists.values())
    open_lists.clear()


def _joined(parts: Sequence[Part], table: Tensor, upward: bool) -> Part:
    rows = slice(parts[0].rows.start, parts[-1].rows.stop) if upward else slice(0)
    runs = {"up_runs": table} if upward else {"down_runs": table}
    return replace(parts[0], index=-1, presence=sum(part.presence for part in parts), rows=rows, **runs)


def _sample_runs(numels: Sequence[int]) -> list[Tensor]:
    """For each tensor, the runs that copy what `sample_of` copies, of one element each, to places one after another."""
    tables: list[Tensor] = []
    first = 0
    for numel in numels:
        count, stride = sample_size(numel), sample_stride(numel)
        rows = [[0, i * stride, 1, torch.float32.itemsize * (first + i), 0, 0] for i in range(count)]
        tables.append(torch.tensor(rows, dtype=torch.int64, device=HOST))
        first += count
    return tables


def _plain(value: Any) -> Any:
    return float(value) if isinstance(value, Tensor) else value
