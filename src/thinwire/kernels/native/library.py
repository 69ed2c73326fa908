"""The shared library: where it is, what its functions take, and how tensors are handed to it.

csrc/thinwire.h is the interface. The environment variable `THINWIRE_NATIVE_LIBRARY` names another build of it, which
must exist then: that of `make sanitize`, for example, whose kernels check every access.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import torch
from torch import Tensor

_ABI = 7
_OTHER_BUILD = os.environ.get("THINWIRE_NATIVE_LIBRARY")
PATH = Path(_OTHER_BUILD or Path(__file__).parent.with_name("_native.so"))
_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

_int, _i64, _u64, _float, _ptr = ctypes.c_int, ctypes.c_int64, ctypes.c_uint64, ctypes.c_float, ctypes.c_void_p
_RUNS = [_ptr, _i64]
_TYPED = [_ptr, _int]
_STATE = [*_TYPED, _i64]  # and its shift
_PARAMETER = [_ptr, *_TYPED]
_SIGNATURES = {
    "thinwire_abi": (_int, []),
    "thinwire_isa": (ctypes.c_char_p, []),
    "thinwire_use_isa": (_int, [ctypes.c_char_p]),
    "thinwire_birder_encode": (
        _int,
        [*_RUNS, *_TYPED, _ptr, *_STATE, _ptr, _ptr, *[_float] * 7, _int, _u64],
    ),
    "thinwire_birder_direction": (
        _int,
        [*_RUNS, *_TYPED, _ptr, *_STATE, _ptr, *[_float] * 7, _int],
    ),
    "thinwire_mean": (None, [_ptr, _i64, _i64, _int, _i64, _ptr]),
    "thinwire_activity_refresh": (None, [*_STATE, _i64, _i64, _i64, _i64, _i64, _float, _ptr, _i64, _i64]),
    "thinwire_vote_bit": (None, [_ptr, _i64, _i64, _ptr, _i64, _i64, _ptr, _u64, _ptr]),
    "thinwire_vote_majority": (None, [_ptr, _i64, _i64, _ptr, _i64, _ptr, _i64, _ptr]),
    "thinwire_vote_count": (None, [_ptr, _i64, _i64, _ptr, _i64, _i64, _ptr, _ptr]),
    "thinwire_adopt": (None, [_ptr, _i64, _i64, _i64, _ptr, _i64, _i64, _i64, _i64]),
    "thinwire_birder_apply": (None, [*_RUNS, *_PARAMETER, _ptr, _ptr, _i64, _i64, _float, _float]),
    "thinwire_dense_apply": (None, [*_RUNS, *_PARAMETER, _ptr, _float, _float]),
    "thinwire_dense_encode": (_int, [*_RUNS, *_TYPED, _ptr, _float, _float]),
    "thinwire_square_sum": (ctypes.c_double, [_ptr, _i64]),
    "thinwire_precondition": (None, [_ptr, _i64, _float, _float, _float]),
    "thinwire_adam_apply": (
        ctypes.c_double,
        [*_RUNS, *_PARAMETER, _ptr, _ptr, _ptr, _ptr, *[_float] * 8, _int],
    ),
    "thinwire_sign_encode": (_int, [*_RUNS, *_TYPED, *_STATE, _ptr, _ptr, _ptr, _ptr, _ptr, _float, _float, _float]),
    "thinwire_sign_merge": (None, [*_RUNS, _ptr, _i64, _i64, *_STATE, _ptr, _ptr, _float, _ptr]),
    "thinwire_sign_apply": (None, [*_RUNS, *_PARAMETER, _ptr, _ptr, _ptr, _float, _float, _ptr, _ptr, _float]),
    "thinwire_momentum_encode": (
        _int,
        [*_RUNS, *_TYPED, _ptr, *_STATE, _ptr, _ptr, _ptr, _float, _float, _float, _float, _int],
    ),
    "thinwire_step_apply": (None, [*_RUNS, *_PARAMETER, _ptr, _ptr, _float, _float, _ptr]),
    "thinwire_lamb_measure": (None, [*_RUNS, *_PARAMETER, _ptr, _ptr, _ptr, *[_float] * 8, _ptr]),
    "thinwire_lamb_apply": (None, [*_RUNS, *_PARAMETER, _ptr, _ptr, *[_float] * 5]),
    "thinwire_onebit_lamb_measure": (
        None,
        [*_RUNS, *_PARAMETER, _ptr, _ptr, _ptr, _ptr, _ptr, _ptr, *[_float] * 8, _ptr],
    ),
    "thinwire_markov_encode": (
        _int,
        [*_RUNS, *_TYPED, _ptr, _ptr, _i64, *[_ptr] * 7, *[_float] * 4, _int],
    ),
    "thinwire_markov_merge": (None, [*_RUNS, _ptr, _i64, _i64, _ptr, _i64, *[_ptr] * 5]),
    "thinwire_markov_difference": (_int, [*_RUNS, *_TYPED, _ptr, _ptr, _ptr, _i64, *[_float] * 4]),
    "thinwire_amsgrad_apply": (None, [*_RUNS, *_PARAMETER, *[_ptr] * 7, *[_float] * 8, _int]),
    "thinwire_momentum_sum": (_int, [*_RUNS, *_TYPED, _ptr, _ptr, _ptr, _i64, *[_float] * 5]),
    "thinwire_sparse_amsgrad": (
        _int,
        [_ptr, _i64, *_TYPED, *[_ptr] * 5, _i64, _i64, _float, _float, _float, _float, _float],
    ),
    "thinwire_top_k": (None, [_ptr, _i64, _i64, _ptr, _ptr]),
    "thinwire_sparse_add": (_int, [_ptr, _i64, _ptr, _ptr, _i64, _float]),
    "thinwire_sketch_add": (None, [_ptr, _i64, _i64, _ptr, _i64, _i64, _ptr]),
    "thinwire_sketch_estimate": (None, [_ptr, _i64, _i64, _ptr, _i64, _i64, _float, _ptr]),
    "thinwire_sketch_top_k": (None, [_ptr, _i64, _i64, _ptr, _ptr, _ptr, _i64, _i64, _ptr, _ptr]),
    "thinwire_crc32c": (ctypes.c_uint32, [_ptr, _i64, ctypes.c_uint32]),
}


def _load() -> ctypes.CDLL | None:
    if not PATH.exists() and not _OTHER_BUILD:
        return None
    library = ctypes.CDLL(str(PATH))
    library.thinwire_abi.restype = _int
    if library.thinwire_abi() != _ABI:
        raise ImportError(
            f"{PATH} has kernel interface {library.thinwire_abi()}, this thinwire needs {_ABI}: install thinwire again"
        )
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype = result
        function.argtypes = arguments
    return library


_library = _load()


def available() -> bool:
    """Whether this installation has the library (it has not where no C++ compiler was found)."""
    return _library is not None


def lib() -> ctypes.CDLL:
    """The library; only where `available`."""
    assert _library is not None, "ops.backend() has seen to it"
    return _library


def isa() -> str:
    """The instruction set in use."""
    return lib().thinwire_isa().decode()


def use_isa(name: str) -> None:
    """Use another instruction set: "avx512", "avx2", "neon" or "plain"."""
    if lib().thinwire_use_isa(name.encode()):
        raise ValueError(f"THINWIRE_ISA={name!r}: this machine or build has no such kernels, it uses {isa()!r}")


def dtype_code(tensor: Tensor) -> int:
    """A tensor's dtype as the library counts them."""
    return _DTYPES[tensor.dtype]


def pointer(tensor: Tensor | None) -> int | None:
    """Where a tensor begins; NULL for none."""
    return None if tensor is None else tensor.data_ptr()


def typed(tensor: Tensor | None) -> tuple[int | None, int]:
    """Where a tensor begins and its dtype."""
    return (None, 0) if tensor is None else (tensor.data_ptr(), dtype_code(tensor))
