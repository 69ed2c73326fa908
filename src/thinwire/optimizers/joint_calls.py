"""Small parameters are encoded, and moved, by few kernel calls instead of one each.

A call of a kernel takes several microseconds, in which it could process some ten thousand elements. Small parameters of
a bucket are therefore joined: one table has the runs of all, and leads the kernel to the memory of each
(`thinwire.kernels.joined`). The kernel computes what it would compute in one call per parameter.

Joined are parameters in float32 whose memory is contiguous, with native kernels, in a flat topology. A gradient that
is missing, or that kernels cannot read as it is, lets those that are joined with it take the usual way in that step.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from torch import Tensor

from thinwire.kernels.joined import JoinedRuns, plain_addresses
from thinwire.optimizers.rule import Context, UpdateRule
from thinwire.transport.buffers import PacketBuffers, Part

MOST_ELEMENTS = 1 << 19
"""In one call. Ten times as many as a kernel processes in the time of a call are enough to hide it, and a bucket of a
large model should not wait for all of its parameters."""


@dataclass(frozen=True)
class Join:
    """Parameters that are encoded or moved together."""

    positions: Sequence[int]
    part: Part
    """Their parts as one. It has the runs of one direction only."""
    first: int
    """The place of the first one among all joined parameters."""
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
            self._joins.append(Join(positions, part, first, self._runs.memory.as_tensor()))
            self._order.append(self._joins[-1])
            first += len(positions)

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

    def encodings(self, gradients: Sequence[Tensor | None]) -> list[Join | int] | None:
        """How to encode the gradients of all parameters, by position: joins, and positions of others, in flat order.
        None if each is encoded by itself."""
        joins = self._joins(self._rule.encode_numbers, upward=True)
        return None if joins is None else joins.point_to(gradients)

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


def _plain(value: Any) -> Any:
    return float(value) if isinstance(value, Tensor) else value
