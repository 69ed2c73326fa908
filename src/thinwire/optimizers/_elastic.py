"""The states of a run go on in another one: of other ranks, in another topology, with buckets of another size.

For every rank of the old run a *twin* is made: an optimizer like the one that goes on, which sees the run as that rank
did, but has nobody to talk to. The rank's state dict is loaded into it, with all the checks of a state dict. What twins
have kept is joined in the flat space, where a parameter has the same place however the space is cut, and is cut anew
for the ranks of this run. Every rank reads all states in the same order and computes the same.

What all ranks share (variances, counters, masters, a momentum that everybody has heard) is taken over as it is. For
what every worker keeps for itself there are two policies:

"average" gives every new worker the mean of what the old ones had.
    * Birder's |m| <= b, which holds with `beta_b=None`, stays: both are means, by the same operations, and rounding
      keeps the order of numbers.
    * So does what has not been said yet. A worker's error e_i enters an update with the weight 1/n, the owner's ē with
      the weight 1: what the parameters are still to get is mean(e_i) + ē, and it is this that stays the same (not the
      bare sum of the e_i, which would count for more or less with another number of workers).
    * What is known of CD-Adam's workers is their mean; it becomes what is known of each of them.
    * Replicas of 0/1 Adam that have taken local steps are joined by a synchronisation without compression.
"reset" starts it from zero: averages that a worker has for itself, errors, what is known of workers. Replicas that have
    taken local steps go back to where they last agreed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.optim import Optimizer

from thinwire.optimizers import _state_dict
from thinwire.optimizers._base import WireOptimizer
from thinwire.optimizers._state import State, Tensors
from thinwire.transport.layout import WORD, Layout
from thinwire.transport.memory import HOST
from thinwire.transport.peers import Peers
from thinwire.transport.topology import Topology

Policy = Literal["average", "reset"]


@dataclass(frozen=True)
class SavedRun:
    """A run whose states were saved.

    Raises:
        ValueError: for nodes that no run can have.
    """

    nodes: tuple[tuple[int, ...], ...]
    """Its ranks, node by node. In a flat topology every rank is a node."""
    bucket_mb: float | None
    state_of: Callable[[int], dict[str, Any]]
    """Loads the state dict of one of its ranks."""

    def __post_init__(self) -> None:
        ranks = sorted(rank for node in self.nodes for rank in node)
        if not ranks or ranks != list(range(len(ranks))) or len({len(node) for node in self.nodes}) > 1:
            raise ValueError(f"nodes={self.nodes}: expected every rank once, and equally many on every node")

    @property
    def size(self) -> int:
        """How many ranks it had."""
        return len(self.nodes) * len(self.nodes[0])

    def topology_of(self, rank: int) -> Topology:
        """The topology as a rank saw it."""
        node = next(index for index, ranks in enumerate(self.nodes) if rank in ranks)
        return Topology(self.nodes, node, self.nodes[node].index(rank), "a saved run")


@torch.no_grad()
def read(optimizer: WireOptimizer, run: SavedRun, how: Policy) -> SavedState:
    """Read and check the states of all ranks of a run, for `hand_over`. Nothing is changed.

    Raises:
        ValueError: for states that are not of such an optimizer, or that make no sense in its topology.
    """
    if how not in get_args(Policy):
        raise ValueError(f"how={how!r}: expected 'average' or 'reset'")
    saved_state = SavedState()
    for rank in range(run.size):
        _read(optimizer, run, rank, saved_state, private=how == "average")
    return saved_state


@torch.no_grad()
def hand_over(optimizer: WireOptimizer, saved_state: SavedState) -> None:
    """Go on from the states of a run. To be called on all ranks, when the model's parameters have been loaded.

    Parameters are changed where replicas differed when they were saved.
    """
    heir = twin_of(optimizer, optimizer._peers, optimizer._topology, optimizer._bucket_mb)
    saved_state.hand_over(heir)
    optimizer.load_state_dict(heir.state_dict())


def adopt(optimizer: WireOptimizer, run: SavedRun, how: Policy) -> None:
    """`read`, then `hand_over`.

    Raises:
        ValueError: as `read` does, before anything is changed.
    """
    hand_over(optimizer, read(optimizer, run, how))


def _read(optimizer: WireOptimizer, run: SavedRun, rank: int, saved_state: SavedState, *, private: bool) -> None:
    twin = twin_of(optimizer, Peers(None, rank, run.size), run.topology_of(rank), run.bucket_mb)
    twin.load_state_dict(run.state_of(rank))
    if twin._needs_compression and not optimizer._topology.compresses:
        raise ValueError(
            f"the state is of {type(optimizer).__name__} with a frozen variance, after its dense stage. Within a "
            f"single node of {optimizer._topology.slices} ranks nothing is compressed, and that stage never ends: "
            "use topology='flat', or as many nodes as before, or a checkpoint from before the freeze"
        )
    saved_state.add(twin, twin._portable(private=private))


def twin_of(optimizer: WireOptimizer, peers: Peers, topology: Topology, bucket_mb: float | None) -> WireOptimizer:
    """An optimizer of the same class, arguments and parameters, at its start and as another rank would have it.

    It has a state, but no process groups, and is not to take steps.
    """
    twin: WireOptimizer = object.__new__(type(optimizer))
    vars(twin).update(vars(optimizer))
    twin._peers, twin._topology, twin._bucket_mb = peers, topology, bucket_mb
    twin._transport, twin._loading, twin._built, twin._agreed = None, [], False, False
    twin._skips = copy.copy(optimizer._skips)
    twin._step_count = torch.zeros_like(optimizer._step_count)
    # Not the parameters themselves but their values: what was frozen when the optimizer was made counts, not what is.
    held = set(optimizer._flat_params)
    groups = [
        {**group, "params": [p.detach().requires_grad_(p in held) for p in group["params"]]}
        for group in optimizer.param_groups
    ]
    # Groups, state and hooks of its own. Groups are complete: torch adds to the defaults what no group needs.
    Optimizer.__init__(twin, groups, {})
    twin.defaults = dict(optimizer.defaults)
    twin._build()
    _state_dict.install(twin)
    return twin


@dataclass
class SavedState:
    """What the ranks of a run leave behind, a rank after the other, with nothing in it of how the space was cut."""

    progress: dict[str, Any] = field(default_factory=dict)
    values: Tensors = field(default_factory=dict)
    """Of the flat space up to the end of the last parameter."""
    words: Tensors = field(default_factory=dict)
    layers: Tensors = field(default_factory=dict)
    common: Tensors = field(default_factory=dict)
    masters: dict[int, Tensor] = field(default_factory=dict)
    """By the position of their parameters."""
    anchors: dict[int, Tensor] = field(default_factory=dict)
    """Where replicas last agreed, of the parameters that some worker has moved on its own since."""
    groups: list[dict[str, Any]] = field(default_factory=list)
    step: int = 0

    def add(self, twin: WireOptimizer, left: State) -> None:
        """Take what the next rank leaves behind."""
        layout, topology = twin._layout, twin._topology
        if not twin._peers.rank:
            self._add_shared(twin, left)
        elif twin._progress() != self.progress:
            raise ValueError(f"rank {twin._peers.rank} was saved at {twin._progress()}, rank 0 at {self.progress}")
        for name, own in left.own.items():
            if name not in self.values:
                self.values[name] = torch.zeros(_end(layout), dtype=torch.float64, device=HOST)
            for of_space, of_state in _stretches(layout):
                self.values[name][of_space] += own[of_state].to(HOST).double() / topology.workers
        for name, owned in left.owned.items():
            if name not in self.values:
                self.values[name] = torch.zeros(_end(layout), dtype=owned.dtype, device=HOST)
            for of_space, of_state in _stretches(layout, topology.node):
                self.values[name][of_space] = owned[of_state]
        for name, layer in left.layers.items():
            # The same on all ranks but for what workers have done on their own: then it counts that one has done it.
            torch.maximum(self.layers[name], layer, out=self.layers[name])
        for position, anchor in twin._anchors().items():
            self.anchors.setdefault(position, anchor.clone())

    def _add_shared(self, twin: WireOptimizer, left: State) -> None:
        end = _end(twin._layout)
        self.progress, self.groups, self.step = twin._progress(), twin.param_groups, int(twin._step_count)
        self.values = {name: whole[:end] for name, whole in left.whole.items()}
        self.words = {name: words[: end // WORD] for name, words in left.words.items()}
        self.layers, self.common = dict(left.layers), dict(left.common)
        states = [twin.state[p] for p in twin._flat_params]
        self.masters = {position: state["master"] for position, state in enumerate(states) if "master" in state}

    def hand_over(self, heir: WireOptimizer) -> None:
        """Give all of it to an optimizer that is at its start. What it has no use for is lost."""
        layout, kept, end = heir._layout, heir._kept, _end(heir._layout)
        heir._step_count.fill_(self.step)
        for name, values in self.values.items():
            if name in kept.whole:
                kept.whole[name][:end] = values
            for held, owner in ((kept.own, None), (kept.owned, heir._topology.node)):
                if name in held:
                    for of_space, of_state in _stretches(layout, owner):
                        held[name][of_state] = values[of_space]
        for name in kept.words.keys() & self.words.keys():
            kept.words[name][: end // WORD] = self.words[name]
        for ours, left in ((kept.layers, self.layers), (kept.common, self.common)):
            for name in ours.keys() & left.keys():
                ours[name].copy_(left[name])
        for position, master in self.masters.items():
            heir.state[heir._flat_params[position]]["master"].copy_(master)
        for group, left in zip(heir.param_groups, self.groups, strict=True):
            group.update({key: value for key, value in left.items() if key not in ("params", *_state_dict.LABELS)})
        heir._begin_step()
        heir._inherit(self.values, self.anchors)


def _end(layout: Layout) -> int:
    """The end of the last parameter. What is behind it differs from layout to layout."""
    return layout.slots[-1].stop if layout.slots else 0


def _stretches(layout: Layout, owner: int | None = None) -> Iterator[tuple[slice, slice]]:
    """Where a rank's slices, or the shards that a rank of worker `owner` owns, lie: in the flat space, and in a state
    that has nothing else."""
    for bucket in layout.buckets:
        held = bucket.own_shards if owner is None else layout.owned_by(owner)
        start = bucket.start + held.start * bucket.shard_elements
        stop = min(start + len(held) * bucket.shard_elements, _end(layout))
        if start < stop:
            shift = bucket.shift_of(held)
            yield slice(start, stop), slice(start - shift, stop - shift)
