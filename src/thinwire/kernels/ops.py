"""Which kernels run on which device.

Two environment variables override the choice, for tests and bug reports: `THINWIRE_KERNELS=reference`,
`native` or `triton`, and `THINWIRE_ISA=avx512`, `avx2`, `neon` or `plain` for the native ones. With
`THINWIRE_REQUIRE_NATIVE=1` neither the build nor the import succeeds without the native ones (`native/library.py`).
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.metadata
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from thinwire.kernels import native
from thinwire.kernels.header import NONFINITE, Status
from thinwire.kernels.modes import Gate


@dataclasses.dataclass(frozen=True)
class Kernels:
    """The operations that every backend offers; `thinwire.kernels.reference` documents each, signature included."""

    name: str
    birder_encode: Callable[..., bool | None]
    birder_direction: Callable[..., bool | None]
    mean: Callable[[Tensor, Tensor], None]
    activity_refresh: Callable[..., None]
    vote_bit: Callable[..., None]
    vote_majority: Callable[..., None]
    vote_count: Callable[..., None]
    activity_update: Callable[..., None]
    birder_apply: Callable[..., None]
    dense_encode: Callable[..., bool | None]
    dense_apply: Callable[..., None]
    step_apply: Callable[..., None]
    adam_apply: Callable[..., float | Tensor]
    sign_encode: Callable[..., bool | None]
    sign_merge: Callable[..., None]
    sign_apply: Callable[..., None]
    momentum_encode: Callable[..., bool | None]
    lamb_measure: Callable[..., None]
    lamb_apply: Callable[..., None]
    onebit_lamb_measure: Callable[..., None]
    quantize_encode: Callable[..., bool | None]
    quantize_merge: Callable[..., None]
    quantize_decode: Callable[..., None]
    markov_encode: Callable[..., bool | None]
    markov_merge: Callable[..., None]
    markov_difference: Callable[..., bool | None]
    amsgrad_apply: Callable[..., None]
    momentum_sum: Callable[..., bool | None]
    sparse_amsgrad: Callable[..., None]
    top_k: Callable[[Tensor, Tensor, Tensor], None]
    sparse_add: Callable[..., bool]
    sketch_add: Callable[..., None]
    sketch_estimate: Callable[..., None]
    sketch_top_k: Callable[..., None]
    square_sum: Callable[[Tensor], float | Tensor]
    precondition: Callable[..., None]
    shard_scale: Callable[..., None]
    clear_words: Callable[..., None]
    crc32c: Callable[..., int]
    packet_seal: Callable[..., None]
    packet_check: Callable[..., None]

    def any_of(self, rows: Tensor, byte: int, words: int, answer: Tensor, answer_byte: int) -> None:
        """The *or* of all rows: a vote without any active coordinate."""
        self.vote_bit(
            rows, byte, None, first_word=0, words=words, answer=answer, answer_byte=answer_byte, key=0, signal=None
        )

    def prepared(self, operation: str, varying: str, **arguments: Any) -> Callable[[Tensor], Any]:
        """An operation that is called often, with all arguments but the tensor `varying`, a gradient or a parameter.

        Tensors in `arguments` must keep their memory: the native backend reads their addresses once.
        """
        function = getattr(self, operation)
        if function is native.KERNELS.get(operation):
            return native.prepared(operation, varying, arguments)
        return lambda tensor: function(**arguments, **{varying: tensor})

    def on_device(self, status: Tensor, gate: Gate) -> Kernels:
        """The same for an optimizer whose host does not wait: non-finite gradients raise a flag in `status`, and only
        parameters whose gate is open take a step."""
        finding = {name: getattr(self, name) for name in FINDING}
        stepping = {name: getattr(self, name) for name in STEPPING}
        if self.name == "triton":
            flags = status.view(torch.int32)[:1]
            found = {name: functools.partial(operation, bad=flags) for name, operation in finding.items()}
            taken = {name: functools.partial(operation, gate=gate) for name, operation in stepping.items()}
        else:
            found = {name: _raises(operation, status) for name, operation in finding.items()}
            taken = {name: _gated(operation, gate, name) for name, operation in stepping.items()}
        return dataclasses.replace(self, **found, **taken)


FINDING = (
    "birder_encode",
    "birder_direction",
    "dense_encode",
    "sign_encode",
    "quantize_encode",
    "momentum_encode",
    "markov_encode",
    "markov_difference",
    "momentum_sum",
)
"""Operations that return True, or on a GPU raise `bad`, when a number is not finite."""
STEPPING = (
    "activity_update",
    "birder_apply",
    "dense_apply",
    "step_apply",
    "adam_apply",
    "sign_apply",
    "lamb_apply",
    "amsgrad_apply",
)
"""Operations that take a step; on a GPU a gate decides whether they do."""


def _raises(operation: Callable[..., bool], status: Tensor) -> Callable[..., None]:
    """An operation of a host backend with the interface of a device backend."""

    def raising(*args: Any, **kwargs: Any) -> None:
        if operation(*args, **kwargs):
            status[Status.FLAGS] |= NONFINITE

    return raising


def _gated(operation: Callable[..., Any], gate: Gate, name: str) -> Callable[..., Any]:
    """The same for an operation of `STEPPING`."""

    def gated(*args: Any, **kwargs: Any) -> Any:
        if bool(gate.open[gate.parameter]):
            return operation(*args, **kwargs)
        if name == "amsgrad_apply":
            runs, _, *rest = args
            return operation(runs, None, *rest, **kwargs)  # the gradient follows the answer even if no step is taken
        return None

    return gated


OPERATIONS = tuple(field.name for field in dataclasses.fields(Kernels) if field.name != "name")

_LEFT_TO_TORCH = ("crc32c", "top_k", "sparse_add", "sparse_amsgrad", "sketch_add", "sketch_estimate", "sketch_top_k")
"""Operations without a Triton kernel. They touch few elements, or need a sequential order, which torch does as well.
`crc32c` runs on the host; a device checks packets by `packet_check`."""
BACKENDS_OF = {
    "reference": dict.fromkeys(OPERATIONS, "reference"),
    "native": dict.fromkeys(OPERATIONS, "native"),
    "triton": {name: "reference" if name in _LEFT_TO_TORCH else "triton" for name in OPERATIONS},
}
"""The one table: which module has the kernel of each operation, for every backend."""


def _functions_of(backend: str) -> Mapping[str, Callable[..., Any]]:
    if backend == "native":
        return native.KERNELS
    return vars(importlib.import_module(f"thinwire.kernels.{backend}"))


class _Backends(Mapping[str, Kernels]):
    """The backends by name. Each is imported on first use: Triton is needed only with a GPU."""

    def __init__(self) -> None:
        self._made: dict[str, Kernels] = {}

    def __getitem__(self, name: str) -> Kernels:
        if name not in self._made:
            functions = {of: _functions_of(of) for of in {*BACKENDS_OF[name].values()}}
            self._made[name] = Kernels(name, **{one: functions[of][one] for one, of in BACKENDS_OF[name].items()})
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(BACKENDS_OF)

    def __len__(self) -> int:
        return len(BACKENDS_OF)


BACKENDS = _Backends()

_NO_COMPILER = (
    "thinwire was installed without its native kernels and runs the torch reference, many times slower. ",
    native.REMEDY,
    " THINWIRE_REQUIRE_NATIVE=1 makes this an error.",
)
_OLDEST_TRITON = (3, 6)
"""Older ones lack tuples in kernels, or flush subnormal numbers, which changes bits."""
_NO_TRITON = (
    "Triton 3.6 or newer is not installed, and thinwire runs its torch reference on this GPU: it waits for the GPU "
    "many times a step, and is many times slower. ",
    "Install a torch that brings it (2.10 or newer), or thinwire with the extra 'gpu'.",
)
_warned: set[str] = set()


def backend(device: torch.device) -> Kernels:
    """The kernels for tensors on `device`."""
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"parameters on device {str(device)!r}: thinwire's kernels run on 'cpu' and 'cuda'")
    wanted = os.environ.get("THINWIRE_KERNELS", "")
    if wanted and wanted not in BACKENDS:
        raise ValueError(f"THINWIRE_KERNELS={wanted!r}: expected one of {', '.join(sorted(BACKENDS))}")
    chosen = BACKENDS[(_for_cuda if device.type == "cuda" else _for_cpu)(wanted)]
    isa = os.environ.get("THINWIRE_ISA")
    if isa and chosen.name == "native":
        native.use_isa(isa)
    return chosen


def _for_cpu(wanted: str) -> str:
    if wanted == "triton" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError("THINWIRE_KERNELS='triton' with parameters on the CPU: needs TRITON_INTERPRET=1, for tests")
    if wanted in ("", "native") and not native.available():
        if wanted:
            raise RuntimeError(f"THINWIRE_KERNELS=native, but {native.PATH} does not exist. {native.REMEDY}")
        _warn_once(*_NO_COMPILER)
        return "reference"
    return wanted or "native"


def _for_cuda(wanted: str) -> str:
    if wanted == "native":
        raise ValueError("THINWIRE_KERNELS='native' with parameters on a GPU: expected 'triton' or 'reference'")
    if wanted != "reference" and _triton_version() < _OLDEST_TRITON:
        if wanted:
            raise RuntimeError(f"THINWIRE_KERNELS=triton, but Triton 3.6 or newer is not installed. {_NO_TRITON[1]}")
        _warn_once(*_NO_TRITON)
        return "reference"
    return wanted or "triton"


def _triton_version() -> tuple[int, ...]:
    """Major and minor, without importing it; nothing where it is not installed."""
    try:
        major, minor, *_ = importlib.metadata.version("triton").split(".")
    except importlib.metadata.PackageNotFoundError:
        return ()
    return int(major), int(minor)


def _warn_once(*what: str) -> None:
    if what[0] not in _warned:
        _warned.add(what[0])
        warnings.warn("".join(what), RuntimeWarning, stacklevel=4)
