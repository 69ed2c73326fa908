"""The one file that orders the stages of a step.

    gradients → bucket → local rule → codec → exchange → apply → metrics

A paper is a subclass. It says what it keeps (`_declare`), what it sends (`_local`, `_seal`), how the owner of a shard
answers (`_merge`), and what everybody does with the answer (`_apply`). When and by whom these are called is decided
here and is the same for all: by `step()`, or, for a model given to `thinwire.attach`, as soon as backward has a
gradient.
"""

from __future__ import annotations

import abc
import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from thinwire._version import __version__
from thinwire.kernels import ops
from thinwire.metrics import Meter, Metrics
from thinwire.optimizers import _state_dict
from thinwire.optimizers._agreement import require_agreement
from thinwire.optimizers._inputs import LOW_PRECISION, check_dtypes, checksum, gradient_of
from thinwire.wire import packet
from thinwire.wire.buckets import WORD, Layout, bucket_elements, is_dense
from thinwire.wire.exchange import Exchange, Peers
from thinwire.wire.lane import Lane
from thinwire.wire.mail import Frame, Mail, Part, Payload


class WireOptimizer(Optimizer, abc.ABC):
    """What all of thinwire's optimizers share; see the subclasses for use.

    The phases of `step()`:

    1. encode the gradients that backward has not encoded already; a bucket whose last parameter is encoded goes to the
       lane, which exchanges buckets in order while the next are being encoded;
    2. wait for the lane;
    3. if any gradient on any rank was not finite, stop here, on all ranks;
    4. apply the answers.
    """

    # GradScaler would otherwise decide a rank at a time whether step() is called, and the others would wait for ever.
    _step_supports_amp_scaling = True
    _built = False

    def __init__(
        self,
        params: ParamsT,
        defaults: dict[str, Any],
        *,
        seed: int,
        process_group: dist.ProcessGroup | None,
        bucket_mb: float | None,
    ) -> None:
        if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
            raise ValueError(f"seed={seed!r}: expected an integer in [0, 2**63)")
        if bucket_mb is not None and not 0 < bucket_mb < math.inf:
            raise ValueError(f"bucket_mb={bucket_mb!r}: expected a positive number, in megabytes of fp32 gradient")
        self._seed = seed
        self._bucket_mb = bucket_mb
        self._peers = Peers.of(process_group)
        self._meter = Meter()
        self._step_count = torch.zeros((), dtype=torch.int64)
        self._prepared = False
        # What load_state_dict is about to copy: our state, and pairs of (own, loaded).
        self._loading: tuple[dict[Tensor, dict[str, Tensor]], list[tuple[Tensor, Tensor]]] = ({}, [])
        super().__init__(params, defaults)
        self._build()
        _state_dict.install(self)

    # What a paper says -----------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def _check_group(self, group: dict[str, Any]) -> None:
        """Refuse hyper-parameters that make no sense."""

    @abc.abstractmethod
    def _settings(self) -> dict[str, Any]:
        """Arguments of the constructor, beyond those of parameter groups, on which all ranks must agree."""

    @abc.abstractmethod
    def _declare(self, layout: Layout) -> tuple[Payload, dict[str, Tensor]]:
        """Allocate the flat state; tell how many words a packet carries, and the state's tensors by name.

        A tensor as long as the flat space is given out a parameter at a time; one of a bit an element, in words.
        """

    @abc.abstractmethod
    def _local(self, part: Part, grad: Tensor | None, group: dict[str, Any], scale: float) -> bool:
        """The local rule for a part of a parameter, given the parameter's gradient times `scale`.

        Writes its bits into the packets; returns whether the gradient was not finite. Without a gradient the bits are
        those of the state as it is.
        """

    @abc.abstractmethod
    def _seal(self, frame: Frame) -> None:
        """Add to a bucket's packets what is known only when all its parameters are encoded."""

    @abc.abstractmethod
    def _merge(self, frame: Frame, shard: int) -> None:
        """As the owner of `shard`, turn the packets received into an answer. Runs on the lane."""

    @abc.abstractmethod
    def _apply(self, part: Part, x: Tensor, low: Tensor | None, group: dict[str, Any]) -> None:
        """Move a part of a parameter by the answer. `x` is fp32, dense; if it is a master, `low` is the parameter."""

    def _first_flags(self) -> int:
        """The flags with which this step's packets start out."""
        return 0

    def _settle(self, flags: int) -> int:
        """What happens between the exchange and the apply, given the flags seen; returns those to go on with."""
        return flags

    def _conclude(self) -> None:
        """What happens after the apply."""

    def _mean_abs_vote(self) -> float:
        """How much the workers agreed in the last step."""
        return math.nan

    def _settings_text(self) -> str:
        """The arguments that decide the bits of a run, for people to read."""
        return ", ".join(f"{name}={value}" for name, value in {"seed": self._seed, **self._settings()}.items())

    # Layout and state, made at construction --------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, as in torch.optim; possible until the first step or `attach`."""
        if self._prepared or self._step_count > 0:
            raise RuntimeError(
                "add_param_group after the first step or attach: all ranks have agreed on a layout by now. Give the "
                "optimizer all parameters when it is made, and freeze with requires_grad_(False) what shall wait"
            )
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            self._check_group(group)
            check_dtypes(group["params"])
            _state_dict.label(self, group)
            if self._built:
                self._build()
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise

    def _build(self) -> None:
        # A parameter that is frozen now takes no room on the wire. Freezing one later is fine: it just has no gradient.
        owned = [(p, i) for i, group in enumerate(self.param_groups) for p in group["params"] if p.requires_grad]
        self._frozen = [p for group in self.param_groups for p in group["params"] if not p.requires_grad]
        devices = {p.device for p, _ in owned}
        if len(devices) > 1:
            names = ", ".join(sorted(map(str, devices)))
            raise ValueError(f"parameters on devices {names}: an optimizer needs all its parameters on one device")
        self._kernels = ops.backend(devices.pop() if devices else torch.device("cpu"))
        numels = [p.numel() for p, _ in owned]
        layout = Layout(numels, self._peers.size, bucket_elements(self._bucket_mb, sum(numels)))
        self._flat_params: list[Tensor] = [owned[slot.index][0] for slot in layout.slots]
        """The parameters that take part, in the order of the flat space."""
        self._group_index = [owned[slot.index][1] for slot in layout.slots]
        payload, flat_state = self._declare(layout)
        self._mail = Mail(layout, payload, alone=self._peers.size == 1)
        self.state.clear()
        for p, slot in zip(self._flat_params, layout.slots, strict=True):
            state: dict[str, Tensor] = {"step": self._step_count}
            for name, flat in flat_state.items():
                packed = flat.numel() != layout.size
                state[name] = flat[slot.start // WORD : slot.stop // WORD] if packed else layout.view(flat, slot, p)
            if p.dtype in LOW_PRECISION:
                order = torch.preserve_format if is_dense(p) else torch.contiguous_format
                state["master"] = torch.empty_like(p, dtype=torch.float32, memory_format=order).copy_(p.detach())
            self.state[p] = state
        self._forms = [_form(p) for p in self._flat_params]
        self._built = True
        self._begin_step()

    def _group_of(self, position: int) -> dict[str, Any]:
        # Looked up each time: load_state_dict replaces the groups.
        return self.param_groups[self._group_index[position]]

    def _prepare(self, names: dict[Tensor, str] | None = None) -> None:
        """Before the first exchange: agree with everybody on everything, then open the lane.

        Called by the first `step()`, or by `attach`, which knows the parameters' names.

        Raises:
            RuntimeError: on every rank, when ranks disagree.
        """
        if self._prepared and names is None:
            return
        self._peers.refuse_late_group()
        require_agreement(self._peers, self._description(names or {}))
        if self._prepared:
            return
        group = self._peers.private_group()
        self._exchange = Exchange(self._mail, self._peers, group, self._meter)
        self._lane = Lane(threaded=group is not None)
        self._prepared = True

    def _description(self, names: dict[Tensor, str]) -> dict[str, Any]:
        description: dict[str, Any] = {
            "the optimizer's class": type(self).__name__,
            "thinwire's version": __version__,
            "seed": self._seed,
            "bucket_mb": self._bucket_mb,
            **self._settings(),
            "the number of steps taken": int(self._step_count),
            "the number of parameter groups": len(self.param_groups),
            "the number of parameters": len(self._flat_params),
        }
        for i, group in enumerate(self.param_groups):
            for key, value in group.items():
                if key not in ("params", "param_names", *_state_dict.LABELS):
                    description[f"{key} of parameter group {i}"] = float(value) if isinstance(value, Tensor) else value
        for i, p in enumerate(reversed(self._flat_params)):
            description[f"parameter {i}"] = (names.get(p, "unnamed"), tuple(p.shape), str(p.dtype), p.stride())
        for i, p in enumerate(reversed(self._flat_params)):
            # Ranks exchange moves, not values: replicas that start apart would stay apart.
            description[f"the checksum of the values of parameter {i}"] = checksum(p)
        return description

    # A step ----------------------------------------------------------------------------------------------------------

    def _begin_step(self) -> None:
        """Forget what was encoded; the next gradients belong to a new step."""
        self._step_number = int(self._step_count) + 1
        """The number of the step under way, from 1."""
        self._encoded = [False] * len(self._flat_params)
        self._presence = [0] * len(self._mail.frames)
        self._flags_sent = self._first_flags()
        self._begin_exchange()

    def _begin_exchange(self) -> None:
        self._missing = list(self._mail.parts_in)
        self._submitted = 0
        self._flags_seen = 0

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
        scale = self._amp_scale()
        self._refuse_thawed()
        rest = [position for position, encoded in enumerate(self._encoded) if not encoded]
        gradients = [gradient_of(self._flat_params[position]) for position in rest]
        self._prepare()
        for position, grad in zip(rest, gradients, strict=True):
            self._encode(position, grad, scale)
        flags = self._settle(self._wait())
        if flags & packet.NONFINITE:
            self._meter.skipped_steps += 1
        else:
            with self._meter.apply:
                self._apply_all()
                self._conclude()
        self._meter.steps += 1
        self._step_count += 1
        self._begin_step()
        return loss

    def _refuse_thawed(self) -> None:
        for p in self._frozen:
            if p.grad is not None:
                raise RuntimeError(
                    f"a parameter of shape {tuple(p.shape)} has a gradient, but was frozen when the optimizer was made "
                    "and has no place on the wire. Make the optimizer first and freeze then, or make a new one"
                )

    def _amp_scale(self) -> float:
        # torch.amp.GradScaler leaves its scale in this attribute while it calls step(), None after unscale_().
        scale: Tensor | None = getattr(self, "grad_scale", None)
        return 1.0 if scale is None else 1.0 / float(scale)

    def _encode_early(self, position: int, scale: float) -> None:
        """Encode one parameter's gradient before `step()` asks for it. Called by `attach` during backward."""
        self._encode(position, gradient_of(self._flat_params[position]), scale)

    def _encode(self, position: int, grad: Tensor | None, scale: float) -> None:
        """Apply the local rule to one parameter, and give the lane all buckets that are complete by now."""
        p = self._flat_params[position]
        if _form(p) != self._forms[position]:
            raise RuntimeError(
                f"a parameter is {_form(p)}, but was {self._forms[position]} when the optimizer was made. Convert the "
                "model first, and make the optimizer then"
            )
        self._encoded[position] = True
        group = self._group_of(position)
        for part in self._mail.parts[position]:
            bucket = part.frame.bucket.index
            if grad is not None:
                self._presence[bucket] |= part.presence
            with self._meter.encode:
                if self._local(part, grad, group, scale):
                    self._flags_sent |= packet.NONFINITE
            self._missing[bucket] -= 1
            # In order, whatever the order of the gradients: ranks must start the same exchange at the same time.
            while self._submitted < len(self._missing) and not self._missing[self._submitted]:
                self._submit(self._mail.frames[self._submitted])
                self._submitted += 1

    def _submit(self, frame: Frame) -> None:
        self._seal(frame)
        self._mail.write_presence(frame, self._presence[frame.bucket.index])
        self._lane.submit(functools.partial(self._run_exchange, frame, self._step_number, self._flags_sent))

    def _run_exchange(self, frame: Frame, step: int, flags: int) -> None:
        self._flags_seen |= self._exchange.run(frame, step, flags, self._merge_all)

    def _merge_all(self, frame: Frame, shard: int) -> None:
        self._merge(frame, shard)
        self._kernels.any_of(
            frame.received, frame.up_presence, frame.presence_words, frame.answers[shard], frame.down_presence
        )

    def _wait(self) -> int:
        with self._meter.exposed_wait:
            self._lane.wait()
        return self._flags_seen

    def _exchange_again(self) -> int:
        """A second exchange in the same step, from the state as it is and with the same presence; the flags seen."""
        self._begin_exchange()
        for position in range(len(self._flat_params)):
            self._encode(position, None, 1.0)
        return self._wait()

    def _apply_all(self) -> None:
        present = [self._mail.read_presence(frame) for frame in self._mail.frames]
        for position, p in enumerate(self._flat_params):
            parts = self._mail.parts[position]
            if not parts or not present[parts[0].frame.bucket.index] & parts[0].presence:
                continue
            dense = p if is_dense(p) else p.contiguous()
            master = self.state[p].get("master")
            x, low = (dense, None) if master is None else (master, dense)
            for part in parts:
                self._apply(part, x, low, self._group_of(position))
            if dense is not p:
                p.copy_(dense)

    def metrics(self) -> Metrics:
        """What the run has cost so far, on this rank."""
        return self._meter.read(self._mean_abs_vote())

    def _drain(self) -> None:
        """Wait for exchanges under way, so that nobody changes what they read."""
        if self._prepared:
            self._lane.wait()

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            f"{type(self).__name__} has a thread and a process group, which cannot be copied or pickled: "
            "save state_dict(), and load it into a new optimizer"
        )


def _form(p: Tensor) -> tuple[torch.dtype, torch.device, torch.Size, tuple[int, ...]]:
    return p.dtype, p.device, p.shape, p.stride()
