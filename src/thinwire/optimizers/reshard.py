"""Continue a saved run on other ranks, in another topology, or with buckets of another size.

For each rank of the old run, `read` makes a source optimizer: a copy of the current one that has the old rank's view of
the run but no connections. It loads the rank's state dict, with all the usual checks. The states of all source
optimizers are joined in the flat space, where the place of a parameter does not depend on buckets, slices or shards.
They are then cut for the ranks of this run. Every rank reads all states in the same order and computes the same result.

State that all ranks share (variances, counters, master copies, a momentum that all ranks received) is copied unchanged.
For state that each worker keeps for itself there are two policies:

"average" gives every new worker the mean over the old workers.
    * It keeps Birder's |m| <= b, which holds with `beta_b=None`: both means are computed by the same operations, and
      rounding is monotonic.
    * It keeps what has not been sent yet. A worker's residual e_i enters an update with the weight 1/n, and the owner's
      ē with the weight 1, so parameters are still to receive mean(e_i) + ē. This mean stays the same. The sum of the
      e_i does not, because its weight depends on the number of workers.
    * CD-Adam's owners know only the mean of the workers' known values. It becomes the known value of each worker.
    * Replicas of 0/1 Adam that have taken local steps are joined by a synchronization without compression.
"reset" starts this state from zero: averages, residuals and known values of a worker. Replicas that have taken local
    steps return to the last values that they shared.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.optim import Optimizer

from thinwire._callers import warn_user
from thinwire.metrics import Meter
from thinwire.optimizers import state_dict
from thinwire.optimizers.delay import without_answer
from thinwire.optimizers.optimizer import WireOptimizer
from thinwire.transport.layout import WORD, Layout
from thinwire.transport.memory import HOST
from thinwire.transport.peers import Peers
from thinwire.transport.state import State, Tensors
from thinwire.transport.topology import Topology

Policy = Literal["average", "reset"]


@dataclass(frozen=True)
class SavedRun:
    """A run whose states were saved.

    Raises:
        ValueError: if `nodes` does not have every rank once, or nodes of different sizes.
    """

    nodes: tuple[tuple[int, ...], ...]
    """Its ranks, by node. In a flat topology every rank is a node."""
    bucket_mb: float | None
    state_of: Callable[[int], dict[str, Any]]
    """Loads the state dict of one of its ranks."""

    def __post_init__(self) -> None:
        ranks = sorted(rank for node in self.nodes for rank in node)
        if not ranks or ranks != list(range(len(ranks))) or len({len(node) for node in self.nodes}) > 1:
            raise ValueError(
                f"nodes={self.nodes}: expected every rank once, and the same number of ranks on every node"
            )

    @property
    def size(self) -> int:
        """The number of its ranks."""
        return len(self.nodes) * len(self.nodes[0])

    def topology_of(self, rank: int) -> Topology:
        """The topology as a rank saw it."""
        node = next(index for index, ranks in enumerate(self.nodes) if rank in ranks)
        return Topology(self.nodes, node, self.nodes[node].index(rank), "a saved run")


@torch.no_grad()
def read(optimizer: WireOptimizer, run: SavedRun, how: Policy) -> JoinedState:
    """Read and check the states of all ranks of a run, for `load`, without changing the optimizer.

    Raises:
        ValueError: if a state is not of such an optimizer, or is not valid in its topology.
    """
    if how not in get_args(Policy):
        raise ValueError(f"how={how!r}: expected 'average' or 'reset'")
    joined, dropped = JoinedState(), False
    for rank in range(run.size):
        source = copy_for(optimizer, Peers(None, rank, run.size), run.topology_of(rank), run.bucket_mb)
        source.load_state_dict(run.state_of(rank))
        if source._rule.needs_compression and not optimizer._topology.compresses:
            raise ValueError(
                f"the state is of {type(optimizer).__name__} with a frozen variance, after its dense stage. With a "
                f"single node of {optimizer._topology.slices} ranks nothing is compressed, and that stage never ends. "
                "Use topology='flat', or several nodes, or a checkpoint from before the freeze"
            )
        joined.add(source, without_answer(source._rule.portable(source._flat_state, private=how == "average")))
        dropped = dropped or source._delay.pending
    if dropped:
        warn_user(
            "the answer that delay=1 keeps for the next step is dropped: it is that of the workers that were saved. "
            "Call synchronize() before you save a run that will continue on other ranks"
        )
    return joined


@torch.no_grad()
def load(optimizer: WireOptimizer, joined: JoinedState) -> None:
    """Continue from the states of a run. Call it on all ranks, after you have loaded the model's parameters.

    It changes parameters whose replicas differed when they were saved.
    """
    target = copy_for(optimizer, optimizer._peers, optimizer._topology, optimizer._bucket_mb)
    joined.copy_to(target)
    optimizer.load_state_dict(target._state_of_this_rank())


def copy_for(optimizer: WireOptimizer, peers: Peers, topology: Topology, bucket_mb: float | None) -> WireOptimizer:
    """A copy of the optimizer with the same class, arguments and parameters, in its initial state, as on another rank.

    It has a state but no connections, and takes no steps.
    """
    made: WireOptimizer = object.__new__(type(optimizer))
    vars(made).update(vars(optimizer))
    made._peers, made._topology, made._bucket_mb = peers, topology, bucket_mb
    made._loading, made._built, made._agreed = [], False, False
    made._at_close, made._after_step, made._meter = [], [], Meter()
    made._rule = copy.copy(optimizer._rule)
    made._skips, made._clipping = copy.copy(optimizer._skips), copy.copy(optimizer._clipping)
    made._delay = copy.copy(optimizer._delay)
    made._delay.in_flight = False
    made._step_count = torch.zeros_like(optimizer._step_count)
    # Detached views, because requires_grad must be as it was when the optimizer was made, not as it is now.
    held = set(optimizer._flat_params)
    groups = [
        {**group, "params": [p.detach().requires_grad_(p in held) for p in group["params"]]}
        for group in optimizer.param_groups
    ]
    # New groups, state and hooks. The defaults are empty because the groups are complete.
    Optimizer.__init__(made, groups, {})
    made.defaults = dict(optimizer.defaults)
    made._build()
    state_dict.install(made)
    return made


@dataclass
class JoinedState:
    """The states of all ranks of a run, joined in the flat space, independent of buckets, slices and shards."""

    progress: dict[str, Any] = field(default_factory=dict)
    values: Tensors = field(default_factory=dict)
    """By name, values over the flat space, up to the end of the last parameter."""
    words: Tensors = field(default_factory=dict)
    layers: Tensors = field(default_factory=dict)
    common: Tensors = field(default_factory=dict)
    masters: dict[int, Tensor] = field(default_factory=dict)
    """By position, the master copies."""
    anchors: dict[int, Tensor] = field(default_factory=dict)
    """By position, the last shared values of parameters that some worker has moved in local steps since then."""
    groups: list[dict[str, Any]] = field(default_factory=list)
    step: int = 0

    def add(self, source: WireOptimizer, state: State) -> None:
        """Add the state of the next rank."""
        layout, topology, rank = source._session.layout, source._topology, source._peers.rank
        if not rank:
            self._add_shared(source, state)
        elif _progress(source) != self.progress:
            raise ValueError(f"rank {rank} was saved at {_progress(source)}, rank 0 at {self.progress}")
        for name, own in state.own.items():
            if name not in self.values:
                self.values[name] = torch.zeros(end_of(layout), dtype=torch.float64, device=HOST)
            for of_space, of_state in ranges_of(layout):
                self.values[name][of_space] += own[of_state].to(HOST).double() / topology.workers
        for name, owned in state.owned.items():
            if name not in self.values:
                self.values[name] = torch.zeros(end_of(layout), dtype=owned.dtype, device=HOST)
            for of_space, of_state in ranges_of(layout, topology.node):
                self.values[name][of_space] = owned[of_state]
        for name, layer in state.layers.items():
            # Equal on all ranks, except for flags of local steps: these are set if any worker set them.
            torch.maximum(self.layers[name], layer, out=self.layers[name])
        for position, anchor in source._rule.anchors().items():
            self.anchors.setdefault(position, anchor.clone())

    def _add_shared(self, source: WireOptimizer, state: State) -> None:
        end = end_of(source._session.layout)
        self.progress, self.groups, self.step = _progress(source), source.param_groups, int(source._step_count)
        self.values = {name: whole[:end] for name, whole in state.whole.items()}
        self.words = {name: words[: end // WORD] for name, words in state.words.items()}
        self.layers, self.common = dict(state.layers), dict(state.common)
        states = enumerate(source._state_of)
        self.masters = {position: kept["master"] for position, kept in states if "master" in kept}

    def copy_to(self, target: WireOptimizer) -> None:
        """Copy everything into an optimizer in its initial state. Names that it does not have are dropped."""
        layout, state, end = target._session.layout, target._flat_state, end_of(target._session.layout)
        target._step_count.fill_(self.step)
        for name, values in self.values.items():
            if name in state.whole:
                state.whole[name][:end] = values
            for held, owner in ((state.own, None), (state.owned, target._topology.node)):
                if name in held:
                    for of_space, of_state in ranges_of(layout, owner):
                        held[name][of_state] = values[of_space]
        for name in state.words.keys() & self.words.keys():
            state.words[name][: end // WORD] = self.words[name]
        for ours, theirs in ((state.layers, self.layers), (state.common, self.common)):
            for name in ours.keys() & theirs.keys():
                ours[name].copy_(theirs[name])
        for position, master in self.masters.items():
            target._state_of[position]["master"].copy_(master)
        for group, saved in zip(target.param_groups, self.groups, strict=True):
            group.update({key: value for key, value in saved.items() if key not in ("params", *state_dict.LABELS)})
        target._begin_step()
        target._rule.inherit(self.values, self.anchors)


def _progress(optimizer: WireOptimizer) -> dict[str, Any]:
    return {"the number of steps taken": int(optimizer._step_count), **optimizer._rule.progress()}


def end_of(layout: Layout) -> int:
    """The end of the last parameter. The padding after it depends on the layout."""
    return layout.slots[-1].stop if layout.slots else 0


def ranges_of(layout: Layout, owner: int | None = None) -> Iterator[tuple[slice, slice]]:
    """For a rank's slices, or for the shards that worker `owner` owns: their ranges in the flat space, and in a state
    that holds only them."""
    for bucket in layout.buckets:
        held = bucket.own_shards if owner is None else layout.owned_by(owner)
        start = bucket.start + held.start * bucket.shard_elements
        stop = min(start + len(held) * bucket.shard_elements, end_of(layout))
        if start < stop:
            shift = bucket.shift_of(held)
            yield slice(start, stop), slice(start - shift, stop - shift)
