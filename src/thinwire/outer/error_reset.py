"""CSER: what messages leave out moves into the worker's own parameters, and is exchanged from there ("error reset").

With θ_ref the values on which all workers agree, and θ_i those of worker i, its error is e_i = θ_i - θ_ref. It has no
memory of its own. A *partial synchronization* of a vector v_i of each worker moves both::

    A = the mean of C(v_i),  θ_ref ← θ_ref - A,  θ_i ← θ_i + C(v_i) - A

The mean of all θ_i stays as it is, and e_i shrinks by C(v_i). Every `every` steps v_i is θ_ref - θ_i, which takes θ_i
to θ_ref - (v_i - C(v_i)): the residual of the message is the new error. Between them `StepExchange` may do the same
with how far each inner step has moved.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire.averaging.catalogue import rule_of
from thinwire.optimizers import state_dict as state_dicts
from thinwire.outer.averager import OuterAverager
from thinwire.outer.fragment import Fragment, has_values


def check_error_reset(
    error_reset: object,
    compressor: tuple[str, Mapping[str, Any]],
    step_compressor: str | None,
    step_options: Mapping[str, Any] | None,
    *,
    residual_decay: float,
    **others: object,
) -> None:
    """Reject arguments that do not go together.

    Args:
        error_reset, step_compressor, step_options: see `thinwire.LocalSteps`.
        compressor: its name and options.
        residual_decay: needs to be 1.
        **others: arguments that need to be zero or False.

    Raises:
        ValueError: naming the argument.
        TypeError: for an unknown option of the step's compressor.
    """
    if not isinstance(error_reset, bool):
        raise ValueError(f"error_reset={error_reset!r}: expected True or False")
    if not error_reset:
        for name, value in (("step_compressor", step_compressor), ("step_options", step_options)):
            if value is not None:
                raise ValueError(f"{name}={value!r} without error_reset=True: expected None")
        return
    if step_compressor is None and step_options is not None:
        raise ValueError(f"step_options={step_options!r} without step_compressor: expected None")
    wanted = {name: (value, type(value)()) for name, value in others.items()}
    for name, (value, only) in {**wanted, "residual_decay": (residual_decay, 1.0)}.items():
        if value != only:
            raise ValueError(
                f"{name}={value!r} with error_reset=True: expected {only!r}, because what an exchange leaves out "
                "becomes part of the parameters at once, as it is"
            )
    _check_residual("compressor", *compressor)
    if step_compressor is not None:
        _check_residual("step_compressor", step_compressor, step_options or {})


def _check_residual(argument: str, name: str, options: Mapping[str, Any]) -> None:
    if not rule_of(name, options).worker_residual:
        given = "".join(f", {option}={value!r}" for option, value in options.items())
        raise ValueError(
            f"{argument}={name!r}{given} with error_reset=True: its workers keep no residual of their own that could "
            "move into the parameters. Expected a compressor with error feedback, such as 'int4', 'topk' or 'randomk'"
        )


def check_worker(params: Sequence[Tensor], ranks: int) -> None:
    """Reject what error reset cannot train.

    Args:
        params: the parameters.
        ranks: the number of ranks of a worker.

    Raises:
        TypeError: for a parameter of less than 32 bits.
        ValueError: for a worker of several ranks.
    """
    for p in params:
        if p.dtype != torch.float32:
            raise TypeError(
                f"a parameter of {p.dtype} with error_reset=True: errors are part of the parameters, and those below a "
                "digit of it would be lost. Expected torch.float32, with torch.autocast for the rest"
            )
    if ranks > 1:
        raise ValueError(
            f"error_reset=True with workers of {ranks} ranks: each rank would have a part of the error of its worker "
            "only, so the ranks of a node would differ. Expected topology='flat'"
        )


class StepExchange:
    """The partial synchronization of every inner step.

    Args:
        fragments: they have the parameters and the reference values.
        make: makes the averager of reference values.
        workspace: memory of one element per parameter at least, which is in use during `exchange`.
    """

    def __init__(
        self,
        fragments: Sequence[Fragment],
        make: Callable[[Sequence[Tensor]], OuterAverager],
        workspace: Tensor,
    ) -> None:
        pairs = [pair for each in fragments for pair in zip(each.references, each.params, strict=True)]
        sizes = [p.numel() for _, p in pairs]
        before = torch.zeros(sum(sizes), dtype=torch.float32, device=workspace.device)
        self._parts = [
            (reference, p, was.view(p.shape), update)
            for (reference, p), was, update in zip(
                pairs, before.split(sizes), workspace[: sum(sizes)].split(sizes), strict=True
            )
        ]
        self.averager = make([reference for reference, _ in pairs])

    def begin(self) -> None:
        """Note the parameters, before an inner step."""
        for _, p, before, _ in self._parts:
            before.copy_(p)

    def exchange(self, step: int) -> None:
        """Exchange how far the inner step has moved. If that is not finite on any rank, all ranks undo it.

        Args:
            step: the number of inner steps so far.
        """
        averager = self.averager
        averager.agree_on(inner_steps=step)
        averager.begin()
        for reference, p, before, update in self._parts:
            torch.sub(before, p, out=update.view(p.shape))
            averager.add(reference, update, present=has_values(update))
        averager.finish()
        for reference, p, before, update in self._parts:
            if averager.overflowed:
                averager.forget_residual(reference)
                p.copy_(before)
            else:
                mean = update.view(p.shape)
                reference.sub_(mean)
                torch.sub(before, mean, out=p)
                averager.take_residual(reference, p)

    # Saving ----------------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """What must be saved, between two inner steps."""
        return self.averager._state_of_this_rank()

    def check(self, state: Any) -> None:
        """Check what `load` will be given.

        Raises:
            TypeError, ValueError: if it does not fit.
        """
        state_dicts.check(self.averager, state)

    def load(self, state: dict[str, Any]) -> None:
        """Continue from what `state` returned."""
        self.averager.load_state_dict(state)
