"""Which kernels run where.

Two environment variables override the choice, for tests and for reports of trouble: `THINWIRE_KERNELS=reference` or
`native`, and `THINWIRE_ISA=avx512`, `avx2`, `neon` or `plain` for the native ones.
"""

from __future__ import annotations

import os
import warnings
from typing import Protocol

import torch
from torch import Tensor

from thinwire.kernels import native, reference


class Kernels(Protocol):
    """What a backend offers; `thinwire.kernels.reference` documents each function."""

    @property
    def NAME(self) -> str:  # noqa: N802 - a module's constant
        """The backend's name."""
        ...

    def birder_encode(
        self,
        runs: Tensor,
        grad: Tensor | None,
        m: Tensor,
        b: Tensor,
        alive: Tensor,
        packets: Tensor,
        *,
        beta: float,
        eps: float,
        scale: float,
        amsgrad: bool,
        key: int,
    ) -> bool: ...

    def roll_call(
        self,
        state: Tensor,
        *,
        first_word: int,
        shard_words: int,
        shards: int,
        period: int,
        phase: int,
        eps: float,
        packets: Tensor,
        offset: int,
    ) -> None: ...

    def vote_bit(
        self,
        rows: Tensor,
        byte: int,
        alive: Tensor | None,
        *,
        first_word: int,
        words: int,
        answer: Tensor,
        answer_byte: int,
        key: int,
        signal: Tensor | None,
    ) -> None: ...

    def vote_count(
        self,
        rows: Tensor,
        byte: int,
        alive: Tensor,
        *,
        first_word: int,
        words: int,
        planes: int,
        answer: Tensor,
        answer_byte: int,
        signal: Tensor | None,
    ) -> None: ...

    def adopt(
        self,
        alive: Tensor,
        *,
        first_word: int,
        shard_words: int,
        answers: Tensor,
        byte: int,
        planes: int,
        period: int,
        phase: int,
    ) -> None: ...

    def birder_apply(
        self,
        runs: Tensor,
        x: Tensor,
        low: Tensor | None,
        alive: Tensor,
        answers: Tensor,
        *,
        planes: int,
        workers: int,
        lr: float,
        decay: float,
    ) -> None: ...


_said_so = False


def backend(device: torch.device) -> Kernels:
    """The kernels for tensors on `device`."""
    if device.type != "cpu":
        raise ValueError(f"parameters on device {str(device)!r}: thinwire's kernels run on 'cpu' so far")
    wanted = os.environ.get("THINWIRE_KERNELS", "")
    if wanted not in ("", "native", "reference"):
        raise ValueError(f"THINWIRE_KERNELS={wanted!r}: expected 'native' or 'reference'")
    if wanted == "reference":
        return reference
    if not native.available() and not wanted:
        _say_once_that_reference_runs()
        return reference
    isa = os.environ.get("THINWIRE_ISA")
    if isa:
        native.use_isa(isa)
    return native


def _say_once_that_reference_runs() -> None:
    global _said_so  # noqa: PLW0603 - once a process is once a module
    if not _said_so:
        _said_so = True
        warnings.warn(
            "thinwire was installed without its native kernels and runs the torch reference, about 20 times slower. "
            "Install a C++ compiler (Debian: apt-get install g++) and then thinwire again.",
            RuntimeWarning,
            stacklevel=3,
        )
