"""The interface of an update rule: what a paper defines.

`thinwire.optimizers.optimizer` runs the steps and calls the rule; see `WireOptimizer` for when. A rule is made by the
constructor of its optimizer and bound to a run as soon as the parameters are known.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from thinwire.kernels import rng
from thinwire.kernels.modes import Scale
from thinwire.kernels.ops import Kernels
from thinwire.transport import packet
from thinwire.transport.buffers import Part
from thinwire.transport.compressor import Compressor
from thinwire.transport.layout import Layout
from thinwire.transport.session import Session
from thinwire.transport.state import State, Tensors
from thinwire.transport.topology import Topology

Group = dict[str, Any]
"""A parameter group, as in torch.optim."""


@dataclass
class Context:
    """The run that a rule is part of. A position is the index of a parameter in flat order."""

    session: Session
    params: list[Tensor]
    """The parameters that take part, by position."""
    group_index: list[int]
    """By position, the index of a parameter's group."""
    groups: list[Group]
    """The optimizer's parameter groups; assigned at every step, because load_state_dict() replaces them."""
    state_of: list[Tensors] = field(default_factory=list)
    """By position, the state of each parameter."""
    step: int = 1
    """The number of the step under way, from 1."""
    delayed: bool = False
    """Whether answers are applied one step later, so that `UpdateRule.keep` is called."""
    shard: int = 0
    """Which shard of its parameters this rank holds; 0 if they are whole."""

    def seed(self, seed: int) -> int:
        """The seed of the random numbers for this rank's shard, which are independent of those for other shards."""
        return rng.shard_seed(seed, self.shard)

    @property
    def layout(self) -> Layout:
        """The flat space."""
        return self.session.layout

    @property
    def topology(self) -> Topology:
        """Which ranks form a worker."""
        return self.session.topology

    @property
    def kernels(self) -> Kernels:
        """The backend for the parameters' device."""
        return self.session.kernels

    def group_of(self, position: int) -> Group:
        """The group of a parameter."""
        return self.groups[self.group_index[position]]

    def master(self, position: int) -> Tensor:
        """A parameter in float32: its master copy, or itself."""
        return self.state_of[position].get("master", self.params[position])

    def set_value(self, position: int, value: Tensor) -> None:
        """Write a parameter, and its master copy."""
        p, master = self.params[position], self.master(position)
        master.copy_(value)
        if master is not p:
            p.copy_(master)


class UpdateRule(abc.ABC):
    """The state of a worker, what it sends for a gradient, and how the answer moves a parameter.

    `bind` allocates all state, so a copy of a rule can be bound to another run.
    """

    state_depends_on_buckets = False
    """Whether the state depends on how the flat space is cut into buckets."""
    buckets = 4
    """About how many buckets there are, unless the user chooses their size; see `bucket_elements`."""
    scale_block: int | None = None
    """The number of elements that share a scale, if the state has scales of blocks."""
    records_buckets = False
    """Whether a state dict records `bucket_mb` among the settings that a run should be resumed with."""
    moves_parameters = True
    """False if answers go elsewhere. Low-precision parameters then have no fp32 master copies."""
    needs_whole: str | None = None
    """What the rule needs of whole parameters; None if a shard of each will do."""
    has_local_steps = False
    """Whether replicas may differ between synchronizations."""
    no_delay: str | None = "its update rule is defined for answers of the same step only"
    """Why answers cannot be applied one step later; None if they can."""
    encode_numbers: Sequence[str] | None = None
    """The numbers of parameter groups that `encode` reads. Several parameters for which they are equal may be encoded
    by one call, with a part that has the runs of all and the position of the first. None if they may not."""
    context: Context

    # Hyper-parameters ------------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def check_group(self, group: Group) -> None:
        """Reject invalid hyper-parameters of a group.

        Raises:
            ValueError: naming the hyper-parameter, its value, and what is expected.
        """

    @abc.abstractmethod
    def settings(self) -> dict[str, Any]:
        """The constructor arguments on which all ranks must agree, except the hyper-parameters of groups."""

    # State -----------------------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def bind(self, context: Context) -> tuple[dict[str, Compressor], State]:
        """Allocate the flat state for a run; return the compressors by the name of their channel, and the state.

        A compressor named LOCAL serves steps in which nothing leaves the node.
        """

    def compared_state(self) -> Tensors:
        """State that is the same on all ranks now. Ranks compare it before the first exchange."""
        return {}

    def progress(self) -> dict[str, Any]:
        """Milestones of the run on which all ranks must agree, with descriptions as keys."""
        return {}

    # A step, in the order of the calls -------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Prepare for a step. Called before its first gradient, and after the state was loaded."""

    @abc.abstractmethod
    def channel(self) -> str:
        """The name of the channel that this step uses. It depends only on what is equal on all ranks."""

    def first_flags(self) -> int:
        """The flags that the packets of this step start with."""
        return 0

    def earlier_presence(self) -> list[int] | None:
        """Per bucket, presence bits of earlier steps that this step's exchange includes; None if there are none."""
        return None

    def before_exchange(self) -> None:
        """Prepare for an exchange. Called before its first parameter is encoded."""

    @abc.abstractmethod
    def encode(self, position: int, part: Part, grad: Tensor | None, group: Group, scale: Scale) -> bool | None:
        """Update the local state with a gradient, to be multiplied by `scale`, and write what is sent into the packets.

        Without a gradient, write what follows from the state alone. In a hierarchical topology, a lane calls this.

        Returns:
            Whether the gradient was not finite; None if only the device knows.
        """

    @property
    def defers(self) -> bool:
        """Whether the host can finish this step before it knows the outcome, which `revert` then corrects."""
        return False

    @property
    def skips_together(self) -> bool:
        """Whether all ranks skip this step if one of them does."""
        return True

    def settle(self, flags: int) -> int:
        """Read the answers, given the flags that any rank raised. Returns the flags to continue with."""
        return flags

    @property
    def delays(self) -> bool:
        """With a delay, whether the answers of this step are applied in the next one. It depends only on what is equal
        on all ranks."""
        return True

    @property
    def answers_at_once(self) -> bool:
        """With a delay, whether the exchange of this step must end in the same `step()` all the same."""
        return False

    def keep(self) -> None:
        """With a delay, keep the answers of the exchange that has just ended, for `apply` in the next step."""

    def present(self) -> list[int]:
        """The positions of the parameters that this step moves, or the answers of an exchange that has just ended."""
        return self.context.session.present()

    @abc.abstractmethod
    def apply(self, position: int, parts: Sequence[Part], x: Tensor, low: Tensor | None, group: Group) -> None:
        """Move a parameter by the answer. `x` is dense float32. If it is a master copy, `low` is the parameter."""

    @property
    def apply_numbers(self) -> Sequence[str] | None:
        """The numbers of parameter groups that `apply_joined` reads, for parameters for which they are equal. None if
        parameters are moved one by one in this step."""
        return None

    def targets(self) -> Sequence[Tensor | None]:
        """By position, what `apply_joined` writes to, if that is not the parameters."""
        return self.context.params

    def apply_joined(self, positions: Sequence[int], part: Part, x: Tensor, group: Group) -> bool:
        """As `apply` for several parameters without masters: `part` has the runs of all, and `x` leads to them, or to
        their `targets`.

        Returns:
            False if it cannot: they must be moved one by one.
        """
        return False

    def after_apply(self) -> None:
        """Finish a step that was not skipped."""

    def end_step(self) -> None:
        """Finish a step, skipped or not."""

    def revert(self, positions: Sequence[int]) -> None:
        """Undo what the host counted for parameters that did not take the last deferred step."""

    # Replicas --------------------------------------------------------------------------------------------------------

    @property
    def is_synchronized(self) -> bool:
        """Whether all replicas are equal now."""
        return True

    def synchronize(self, apply_all: Callable[[], None]) -> None:
        """Make all replicas equal by an exchange outside of any step; `apply_all` calls `apply` for each parameter."""

    def agreed_value(self, position: int) -> Tensor:
        """The value of a parameter that all ranks share, without the local steps since then."""
        return self.context.params[position]

    # Saving, and continuing on other ranks ---------------------------------------------------------------------------

    def before_save(self, saved: dict[str, Any]) -> None:
        """Adapt a state dict before it is returned."""

    def portable(self, state: State, *, private: bool) -> State:
        """The part of the state that is valid now, in a form that can be cut into other slices and shards.

        A name may move to another kind: `own` is averaged over workers, `owned` is joined. State that is left out
        restarts from zero. Called once, on a rule that takes no more steps.

        Args:
            state: what `bind` returned.
            private: whether to include the state that each worker keeps for itself.
        """
        shared = state.shared()
        return replace(shared, own=state.own, owned=state.owned) if private else shared

    @property
    def needs_compression(self) -> bool:
        """Whether the state is invalid in a topology that does not compress."""
        return False

    def anchors(self) -> dict[int, Tensor]:
        """By position, the last values that all ranks shared, for parameters that this worker has moved since then."""
        return {}

    def inherit(self, values: Mapping[str, Tensor], anchors: Mapping[int, Tensor]) -> None:
        """Continue from the state of the old ranks, which was just copied into this rule's state.

        Args:
            values: the joined state of all old workers, by name, over the whole flat space.
            anchors: as `anchors`, of the old workers.
        """

    # Metrics ---------------------------------------------------------------------------------------------------------

    def contraction(self) -> float:
        """The fraction of this rank's last message that compression lost."""
        return math.nan

    def mean_abs_vote(self) -> float:
        """The mean magnitude of the mean vote in the last step: how much the workers agreed."""
        return math.nan


class RuleEncoder:
    """Adapts a rule to the session's `Encoder` interface.

    Args:
        rule: bound to a run.
        groups: the groups to use; None for those of the context at the time of the call.
    """

    def __init__(self, rule: UpdateRule, groups: list[Group] | None = None) -> None:
        self._rule = rule
        self._groups = groups

    def before_exchange(self) -> None:
        """See `Encoder`."""
        self._rule.before_exchange()

    def encode(self, position: int, part: Part, grad: Tensor | None, scale: Scale) -> bool | None:
        """See `Encoder`."""
        context = self._rule.context
        groups = context.groups if self._groups is None else self._groups
        return self._rule.encode(position, part, grad, groups[context.group_index[position]], scale)

    def for_lanes(self) -> RuleEncoder:
        """See `Encoder`. A scheduler may change the groups before the lanes encode."""
        return RuleEncoder(self._rule, [dict(group) for group in self._rule.context.groups])


def exchange_after_activation(rule: UpdateRule) -> int:
    """Exchange the update, after an activation round; return the flags of all ranks.

    One bit has no zero. In the first exchange of a run, the bits mark the coordinates that have a gradient; a second
    exchange in the same step carries the update. Compressors with an activation map need this.
    """
    session = rule.context.session
    session.flags &= ~packet.ACTIVATION
    return session.repeat(rule.channel(), RuleEncoder(rule))
