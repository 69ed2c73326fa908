"""The exchange behind `thinwire.compress`: a thinwire optimizer that averages gradients and moves nothing.

It is a `WireOptimizer` for what these share: the agreement of ranks, connections, checks of replicas, state dicts,
and continuing on another number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import NoReturn

import torch
from torch import Tensor

from thinwire.averaging.rule import AveragingRule
from thinwire.optimizers.inputs import mark_averaged, unmark_averaged
from thinwire.optimizers.optimizer import Unpack, WireOptimizer, WireOptions
from thinwire.optimizers.safety import OF_AVERAGES


class GradientAverager(WireOptimizer):
    """Averages the gradients of some parameters over all ranks.

    For each exchange call `begin`, `add` for every parameter in any order, `leave` if `finish` does not follow at once,
    and `finish`.

    Args:
        params: the parameters.
        rule: averages them.
        process_group, topology, mesh, node_dtype, bucket_mb, max_consecutive_skips, check_replicas_every, clip_norm,
            clip_value, delay: see `thinwire.Birder`.
    """

    _rule: AveragingRule
    _skip_words = OF_AVERAGES

    def __init__(self, params: Iterable[Tensor], rule: AveragingRule, **wire: Unpack[WireOptions]) -> None:
        super().__init__(params, {}, rule, **wire)
        self.loss_scale_now: Callable[[], float] = lambda: 1.0
        """What the gradients of the next backward are multiplied by."""
        self.gradient_of: Callable[[Tensor], Tensor] = _new_gradient
        """Gives a parameter a gradient, and returns its memory as a vector."""
        mark_averaged(self._flat_params, self)
        self._position_of = {p: position for position, p in enumerate(self._flat_params)}

    def begin(self, loss_scale: float = 1.0) -> None:
        """Begin an exchange. All ranks call it at the same point of their programs.

        Args:
            loss_scale: what the gradients were multiplied by.

        Raises:
            RuntimeError: on every rank, if ranks disagree: after `load_state_dict` they compare their states again.
        """
        self._prepare()
        self._complete()
        self._rule.use_loss_scale(loss_scale)
        self._clipping.loss_scale = loss_scale

    @property
    def params(self) -> Sequence[Tensor]:
        """The parameters, in the order of the flat space."""
        return self._flat_params

    @property
    def connected(self) -> bool:
        """Whether an exchange can begin without an agreement of all ranks."""
        return self._session.connected and not self._closed

    def encode(self, position: int, gradient: Tensor) -> None:
        """Encode the gradient of a parameter, a vector in memory order that needs no gradient itself, before `add` says
        where the mean goes. Called for every parameter during backward, so it does little else."""
        session = self._session
        if session.encoded[position] or self._clipping.clips:
            self._encode_once(position, gradient)  # which raises, or clips
            return
        if self._collect(position, gradient, 1.0):
            return
        try:
            session.encode(position, gradient, 1.0, self._encoder)
        except BaseException as error:  # as `abort_on_error`
            session.transport.abort(error)
            raise

    def add(self, p: Tensor, gradient: Tensor, *, present: bool = True) -> None:
        """Add a parameter to the exchange, and encode its gradient if `encode` has not.

        Args:
            p: the parameter.
            gradient: a vector in memory order. `finish` overwrites it with the mean, unless the parameter has no
                gradient on any rank.
            present: whether this rank has a gradient for it. Otherwise it sends zeros, and keeps its residual.
        """
        position = self._position_of[p]
        self.write_to(position, gradient)
        if not self._session.encoded[position] and not (
            present and self._collect(position, gradient, 1.0, in_backward=False)
        ):
            self._encode_once(position, gradient if present else None)

    def position_of(self, p: Tensor) -> int:
        """The place of a parameter in the flat space."""
        return self._position_of[p]

    def is_encoded(self, position: int) -> bool:
        """Whether the gradient of the parameter at this place is encoded."""
        return self._session.encoded[position]

    def write_to(self, position: int, gradient: Tensor) -> None:
        """Let `finish` write the mean for a parameter here; see `add`."""
        self._rule.gradients[position] = gradient

    @torch.no_grad()
    def _encode_once(self, position: int, gradient: Tensor | None) -> None:
        with self.abort_on_error():
            if self._session.encoded[position]:
                self.refuse_second_gradient(position)
            self._encode(position, gradient, 1.0)

    def refuse_second_gradient(self, position: int) -> NoReturn:
        """Raise the error for a parameter that gets a gradient twice in one exchange."""
        raise RuntimeError(
            f"parameter {self.name_of(position)!r} got a gradient twice in one exchange. The backward before this one "
            "failed: make a new model and a new compression"
        )

    def name_of(self, position: int) -> str:
        """What a message calls a parameter."""
        return str(self._names.get(self._flat_params[position], position))

    @torch.no_grad()
    def leave(self) -> None:
        """Let the exchange end in the background, once all parameters are added: other ranks then need not wait until
        this one calls `finish`. The numbers of the parameter groups must stay as they are until then."""
        self._encode_waiting()
        transport = self._session.transport
        with self.abort_on_error():
            transport.agreed = self._group_numbers.note(self._context.step, self.param_groups)
            transport.commit()

    @torch.no_grad()
    def finish(self) -> list[Tensor]:
        """Wait for the exchange, and write the means. With a delay, do not wait, and write the means of the exchange
        before it: zeros, if it had none.

        If a gradient was not finite on any rank, all gradients become NaN on all ranks.

        Returns:
            The parameters that have a gradient on some rank.
        """
        gradients = self._rule.gradients
        self._take_step(1.0)
        positions = self._delayed_positions if self._delay.steps else self._rule.present()
        if self._overflowed:
            for gradient in gradients:
                if gradient is not None:
                    gradient.fill_(math.nan)
        elif self._delay.steps:
            for position in set(range(len(gradients))).difference(positions):
                self._rule.gradient_at(position).zero_()
        self._release_gradients()
        return [self._flat_params[position] for position in positions]

    @torch.no_grad()
    def synchronize(self) -> None:
        """With a delay, wait for the exchange in flight, and write its means into new gradients of the parameters."""
        if any(self._session.encoded):
            raise RuntimeError("synchronize() during backward: call it between two backward passes, on all ranks")
        if not self._delay.pending:
            return
        self.begin(self.loss_scale_now())
        positions = self._take_pending()
        for position in positions:
            self.write_to(position, self.gradient_of(self._flat_params[position]))
        self._apply_answers(positions)
        self._release_gradients()

    def _release_gradients(self) -> None:
        # The memory belongs to the caller, who may release it.
        self._rule.gradients = [None] * len(self._flat_params)

    @property
    def overflowed(self) -> bool:
        """Whether a gradient was not finite on any rank in the last exchange."""
        return self._overflowed

    def release(self) -> None:
        """End the averaging for good: thinwire's optimizers may take the parameters over."""
        unmark_averaged(self._flat_params)
        self.close()

    def abort_on_error(self) -> AbstractContextManager[None]:
        """See `Transport.abort_on_error`."""
        return self._session.transport.abort_on_error()


def _new_gradient(p: Tensor) -> Tensor:
    p.grad = torch.zeros_like(p)
    return p.grad.as_strided((p.numel(),), (1,))


def loss_scale(grad_scaler: torch.amp.GradScaler | None) -> float:
    """What a scaler multiplies the loss by; 1 without one."""
    return grad_scaler.get_scale() if grad_scaler is not None and grad_scaler.is_enabled() else 1.0
