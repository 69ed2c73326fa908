"""Which kernels run where.

Two environment variables override the choice, for tests and for reports of trouble: `THINWIRE_KERNELS=reference` or
`native`, and `THINWIRE_ISA=avx512`, `avx2`, `neon` or `plain` for the native ones.
"""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor

from thinwire.kernels import native, reference


@dataclasses.dataclass(frozen=True)
class Kernels:
    """The operations that every backend offers; `thinwire.kernels.reference` documents each, signature included."""

    name: str
    birder_encode: Callable[..., bool]
    birder_direction: Callable[..., bool]
    mean: Callable[[Tensor, Tensor], None]
    roll_call: Callable[..., None]
    vote_bit: Callable[..., None]
    vote_count: Callable[..., None]
    adopt: Callable[..., None]
    birder_apply: Callable[..., None]
    dense_encode: Callable[..., bool]
    dense_apply: Callable[..., None]
    step_apply: Callable[..., None]
    adam_apply: Callable[..., float]
    sign_encode: Callable[..., bool]
    sign_merge: Callable[..., None]
    sign_apply: Callable[..., None]
    momentum_encode: Callable[..., bool]
    lamb_measure: Callable[..., None]
    lamb_apply: Callable[..., None]
    onebit_lamb_measure: Callable[..., None]
    markov_encode: Callable[..., bool]
    markov_merge: Callable[..., None]
    markov_difference: Callable[..., bool]
    amsgrad_apply: Callable[..., None]
    momentum_sum: Callable[..., bool]
    sparse_amsgrad: Callable[..., None]
    top_k: Callable[[Tensor, Tensor, Tensor], None]
    sparse_add: Callable[..., bool]
    sketch_add: Callable[..., None]
    sketch_estimate: Callable[..., None]
    sketch_top_k: Callable[..., None]
    square_sum: Callable[[Tensor], float]
    precondition: Callable[..., None]
    crc32c: Callable[..., int]

    def any_of(self, rows: Tensor, byte: int, words: int, answer: Tensor, answer_byte: int) -> None:
        """The *or* of all rows: what a vote is where nobody is known to be alive."""
        self.vote_bit(
            rows, byte, None, first_word=0, words=words, answer=answer, answer_byte=answer_byte, key=0, signal=None
        )


def _table(name: str, module: ModuleType) -> Kernels:
    operations = [field.name for field in dataclasses.fields(Kernels) if field.name != "name"]
    return Kernels(name, **{operation: getattr(module, operation) for operation in operations})


BACKENDS = {"reference": _table("reference", reference), "native": _table("native", native)}

_REMEDY = "Install a C++ compiler (Debian: apt-get install g++) and then thinwire again."
_said_so = False


def backend(device: torch.device) -> Kernels:
    """The kernels for tensors on `device`."""
    if device.type != "cpu":
        raise ValueError(f"parameters on device {str(device)!r}: thinwire's kernels run on 'cpu' so far")
    wanted = os.environ.get("THINWIRE_KERNELS", "")
    if wanted and wanted not in BACKENDS:
        raise ValueError(f"THINWIRE_KERNELS={wanted!r}: expected one of {', '.join(sorted(BACKENDS))}")
    if wanted != "reference" and not native.available():
        if wanted == "native":
            raise RuntimeError(f"THINWIRE_KERNELS=native, but {native.PATH} does not exist. {_REMEDY}")
        _say_once_that_reference_runs()
        wanted = "reference"
    chosen = BACKENDS[wanted or "native"]
    isa = os.environ.get("THINWIRE_ISA")
    if isa and chosen.name == "native":
        native.use_isa(isa)
    return chosen


def _say_once_that_reference_runs() -> None:
    global _said_so  # noqa: PLW0603 - once a process is once a module
    if not _said_so:
        _said_so = True
        warnings.warn(
            "thinwire was installed without its native kernels and runs the torch reference, many times slower. "
            + _REMEDY,
            RuntimeWarning,
            stacklevel=3,
        )
