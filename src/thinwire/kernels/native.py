"""The kernels in C++, called through ctypes, which lets go of the GIL while they run.

csrc/thinwire.h is the interface. The library picks AVX-512, AVX2, NEON or plain code when it is loaded.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

_ABI = 2
PATH = Path(__file__).with_name("_native.so")
_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

_int, _i64, _u64, _float, _ptr = ctypes.c_int, ctypes.c_int64, ctypes.c_uint64, ctypes.c_float, ctypes.c_void_p
_SIGNATURES = {
    "thinwire_abi": (_int, []),
    "thinwire_isa": (ctypes.c_char_p, []),
    "thinwire_use_isa": (_int, [ctypes.c_char_p]),
    "thinwire_birder_encode": (
        _int,
        [_ptr, _i64, _ptr, _int, _ptr, _ptr, _int, _i64, _ptr, _ptr, _float, _float, _float, _float, _int, _u64],
    ),
    "thinwire_birder_direction": (
        _int,
        [_ptr, _i64, _ptr, _int, _ptr, _ptr, _int, _i64, _ptr, _float, _float, _float, _float, _int],
    ),
    "thinwire_mean": (None, [_ptr, _i64, _i64, _int, _i64, _ptr]),
    "thinwire_roll_call": (None, [_ptr, _int, _i64, _i64, _i64, _i64, _i64, _i64, _float, _ptr, _i64, _i64]),
    "thinwire_vote_bit": (None, [_ptr, _i64, _i64, _ptr, _i64, _i64, _ptr, _u64, _ptr]),
    "thinwire_vote_count": (None, [_ptr, _i64, _i64, _ptr, _i64, _i64, _ptr, _ptr]),
    "thinwire_adopt": (None, [_ptr, _i64, _i64, _i64, _ptr, _i64, _i64, _i64, _i64]),
    "thinwire_birder_apply": (
        None,
        [_ptr, _i64, _ptr, _ptr, _int, _ptr, _ptr, _i64, _i64, _float, _float],
    ),
    "thinwire_dense_apply": (None, [_ptr, _i64, _ptr, _ptr, _int, _ptr, _float, _float]),
}


def _load() -> ctypes.CDLL | None:
    if not PATH.exists():
        return None
    library = ctypes.CDLL(str(PATH))
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype = result
        function.argtypes = arguments
    if library.thinwire_abi() != _ABI:
        raise ImportError(
            f"{PATH} has kernel interface {library.thinwire_abi()}, this thinwire needs {_ABI}: install thinwire again"
        )
    return library


_library = _load()


def available() -> bool:
    """Whether this installation has the library (it has not where no C++ compiler was found)."""
    return _library is not None


def _lib() -> ctypes.CDLL:
    assert _library is not None, "ops.backend() has seen to it"
    return _library


def isa() -> str:
    """The instruction set in use."""
    return _lib().thinwire_isa().decode()


def use_isa(name: str) -> None:
    """Use another instruction set: "avx512", "avx2", "neon" or "plain"."""
    if _lib().thinwire_use_isa(name.encode()):
        raise ValueError(f"THINWIRE_ISA={name!r}: this machine or build has no such kernels, it uses {isa()!r}")


def birder_encode(
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
    shift: int = 0,
) -> bool:
    """See `reference.birder_encode`."""
    return bool(
        _lib().thinwire_birder_encode(
            runs.data_ptr(),
            runs.shape[0],
            None if grad is None else grad.data_ptr(),
            0 if grad is None else _DTYPES[grad.dtype],
            m.data_ptr(),
            b.data_ptr(),
            _DTYPES[m.dtype],
            shift,
            alive.data_ptr(),
            packets.data_ptr(),
            beta,
            1.0 - beta,
            eps,
            scale,
            amsgrad,
            key,
        )
    )


def birder_direction(
    runs: Tensor,
    grad: Tensor | None,
    m: Tensor,
    b: Tensor,
    packets: Tensor,
    *,
    beta: float,
    eps: float,
    scale: float,
    amsgrad: bool,
    shift: int = 0,
) -> bool:
    """See `reference.birder_direction`."""
    return bool(
        _lib().thinwire_birder_direction(
            runs.data_ptr(),
            runs.shape[0],
            None if grad is None else grad.data_ptr(),
            0 if grad is None else _DTYPES[grad.dtype],
            m.data_ptr(),
            b.data_ptr(),
            _DTYPES[m.dtype],
            shift,
            packets.data_ptr(),
            beta,
            1.0 - beta,
            eps,
            scale,
            amsgrad,
        )
    )


def mean(rows: Tensor, out: Tensor) -> None:
    """See `reference.mean`."""
    _lib().thinwire_mean(
        rows.data_ptr(),
        rows.stride(0) * rows.element_size(),
        rows.shape[0],
        _DTYPES[rows.dtype],
        rows.shape[1],
        out.data_ptr(),
    )


def roll_call(
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
    shift: int = 0,
) -> None:
    """See `reference.roll_call`."""
    _lib().thinwire_roll_call(
        state.data_ptr(),
        _DTYPES[state.dtype],
        shift,
        first_word,
        shard_words,
        shards,
        period,
        phase,
        eps,
        packets.data_ptr(),
        packets.stride(0),
        offset,
    )


def vote_bit(
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
) -> None:
    """See `reference.vote_bit`."""
    _lib().thinwire_vote_bit(
        rows.data_ptr() + byte,
        rows.stride(0),
        rows.shape[0],
        None if alive is None else alive.data_ptr() + 8 * first_word,
        first_word,
        words,
        answer.data_ptr() + answer_byte,
        key,
        None if signal is None else signal.data_ptr(),
    )


def vote_count(
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
) -> None:
    """See `reference.vote_count`."""
    _lib().thinwire_vote_count(
        rows.data_ptr() + byte,
        rows.stride(0),
        rows.shape[0],
        alive.data_ptr() + 8 * first_word,
        words,
        planes,
        answer.data_ptr() + answer_byte,
        None if signal is None else signal.data_ptr(),
    )


def adopt(
    alive: Tensor,
    *,
    first_word: int,
    shard_words: int,
    answers: Tensor,
    byte: int,
    planes: int,
    period: int,
    phase: int,
) -> None:
    """See `reference.adopt`."""
    _lib().thinwire_adopt(
        alive.data_ptr(),
        first_word,
        shard_words,
        answers.shape[0],
        answers.data_ptr() + byte,
        answers.stride(0),
        planes,
        period,
        phase,
    )


def birder_apply(
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
) -> None:
    """See `reference.birder_apply`."""
    _lib().thinwire_birder_apply(
        runs.data_ptr(),
        runs.shape[0],
        x.data_ptr(),
        None if low is None else low.data_ptr(),
        0 if low is None else _DTYPES[low.dtype],
        alive.data_ptr(),
        answers.data_ptr(),
        planes,
        workers,
        lr / workers if workers else lr,
        decay,
    )


def dense_apply(runs: Tensor, x: Tensor, low: Tensor | None, answers: Tensor, *, lr: float, decay: float) -> None:
    """See `reference.dense_apply`."""
    _lib().thinwire_dense_apply(
        runs.data_ptr(),
        runs.shape[0],
        x.data_ptr(),
        None if low is None else low.data_ptr(),
        0 if low is None else _DTYPES[low.dtype],
        answers.data_ptr(),
        lr,
        decay,
    )
