"""Steps that a worker takes on its own: what is remembered of them until replicas are equal again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from thinwire.compressors.local import Alone, AmongNode
from thinwire.compressors.scaled_sign import ScaledSign
from thinwire.optimizers._adam import SIGNS, AdamFamily, keep_signs
from thinwire.optimizers._intervals import Interval
from thinwire.optimizers._paper import LOCAL
from thinwire.optimizers._state import State, steps_then_numbers
from thinwire.transport.compressor import Compressor
from thinwire.transport.layout import Layout
from thinwire.transport.memory import untouched_zeros

PRESENT, ANCHORED = 1, 2
"""Of a parameter since replicas were equal: it has had a gradient; it has moved, and its value from before is kept."""
SMALLEST = 1e-30
"""Sums of learning rates below it count as none: their inverse would not be a float32."""


class LocalSteps(AdamFamily):
    """What 0/1 Adam keeps for its local steps and for the scaled signs that end them."""

    _error_dtype: torch.dtype

    @property
    def is_synchronized(self) -> bool:
        """Whether all replicas are equal: no local step has been taken since they last were."""
        return not self._interval.local_steps

    def _progress(self) -> dict[str, Any]:
        return {
            **super()._progress(),
            "the last step before the variance was frozen": self._interval.frozen_at or "none yet",
            "the number of local steps since ranks were equal": self._interval.local_steps,
        }

    def _declare(self, layout: Layout) -> tuple[dict[str, Compressor], State]:
        compressors, state = super()._declare(layout)
        self._interval = Interval(len(self.param_groups))
        self._touched = self._layer_numbers("touched", state, layout, torch.int64, check=_check_touched)
        """Bits for each parameter: `PRESENT` and `ANCHORED`."""
        state.common["interval"] = self._interval.memory
        state.checks["interval"] = steps_then_numbers(2, freezes=self._topology.compresses)
        if not self._topology.compresses:
            return compressors, state
        self._signs = ScaledSign(layout, self._topology.node, self._kernels, self._error_dtype)
        keep_signs(state, self._signs)
        state.whole["anchor"] = untouched_zeros(layout.size, torch.float32, layout.device)
        self._own = Alone(self._m) if layout.slices == 1 else AmongNode(self._kernels)
        return {**compressors, SIGNS: self._signs, LOCAL: self._own}, state

    def _presence_since(self) -> list[int]:
        presence = [0] * len(self._layout.buckets)
        for parts, touched in zip(self._channels[SIGNS].buffers.parts, self._touched.now, strict=True):
            if touched & PRESENT:
                for part in parts:
                    presence[part.frame.bucket.index] |= part.presence
        return presence

    def _end_interval(self) -> None:
        self._interval.end()
        self._touched.now = [0] * len(self._touched.now)

    def _agreed_value(self, position: int) -> Tensor:
        p = self._flat_params[position]
        if self._touched.now[position] & ANCHORED:
            return self._kept_of[position]["anchor"].to(p.dtype)
        return super()._agreed_value(position)

    # When a run goes on with other ranks -----------------------------------------------------------------------------

    @property
    def _needs_compression(self) -> bool:
        return bool(self._interval.frozen_at)

    def _portable(self, *, private: bool) -> State:
        kept = self._kept
        whole = {name: values for name, values in kept.whole.items() if name != "anchor"}
        own, owned = {}, {}
        if private and self._topology.compresses:
            self._signs.fade([1.0] * len(self._flat_params))
            own, owned = {"sent": self._signs.sent}, {"answered": self._signs.answered}
        if self._interval.frozen_at:
            # Workers have a momentum each, and so a rank that of its own slices only.
            m = whole.pop("m")
            own["m"] = torch.cat([m[b.own_start : b.own_start + b.slice_elements] for b in self._layout.buckets])
        return State(own, whole, owned, layers=kept.layers, common=kept.common)

    def _anchors(self) -> dict[int, Tensor]:
        states = enumerate(zip(self._kept_of, self._touched.now, strict=True))
        return {position: kept["anchor"] for position, (kept, touched) in states if touched & ANCHORED}

    def _inherit(self, values: Mapping[str, Tensor], anchors: Mapping[int, Tensor]) -> None:
        if self.is_synchronized:
            return
        for position, anchor in anchors.items():
            self._set_value(position, anchor)
        sums, decays = self._interval.of_groups()
        for position, touched in enumerate(self._touched.now):
            group = self._group_index[position]
            # Without errors ("reset") there is no telling how far workers have come either: both are in one memory.
            if touched & PRESENT and sums[group] >= SMALLEST and "sent" in values:
                self._step_together(position, values, sums[group], decays[group])
        self._end_interval()
        self._touched.write()

    def _step_together(self, position: int, values: Mapping[str, Tensor], rates: float, decay: float) -> None:
        """Synchronise a parameter as signs would, but with all that workers and owners have to say: in doubles, which
        are rounded once."""
        p, slot = self._flat_params[position], self._layout.slots[position]
        sent, answered, v, m = (
            self._layout.view(flat, slot, p) for flat in (values["sent"], values["answered"], self._v, self._m)
        )
        u = (sent + answered).to(v.device)
        x = self._master(position).double()
        self._set_value(position, torch.where(v > 0, x * decay - u * v, x))
        m.copy_(u / rates)
        self._kept_of[position]["sent"].zero_()
        self._kept_of[position]["answered"].zero_()

    def _master(self, position: int) -> Tensor:
        """A parameter in float32: its master, or itself."""
        return self._kept_of[position].get("master", self._flat_params[position])

    def _set_value(self, position: int, value: Tensor) -> None:
        p, master = self._flat_params[position], self._master(position)
        master.copy_(value)
        if master is not p:
            p.copy_(master)


def _check_touched(bits: Tensor, step: int) -> str | None:
    return None if int(bits) in range((PRESENT | ANCHORED) + 1) else "has other bits than PRESENT and ANCHORED"
