"""The base class of all optimizers: an optimizer has an update rule and a session.

    gradients → bucket → [mean over the node] → rule.encode → exchange → commit round → rule.apply → metrics

The rule (`thinwire.optimizers.rule`) is what a paper defines. The session (`thinwire.transport.session`) exchanges
packets. This file decides when to call them: in `step()` or, for a model given to `thinwire.attach`, as soon as
backward has a gradient. It is the same for all optimizers.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypedDict, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack  # which torch depends on; typing has it from Python 3.11 on

from thinwire._checks import is_integer
from thinwire._torch_compat import at_end_of_backward, scale_passed_to_step, unscales_in_step, write_count
from thinwire.errors import GradientChanged
from thinwire.kernels.modes import Scale
from thinwire.metrics import Meter, Metrics
from thinwire.optimizers import rank_states
from thinwire.optimizers import state_dict as state_dicts
from thinwire.optimizers.agreement import describe, describe_settings, require_agreement, require_same
from thinwire.optimizers.clipping import Clipping
from thinwire.optimizers.delay import Delay
from thinwire.optimizers.first_gradients import FirstGradients
from thinwire.optimizers.group_numbers import GroupNumbers
from thinwire.optimizers.inputs import (
    LOW_PRECISION,
    changed_gradient,
    check_frozen,
    check_not_averaged,
    check_parameters,
    check_rates_on_host,
    form_of,
    in_order_of,
    make_plain,
    refuse_capture,
    same_values,
    sample_of,
)
from thinwire.optimizers.joint_calls import Join, JointCalls
from thinwire.optimizers.lone_saves import LoneSaves
from thinwire.optimizers.rule import Context, RuleEncoder, UpdateRule
from thinwire.optimizers.safety import OF_STEPS, ReplicaCheck, Skips, name_of
from thinwire.optimizers.sharding import Sharding, is_sharded, local, with_lists
from thinwire.transport import packet
from thinwire.transport.failures import on_all_ranks
from thinwire.transport.layout import is_dense
from thinwire.transport.memory import HOST
from thinwire.transport.peers import Peers
from thinwire.transport.session import Session
from thinwire.transport.shards import Shards
from thinwire.transport.state import Tensors
from thinwire.transport.topology import Choice, choose

__all__ = ["Unpack", "WireOptimizer", "WireOptions"]


class WireOptions(TypedDict, total=False):
    """Arguments that all optimizers take besides those of their papers. `thinwire.Birder` describes each."""

    process_group: dist.ProcessGroup | None
    topology: Choice
    mesh: DeviceMesh | None
    node_dtype: torch.dtype
    bucket_mb: float | None
    max_consecutive_skips: int | None
    check_replicas_every: int
    clip_norm: float | None
    clip_value: float | None
    delay: int


@unscales_in_step
class WireOptimizer(Optimizer):
    """The base class of all optimizers. See the subclasses for their use.

    The phases of `step()`:

    1. encode the gradients that backward has not encoded already. When the last parameter of a bucket is encoded, the
       bucket goes to the transport, which exchanges buckets in order while the next ones are encoded;
    2. wait for the exchange;
    3. if any gradient on any rank was not finite, stop here, on all ranks;
    4. apply the answers.

    With `delay=1` (`thinwire.optimizers.delay`), `step()` leaves the exchange to itself in phase 2, and applies the
    answers of the step before. The next encoding waits for the exchange.

    Args:
        params: as in torch.optim.
        defaults: hyper-parameters for groups that do not set their own.
        rule: the update rule, which the paper defines.
        process_group, topology, mesh, node_dtype, bucket_mb, max_consecutive_skips, check_replicas_every, clip_norm,
            clip_value, delay: see `thinwire.Birder`.
    """

    _built = False
    _skip_words = OF_STEPS

    def __init_subclass__(cls) -> None:
        cls.__signature__ = _with_options(cls.__init__)

    def __init__(
        self,
        params: ParamsT,
        defaults: dict[str, Any],
        rule: UpdateRule,
        *,
        process_group: dist.ProcessGroup | None = None,
        topology: Choice = "auto",
        mesh: DeviceMesh | None = None,
        node_dtype: torch.dtype = torch.float32,
        bucket_mb: float | None = None,
        max_consecutive_skips: int | None = 100,
        check_replicas_every: int = 100,
        clip_norm: float | None = None,
        clip_value: float | None = None,
        delay: int = 0,
    ) -> None:
        if bucket_mb is not None and not 0 < bucket_mb < math.inf:
            raise ValueError(f"bucket_mb={bucket_mb!r}: expected a positive number, in megabytes of fp32 gradient")
        if node_dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"node_dtype={node_dtype!r}: expected torch.float32 or torch.bfloat16")
        self._rule = rule
        self._bucket_mb = bucket_mb
        self._node_dtype = node_dtype
        self._skips = Skips(max_consecutive_skips, self._skip_words)
        self._replica_check = ReplicaCheck(check_replicas_every)
        self._lone_saves = LoneSaves()
        self._clipping = Clipping(clip_norm, clip_value)
        self._delay = Delay(delay, rule.no_delay)
        self._first_gradients = FirstGradients(due=rule.moves_parameters)
        self._group_numbers = GroupNumbers()
        params = with_lists(params)
        self._sharding = sharding = Sharding.find(params, mesh, process_group)
        """How parameters are sharded; None if they are whole."""
        self._shards = Shards()
        """The ranks that hold the other shards of this replica."""
        if sharding is None or mesh is None:
            self._peers = Peers.of(process_group)
            self._topology = choose(topology, mesh, self._peers)
        else:
            self._check_shardable()
            self._peers, self._shards = Peers.of(mesh.get_group(0)), Shards(Peers.of(mesh.get_group(1)))
            self._topology = choose(topology, None, self._peers)
        self._meter = Meter()
        self._step_count = torch.zeros((), dtype=torch.int64, device=HOST)
        self._names: dict[Tensor, str] = {}
        self._after_step: list[Callable[[], None]] = []
        """Called after every step, even if step() then raises TooManySkips or ReplicasDiffer."""
        self._loading: list[tuple[Tensor, Tensor]] = []
        """Pairs of a state tensor and the tensor that load_state_dict copies into it."""
        self._agreed = False
        """Whether all ranks have ever agreed on the layout."""
        self._closed = False
        self._at_close: list[Callable[[], None]] = []
        """Called by `close()`."""
        self._delayed_positions: list[int] = []
        """With a delay, the positions that the answer of the last `step()` was for, skipped or not."""
        self._overflowed = False
        """Whether a gradient on any rank was not finite in the last step; unknown for a deferred step."""
        self._inverted: tuple[Tensor, int, Tensor] | None = None
        """A loss scale, its tensor version, and its inverse."""
        # Not self.defaults, because torch adds entries to it.
        self._hyperparameters = frozenset(defaults)
        super().__init__(params, defaults)
        self._build()
        state_dicts.install(self)

    def _check_shardable(self) -> None:
        """Reject shards if something of this optimizer needs whole parameters.

        Raises:
            TypeError: naming the optimizer.
            ValueError: naming the argument.
        """
        if self._rule.needs_whole is not None:
            raise TypeError(
                f"{type(self).__name__} with parameters of class DTensor, of which this rank has a shard: it needs "
                f"{self._rule.needs_whole}. thinwire.Birder, OneBitAdam with a number of warmup_steps, ZeroOneAdam, "
                "CDAdam and DistributedLion need shards only"
            )
        if self._clipping.norm is not None:
            raise ValueError(
                f"clip_norm={self._clipping.norm!r} with parameters of class DTensor, of which this rank has a shard: "
                "expected None. Use clip_value=; or thinwire.attach(model, optimizer, overlap=False), and "
                "torch.nn.utils.clip_grad_norm_, which clips the gradient of each replica"
            )
        if self._delay.steps:
            raise ValueError(
                f"delay={self._delay.steps} with parameters of class DTensor, of which this rank has a shard: expected "
                "0. All shards must know in the same step whether it is skipped. thinwire.compress takes a delay"
            )

    @property
    def _title(self) -> str:
        """What messages and state dicts call it: its class, or the function that made it."""
        return type(self).__name__ if self._rule.moves_parameters else "thinwire.compress"

    @property
    def _noun(self) -> str:
        return "optimizer" if self._rule.moves_parameters else "compression"

    @property
    def _exchange_time(self) -> str:
        """When an exchange is under way, for messages."""
        return "between backward and step()" if self._rule.moves_parameters else "during backward"

    def _settings_text(self) -> str:
        """The arguments on which the bits of a run depend, as text."""
        settings = self._settings()
        if self._topology.slices > 1:
            settings["node_dtype"] = self._node_dtype
        return ", ".join(f"{name}={value}" for name, value in settings.items())

    def _settings(self) -> dict[str, Any]:
        buckets = {"bucket_mb": self._bucket_mb} if self._rule.records_buckets else {}
        return {**buckets, **self._clipping.settings(), **self._delay.settings(), **self._rule.settings()}

    # Layout and state, made at construction --------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, as in torch.optim, before the first step and before `attach`."""
        if self._agreed or self._step_count > 0:
            raise RuntimeError(
                "add_param_group after the first step or attach: all ranks have already agreed on a layout. Give the "
                "optimizer all parameters when it is made, and then freeze some of them with requires_grad_(False)"
            )
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            make_plain(group)
            self._rule.check_group(group)
            self._check_parameters(group["params"])
            state_dicts.label(self, group)
            if self._built:
                self._build()
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise

    def _build(self) -> None:
        # A parameter that is frozen now is in no packet. One that is frozen later simply has no gradient.
        self._frozen = [p for group in self.param_groups for p in group["params"] if not p.requires_grad]
        self._allocate()

    def _follow_parameters(self) -> None:
        """Before the first step, allocate everything again if parameters were moved or converted in the meantime.

        Frameworks move a model to its device after the optimizer was made.
        """
        self._read_shards()
        if self._agreed or self._step_count > 0 or [form_of(p) for p in self._own_params] == self._forms:
            return
        self._check_parameters(self._flat_params)
        self._allocate()

    def _check_parameters(self, params: Sequence[Tensor]) -> None:
        if self._sharding is None and any(map(is_sharded, params)):
            raise TypeError(
                "a parameter of class DTensor beside others that are whole: expected all parameters to be sharded on "
                "one mesh, or none of them"
            )
        if self._sharding is not None:
            for p in params:
                self._sharding.check(p)
        check_parameters([local(p) for p in params])

    def _read_shards(self) -> None:
        """Let kernels use the present memory of sharded parameters, which FSDP may have replaced."""
        if self._sharding is not None:
            self._own_params[:] = map(local, self._flat_params)

    def _gradient_of(self, position: int) -> Tensor | None:
        """The memory of a gradient: of the shard of this rank, if the parameter is sharded."""
        p = self._flat_params[position]
        return p.grad if self._sharding is None else self._sharding.gradient_of(p)

    def _allocate(self) -> None:
        frozen = set(self._frozen)
        held = [(p, i) for i, group in enumerate(self.param_groups) for p in group["params"] if p not in frozen]
        devices = {p.device for p, _ in held}
        if len(devices) > 1:
            names = ", ".join(sorted(map(str, devices)))
            raise ValueError(f"parameters on devices {names}: an optimizer needs all its parameters on one device")
        device = devices.pop() if devices else torch.device("cpu")
        self._session = session = Session(
            [local(p).numel() for p, _ in held],
            device,
            self._peers,
            self._topology,
            bucket_mb=self._bucket_mb,
            buckets=self._rule.buckets,
            node_dtype=self._node_dtype,
            meter=self._meter,
        )
        if self._delay.steps and session.side is not None:
            raise ValueError(
                f"delay={self._delay.steps} with parameters on {str(device)!r}: expected parameters on the CPU, or "
                "delay=0. Exchanges on a device cannot be left in flight yet"
            )
        slots = session.layout.slots
        self._flat_params: list[Tensor] = [held[slot.index][0] for slot in slots]
        """The parameters that take part, in the order of the flat space."""
        self._own_params = list(map(local, self._flat_params))
        """Their memory on this rank, which kernels read and move: the parameters, or the shards of this rank."""
        group_index = [held[slot.index][1] for slot in slots]
        shard = 0 if self._sharding is None else self._sharding.shard
        delayed = bool(self._delay.steps)
        self._context = Context(session, self._own_params, group_index, self.param_groups, delayed=delayed, shard=shard)
        compressors, self._flat_state = self._rule.bind(self._context)
        self._flat_state.include(self._clipping.bind(session.layout, session.kernels))
        self._flat_state.include(self._delay.bind(len(slots)))
        session.open_channels(compressors)
        self._encoder = RuleEncoder(self._rule)
        self._state_of: list[Tensors] = self._context.state_of
        """By position, the state of each parameter."""
        self._shown_of: list[Tensors] = []
        """The same memory in separate tensor objects, which `state` exposes. Users cannot damage the others by them."""
        self._all_shown: list[Tensor] = []
        """All of them, one after another."""
        for position, p in enumerate(self._own_params):
            state = {"step": self._step_count, **self._flat_state.of(session.layout, self._topology.node, position, p)}
            if p.dtype in LOW_PRECISION and self._rule.moves_parameters:
                order = torch.preserve_format if is_dense(p) else torch.contiguous_format
                state["master"] = torch.empty_like(p, dtype=torch.float32, memory_format=order).copy_(p.detach())
            self._state_of.append(state)
        whole = self._sharding is None
        joinable = [whole and p.is_contiguous() and p.dtype == torch.float32 for p in self._own_params]
        self._joint_calls = JointCalls(self._rule, joinable)
        state_dicts.expose(self)
        self._forms = [form_of(p) for p in self._own_params]
        self._addresses: list[int] = []
        """Where parameters were when their forms were last compared."""
        self._located = False
        """Whether they are known to be there in this call of `step()`."""
        self._built = True
        self._begin_step()

    def _clip(self, clip_norm: float | None, clip_value: float | None) -> None:
        """Set limits that the constructor was not given. For frameworks, which have arguments of their own for them.

        Raises:
            RuntimeError: after the first step, `attach` or `load_state_dict`: limits are part of the state.
        """
        if self._agreed or self._step_count > 0:
            raise RuntimeError(
                f"clip_norm={clip_norm!r}, clip_value={clip_value!r} for a {self._title} that is in use already. Give "
                "them to its constructor"
            )
        self._clipping = Clipping(clip_norm, clip_value)
        self._allocate()
        for group in self.param_groups:
            state_dicts.label(self, group)

    def _prepare(self, names: dict[Tensor, str] | None = None) -> None:
        """Before the first exchange, compare all settings with all ranks, then connect.

        Called by the first `step()` after construction or `load_state_dict()`, or by `attach`, which knows the
        parameters' names.

        Raises:
            RuntimeError: on every rank, if ranks disagree; also after `close()`.
            ValueError: on every rank, if it is unknown which ranks form a node, or if nodes differ in their number of
                ranks.
        """
        if self._session.connected and names is None and not self._closed:
            return
        self._follow_parameters()
        if self._closed:
            raise RuntimeError(
                f"this {self._title} is closed: make a new one, and load the state_dict() of this one. Call "
                "thinwire.detach(model) first, if a model was given to thinwire.attach or thinwire.compress"
            )
        self._peers.check_initialized_first()
        if self._rule.moves_parameters:
            check_not_averaged(self._flat_params)
        self._names = names or self._names
        if names is not None:
            self._first_gradients.due = False  # DDP no longer averages them
        self._complete()  # ranks compare what the exchange in flight changes
        state_dicts.check_unchanged(self, thoroughly=True)
        description = describe(self, self._names)
        name = on_all_ranks(self._shards.peers, lambda: require_agreement(self._peers, description))
        if self._sharding is not None:
            require_agreement(self._shards.peers, describe_settings(self))
        self._agreed = True
        self._group_numbers.restart()
        if self._topology.problem is not None:
            raise ValueError(self._topology.problem)
        if not self._session.connected:
            self._session.connect(name)

    def close(self) -> None:
        """End the threads and connections of this optimizer. It can take no more steps; its state can still be read.

        An optimizer that is no longer referenced closes itself when it is garbage-collected. With `delay=1` an exchange
        may be in flight. It gets a few seconds to end; if it does not, `state_dict()` raises an error.
        """
        self._closed = True
        try:
            if self._delay.in_flight:
                self._session.transport.close()  # `_complete` may still ask for the outcome
            else:
                self._disconnect()
        finally:
            while self._at_close:
                self._at_close.pop()()

    def _disconnect(self) -> None:
        """End threads and connections until `_prepare` makes new ones."""
        self._session.disconnect()

    # A step ----------------------------------------------------------------------------------------------------------

    def _begin_step(self) -> None:
        """Start a new step, and discard what was encoded for the last one."""
        self._forget_gradients()
        self._begin_exchange()

    def _forget_gradients(self) -> None:
        """Discard what is known of the gradients of the last step, and of where parameters are."""
        self._located = False
        self._states_of_others: list[rank_states.States] | None = None
        """What `consolidate_state_dict` gathered on this rank, until the state changes."""
        self._watched: dict[int, tuple[int, int, Tensor]] = {}
        """By position, the memory of a gradient that backward has completed, how often it was written to, a sample."""
        self._watched_joins: list[tuple[Sequence[int], list[int], list[int], list[Tensor]]] = []
        """The same of gradients that were encoded together: for each join positions, addresses, writes, samples."""

    def _begin_exchange(self) -> None:
        """Prepare the exchange of the next step. No other may be under way, because lanes read what changes here."""
        context, rule = self._context, self._rule
        context.groups = self.param_groups
        context.step = int(self._step_count) + 1
        for numbers in self._flat_state.numbers:
            numbers.read()
        self._clipping.begin_step()
        self._joint_calls.begin_step()
        self._waits_for_backward = False
        """Whether `_encode_waiting` is called at the end of the backward under way."""
        rule.begin_step()
        self._session.begin_step(
            context.step, rule.channel(), flags=rule.first_flags(), earlier=rule.earlier_presence()
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take one optimization step, together with all other ranks.

        Args:
            closure: re-evaluates the model and returns the loss, as in torch.optim; called once.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._take_step(self._inverse(scale_passed_to_step(self)))
        return loss

    def _take_step(self, scale: Scale) -> None:
        """Encode what is not encoded yet, with gradients times `scale`; exchange, and apply the answers."""
        self._follow_parameters()
        rule, session = self._rule, self._session
        self._located = False  # parameters may have moved since backward
        self._encode_waiting()
        self._context.groups = self.param_groups
        check_rates_on_host(self.param_groups)
        for group in self.param_groups:
            make_plain(group)
            rule.check_group(group)
        refuse_capture(session.layout.device)
        check_frozen(self._frozen)
        state_dicts.check_unchanged(self)
        rest, gradients = self._not_encoded()
        self._prepare()
        self._complete()
        self._read_outcomes()
        if self._first_gradients.due:
            with self._shards.failing_together(self._context.step):
                self._first_gradients.compare(
                    self._peers, self._flat_params, list(gradients.values()), self._context.step
                )
        session.transport.agreed = self._group_numbers.note(self._context.step, self.param_groups)
        shards = self._shards.failing_together(self._context.step)
        with shards, self._naming_differences(), session.transport.abort_on_error():
            for item in rest:
                if isinstance(item, Join):
                    session.encode_joined(item.positions, item.part, item.memory, scale, self._encoder)
                else:
                    self._encode(item, gradients[item], scale)
            changed = self._changed_gradient()
            if changed is not None:
                # Raised after the exchange, on all ranks, because the others may not have changed theirs.
                session.transport.refuse(changed)
            together, delayed = rule.skips_together, bool(self._delay.steps) and rule.delays
            if delayed:
                session.leave()
                self._delay.in_flight = True
                skipped, positions = self._delay.take()
                self._overflowed, self._delayed_positions = skipped, positions
            else:
                # The other shards must know the outcome in this step.
                seen = session.wait(defer=rule.defers and self._sharding is None)
                seen = self._settle_with_shards(seen)
                flags = rule.settle(seen)
                session.transport.check_refusal()
                if together:
                    self._group_numbers.confirm()
                # A rule may take a step all the same, or learn of other ranks' gradients only when it settles.
                self._overflowed = bool((seen | flags) & packet.NONFINITE)
                skipped, positions = bool(flags & packet.NONFINITE), None
            if skipped:
                self._meter.skipped_steps += 1
            else:
                self._apply_answers(positions)
            rule.end_step()
            self._clipping.end_step()
            self._write_numbers()
            self._meter.steps += 1
            self._step_count += 1
            if not self._delay.in_flight:
                self._begin_step()
            else:
                self._forget_gradients()
                if rule.answers_at_once:
                    self._complete()
        for call in self._after_step:
            call()
        if together and not session.deferred:
            self._skips.note(int(self._step_count) - delayed, skipped=self._overflowed)
        self._replica_check.after(self, int(self._step_count))

    def _not_encoded(self) -> tuple[Sequence[Join | int], dict[int, Tensor | None]]:
        """What is not encoded yet, in flat order, and the gradients of those positions that are encoded one by one."""
        rest = [position for position, encoded in enumerate(self._session.encoded) if not encoded]
        own, items = self._own_params, None
        compared = self._first_gradients.due and self._peers.size > 1
        if len(rest) < len(own) or self._sharding is not None or self._clipping.clips or compared:
            found = list(map(self._gradient_of, rest))
        else:
            found = [p.grad for p in self._flat_params]
            items = self._joint_calls.encodings(found) if self._known_addresses() is not None else None
        if items is None:
            return rest, {i: in_order_of(own[i], grad) for i, grad in zip(rest, found, strict=True)}
        return items, {item: in_order_of(own[item], found[item]) for item in items if not isinstance(item, Join)}

    def _known_addresses(self) -> Sequence[int] | None:
        """Where the parameters are, by position; None if one of them is not as it was when its state was made."""
        if self._located:
            return self._addresses  # `step()` has the processor's cache fetch all parameters once, not twice
        addresses = list(map(Tensor.data_ptr, self._own_params))
        if addresses != self._addresses or not all(map(Tensor.is_contiguous, self._own_params)):
            if list(map(form_of, self._own_params)) != self._forms:
                return None
            self._addresses = addresses
        self._located = True
        return self._addresses

    def _complete(self) -> None:
        """With `delay=1`, wait for the exchange of the last step, keep its answer, and begin the next step.

        Called before anything that the exchange must not see, such as the next encoding. Other ranks need not call it
        at the same time: they commit without it.
        """
        if not self._delay.in_flight:
            return
        session, rule = self._session, self._rule
        with session.transport.abort_on_error():
            flags = rule.settle(session.wait())
            session.transport.check_refusal()
            self._delay.in_flight = False
            self._group_numbers.confirm()
            skipped = bool(flags & packet.NONFINITE)
            if not skipped:
                rule.keep()
            self._delay.keep(rule.present(), skipped=skipped)
            self._begin_exchange()

    def _settle_with_shards(self, flags: int) -> int:
        """Given the flags of this rank's shard, those of all shards of the replica, and so of the mesh."""
        if self._sharding is None:
            return flags
        step, agreed = self._context.step, self._session.transport.agreed
        with self._meter.exposed_wait:
            nonfinite, differs = self._shards.settle(step, nonfinite=bool(flags & packet.NONFINITE), agreed=agreed)
        if differs is not None:
            self._group_numbers.raise_difference(self._shards.peers, packet.Disagreement(differs, step))
        return flags | packet.NONFINITE if nonfinite else flags

    def _watch(self, position: int) -> None:
        """Note the gradient that backward has accumulated. Called by `attach` if it does not call `_encode_early`.

        In the first step gradients are not encoded early. They are noted all the same: a change that would be without
        effect in the second step must not have one in the first.
        """
        grad = self._gradient_of(position)
        if grad is not None:
            self._watched[position] = grad.data_ptr(), write_count(grad), sample_of(grad)

    def _changed_gradient(self) -> GradientChanged | None:
        """The error for the first gradient that was changed, or replaced by another one, since backward completed it.

        A write that changes nothing is none: to log the norm, transformers.Trainer clips to infinity.
        """
        watched = [(position, *each) for position, each in self._watched.items()]
        for positions, *each in self._watched_joins:
            gradients = [self._gradient_of(position) for position in positions]
            # As below for all of them at once, which is faster.
            if set(map(type, gradients)) == {Tensor}:
                present = cast("list[Tensor]", gradients)
                if [list(map(Tensor.data_ptr, present)), list(map(write_count, present))] == each[:2]:
                    continue
            watched += zip(positions, *each, strict=True)
        for position, address, writes, sample in watched:
            grad = self._gradient_of(position)
            if grad is None or (grad.data_ptr() == address and write_count(grad) == writes):
                continue
            if not same_values(sample, sample_of(grad)):
                return changed_gradient(name_of(self, position))
        return None

    def _collect(self, position: int, grad: Tensor, scale: Scale, *, in_backward: bool = True) -> bool:
        """Let a gradient wait for others that are encoded together with it: at the latest until the end of backward or,
        if this is not called by a hook of autograd, until `_take_step`.

        Returns:
            Whether it could: otherwise the gradient must be encoded by itself.
        """
        session = self._session
        if grad.dtype != torch.float32 or grad.layout != torch.strided or type(grad) is not Tensor:
            return False
        if self._clipping.clips or self._sharding is not None or session.encoded[position]:
            return False
        self._complete()
        join = self._joint_calls.collect(position, grad, scale)
        if join is False:
            return False
        session.encoded[position] = True
        if isinstance(join, Join):
            with session.transport.abort_on_error():
                self._encode_collected(join)
        elif in_backward and not self._waits_for_backward:
            # After backward the user may change gradients, and expects an error for all of them or for none.
            self._waits_for_backward = True
            at_end_of_backward(self._encode_waiting)
        return True

    def _encode_collected(self, join: Join) -> None:
        gradients, scale, addresses = self._joint_calls.take(join)
        if addresses is None or self._known_addresses() is None:
            for position, grad in zip(join.positions, gradients, strict=True):
                self._encode_one(position, grad, scale)
            return
        if self._rule.moves_parameters:
            for position in join.positions if self._watched else ():
                self._watched.pop(position, None)  # of an earlier backward
            sample = self._joint_calls.sample(join, addresses)
            self._watched_joins.append((join.positions, addresses, list(map(write_count, gradients)), sample))
        self._context.groups = self.param_groups
        self._session.encode_joined(join.positions, join.part, join.memory, scale, self._encoder)

    def _encode_waiting(self) -> None:
        """Encode what still waits for gradients that this backward has not computed."""
        self._waits_for_backward = False
        for position, grad, scale in self._joint_calls.take_waiting():
            with self._session.transport.abort_on_error():
                self._encode_one(position, grad, scale)

    def _encode_one(self, position: int, grad: Tensor, scale: Scale) -> None:
        self._context.groups = self.param_groups
        if self._rule.moves_parameters:  # otherwise they are vectors that belong to DDP
            self._watched[position] = grad.data_ptr(), write_count(grad), sample_of(grad)
            self._encode(position, in_order_of(self._own_params[position], grad), scale)
        else:
            self._encode(position, grad, scale)

    def _encode_early(self, position: int, scale: Scale) -> None:
        """Encode one parameter's gradient before `step()` does, and note it as `_watch` does. Called by `attach` during
        backward."""
        refuse_capture(self._session.layout.device)
        if not self._session.connected or self._closed:
            # After load_state_dict(), step() repeats the agreement. Backward cannot: on each rank it may run between
            # different collectives of the user.
            self._watch(position)
            return
        grad = self._gradient_of(position)
        if grad is not None and self._collect(position, grad, scale):
            return
        self._watch(position)
        self._context.groups = self.param_groups
        with self._session.transport.abort_on_error():
            self._encode(position, in_order_of(self._own_params[position], grad), scale)

    def _encode(self, position: int, grad: Tensor | None, scale: Scale) -> None:
        self._complete()
        p = self._own_params[position]
        if form_of(p) != self._forms[position]:
            raise RuntimeError(
                f"a parameter is {form_of(p)}, but was {self._forms[position]} in the first step, or when it was "
                "attached. Convert the model first, and then attach or make the optimizer"
            )
        if grad is not None and self._clipping.clips:
            with self._meter.stage:
                grad, scale = self._clipping.clip(position, grad, scale)
        self._session.encode(position, grad, scale, self._encoder)

    def _apply_answers(self, positions: Sequence[int] | None = None) -> None:
        """Apply the answers of this step or, with a delay, those that are kept for some positions."""
        with self._meter.apply:
            self._apply_all(positions)
            self._session.gate(len(self._flat_params))
            self._rule.after_apply()

    def _apply_all(self, positions: Sequence[int] | None = None) -> None:
        moved = positions
        if moved is None:
            known = self._known_addresses() if self._rule.apply_numbers is not None else None
            moved = self._joint_calls.movements(self._rule.present(), known)
        for item in moved:
            if not isinstance(item, Join):
                self._apply((item,))
            elif not self._rule.apply_joined(
                item.positions, item.part, item.memory, self._context.group_of(item.positions[0])
            ):
                self._apply(item.positions)

    def _apply(self, positions: Iterable[int]) -> None:
        parts_of = self._session.channel.buffers.parts
        for position in positions:
            p = self._own_params[position]
            dense = p if not self._rule.moves_parameters or is_dense(p) else p.contiguous()
            master = self._state_of[position].get("master")
            x, low = (dense, None) if master is None else (master, dense)
            self._session.gate(position)
            self._rule.apply(position, parts_of[position], x, low, self._context.group_of(position))
            if dense is not p:
                p.copy_(dense)

    def _write_numbers(self) -> None:
        for numbers in self._flat_state.numbers:
            numbers.write()

    def _finish_exchange(self) -> None:
        """Complete an exchange that backward has begun if no step() will. All ranks complete it and discard it."""
        if not self._session.connected:
            return
        self._complete()
        self._encode_waiting()
        with self._session.transport.abort_on_error():
            self._session.encode_rest(self._encoder)
        self._read_outcomes()
        # As step() on another rank, if that is what completes the exchange there.
        self._session.transport.agreed = self._group_numbers.note(self._context.step, self.param_groups)
        with self._naming_differences():
            self._session.transport.wait()

    @contextmanager
    def _naming_differences(self) -> Iterator[None]:
        """If ranks find that the numbers of their parameter groups differ, raise an error that names the first."""
        try:
            yield
        except packet.Disagreement as found:
            if self._session.side is not None or self._delay.steps:
                raise  # the host learns of it later, and not at the same point of all programs
            self._group_numbers.raise_difference(self._peers, found)

    # Replicas --------------------------------------------------------------------------------------------------------

    @property
    def is_synchronized(self) -> bool:
        """Whether all replicas are equal, and every answer is applied.

        Replicas always are, except between the local steps of `thinwire.ZeroOneAdam`. With `delay=1` the answer of the
        last step is applied in the next one, or by `synchronize()`.
        """
        return self._rule.is_synchronized and not self._delay.pending

    @torch.no_grad()
    def synchronize(self) -> None:
        """Make all replicas equal now, and apply what is in flight, before you evaluate.

        Call it on all ranks, after `step()`. Only `thinwire.ZeroOneAdam` and `delay=1` need it. With a delay it waits
        for the exchange of the last step, and applies its answer with the present learning rate; the next step then
        applies nothing. To save and resume it is not needed: the answer is part of the state.

        Raises:
            RuntimeError: between backward and `step()`, if gradients have already been sent; on all ranks, if some
                ranks did not call it.
        """
        if any(self._session.encoded) and (self._rule.has_local_steps or self._delay.steps):
            raise RuntimeError("synchronize() between backward and step(): call it after step(), on all ranks")
        if self._delay.pending:
            self._apply_answers(self._take_pending())
            self._write_numbers()
        self._make_replicas_equal()

    def _take_pending(self) -> list[int]:
        """Wait for the exchange in flight; the positions for which an answer is then to be applied."""
        self._complete()
        if not self._delay.pending:
            return []
        # If some ranks do not call it, the next exchange fails on all.
        self._group_numbers.note(self._context.step, self.param_groups)
        return self._delay.take()[1]

    def _make_replicas_equal(self) -> None:
        """Undo the differences between replicas that local steps have made. All ranks call it."""
        if not self._rule.has_local_steps or self._rule.is_synchronized:
            return
        self._prepare()
        with self._naming_differences(), self._session.transport.abort_on_error():
            self._rule.synchronize(self._apply_all)
            self._group_numbers.confirm()
            self._write_numbers()
            self._begin_step()

    # Deferred outcomes: on a GPU, the host reads one step later whether a step was taken -----------------------------

    def _read_outcomes(self) -> None:
        """Read the outcomes of deferred steps, and correct what the host counted for them.

        Raises:
            CorruptPacket: if a packet was refused. No step has been applied since then.
            TooManySkips: as in `step()`.
        """
        outcomes = [
            (step, bool(flags & packet.NONFINITE), present) for step, flags, present in self._session.outcomes()
        ]
        for _, skipped, present in outcomes:
            self._meter.skipped_steps += skipped
            taken = set() if skipped else set(present)
            self._rule.revert([position for position in range(len(self._flat_params)) if position not in taken])
            self._write_numbers()
        for step, flags, _ in outcomes:
            self._skips.note(step, skipped=bool(flags & packet.NONFINITE))

    def _overflow(self) -> bool | Tensor:
        """Whether a gradient on any rank was not finite in the last step; a tensor of one float if only the device
        knows."""
        overflow = self._session.overflow()
        return self._overflowed if overflow is None else overflow

    def _inverse(self, scale: Tensor | None) -> Scale:
        """The factor for gradients of a loss that was multiplied by `scale`."""
        if scale is None:
            return 1.0
        if self._session.side is None:
            return 1.0 / float(scale)
        # Needed for every gradient, and changed once per step. The scale is referenced, so that no other tensor can
        # take its place in memory.
        if self._inverted is None or self._inverted[0] is not scale or self._inverted[1] != write_count(scale):
            inverse = scale.detach().to(torch.float64).reciprocal().to(torch.float32)
            self._inverted = (scale, write_count(scale), inverse)
        return self._inverted[2]

    # Reading ---------------------------------------------------------------------------------------------------------

    def metrics(self) -> Metrics:
        """The bytes, times and counters of this rank since the start."""
        self._read_outcomes()
        return self._meter.read(mean_abs_vote=self._rule.mean_abs_vote(), contraction=self._rule.contraction())

    # Saving ----------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """As in torch.optim. Each rank has its own state, so every rank must save, unless `consolidate_state_dict` was
        called.

        With several ranks, an entry under which each rank has its own values is a dict: `{"rank1": tensor}`. So
        torch.distributed.checkpoint saves the tensors of all ranks.

        Raises:
            RuntimeError: between backward and `step()`, if gradients have already been sent; also if replicas differ,
                between the local steps of `thinwire.ZeroOneAdam`.
        """
        saved = self._state_of_this_rank()
        if self._peers.size == 1:
            return saved
        if not self._rule.is_synchronized:
            raise RuntimeError(
                f"state_dict() between two synchronizations of {self._title}: ranks have taken local steps, so their "
                "weights differ, and a model saved now is that of one rank. Call synchronize() on all ranks first. "
                "consolidate_state_dict() and thinwire.checkpoint.save() do it themselves"
            )
        saved["state"] = rank_states.split(saved["state"], self._flat_state, self._peers)
        if self._states_of_others is not None:
            saved["state"] = rank_states.merge(saved["state"], self._states_of_others)
        elif self._flat_state.names_of_rank():
            self._lone_saves.note(self._peers.rank)
        if self._sharding is not None:
            params = [p for group in self.param_groups for p in group["params"]]
            state = self._flat_state
            shaped = ("master", *state.whole, *(state.own if self._topology.slices == 1 else ()))
            saved["state"] = self._sharding.wrap(saved["state"], params, shaped, state.names_of_rank())
        return saved

    def _state_of_this_rank(self) -> dict[str, Any]:
        """The state dict of this rank, not divided by rank, even if replicas differ."""
        saved = super().state_dict()
        self._rule.before_save(saved)
        return saved

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Gather the states of all ranks on rank `to`. Call it on all ranks, after `step()`.

        Until the next step, `state_dict()` on rank `to` returns the states of all ranks. Every rank can load its own
        from it, exactly. Lightning calls this method before it saves. Replicas that differ are synchronized first, so
        save the model after this call.

        Args:
            to: a rank of the optimizer's process group; the same on all ranks. It needs memory for all states.

        Raises:
            ValueError: on every rank, if `to` is not a rank.
            RuntimeError: on every rank, if any is between backward and `step()`, or if they disagree on `to`.
            PeerLost: if a rank does not call it.
        """
        peers, stage = self._peers, "the states of all ranks"
        if self._sharding is not None:
            raise RuntimeError(
                "consolidate_state_dict() with sharded parameters: no rank has room for all shards. Save with "
                "torch.distributed.checkpoint on all ranks"
            )

        def check() -> None:
            if not is_integer(to, 0, peers.size - 1):
                raise ValueError(f"to={to!r}: expected a rank, from 0 to {peers.size - 1}")
            state_dicts.check_saveable(self)

        on_all_ranks(peers, check)
        if peers.size == 1:
            return
        seen = peers.gather((to, self._rule.is_synchronized), stage)
        require_same("the rank `to` of consolidate_state_dict()", [repr(each) for each, _ in seen])
        require_same("whether local steps were taken since they were synchronized", [repr(each) for _, each in seen])
        self._make_replicas_equal()
        own = rank_states.split(self._state_of_this_rank()["state"], self._flat_state, peers)
        gathered = peers.gather_on(to, rank_states.of_rank(own) if peers.rank != to else None, stage)
        if gathered is not None:
            self._states_of_others = [states for states in gathered if states is not None]

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            f"{type(self).__name__} has threads and process groups, which cannot be copied or pickled: "
            "save state_dict(), and load it into a new optimizer"
        )


def _with_options(constructor: Callable[..., None]) -> inspect.Signature:
    """The signature of a constructor, with `**wire` replaced by the options of `WireOptimizer`, for help and tools."""
    own, options = inspect.signature(constructor), inspect.signature(WireOptimizer.__init__).parameters
    own_parameters = [p for p in own.parameters.values() if p.name not in ("self", "wire")]
    wire_options = [options[name] for name in WireOptions.__annotations__] if "wire" in own.parameters else []
    return own.replace(parameters=[*own_parameters, *wire_options])
