"""The kernels in C++, called through ctypes, which releases the GIL while they run.

csrc/kernels.def declares them. `binding` makes one Python function per declaration, with the signature of the
reference. The library has code for AVX-512, AVX2, NEON or the plain instruction set; the best one is used.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from thinwire.kernels import arguments, reference, threads
from thinwire.kernels.bounds import refuse_indices
from thinwire.kernels.native import library
from thinwire.kernels.native.binding import bind, prepare

PATH = library.PATH
REMEDY = library.REMEDY
_ON_FAILURE = {"sparse_amsgrad": refuse_indices}
_library = library.load()
_in_use: dict[str, Any] = {}
"""What the functions of `KERNELS` look up: the kernels of the instruction set in use by their name, their table, and
the same kernels on several threads."""
_isa = ""


def available() -> bool:
    """Whether this installation has the library. It does not if no C++ compiler was found."""
    return _library is not None


def isa() -> str:
    """The instruction set in use."""
    return _isa


def use_isa(name: str) -> None:
    """Use another instruction set: "avx512", "avx2", "neon" or "plain".

    Raises:
        ValueError: when this build or this machine does not have it.
    """
    global _isa  # noqa: PLW0603 - there is one library per process
    table = None if _library is None else _library.table_of(name)
    if _library is None or table is None:
        raise ValueError(f"THINWIRE_ISA={name!r}: this machine or build has no such kernels, it uses {_isa!r}")
    _in_use.update(_library.kernels_at(table, name), _table=table)
    _isa = name


def declarations() -> dict[str, library.Declaration]:
    """What the library declares, by the names of the kernels; nothing where it is not `available`."""
    return {} if _library is None else _library.declarations


def raw(name: str) -> Callable[..., Any]:
    """A kernel as the library has it, which takes pointers and checks nothing."""
    return _in_use[name]


def on_threads(name: str) -> bool:
    """Whether several threads can share a call of a kernel."""
    return f"{name}_on_threads" in _in_use


def prepared(name: str, varying: str, arguments: Mapping[str, Any]) -> Callable[[Tensor], Any]:
    """A kernel that takes the argument `varying`, and has all others; see `binding.prepare`."""
    return prepare(declarations()[name], getattr(reference, name), KERNELS[name], arguments, varying, _in_use)


def _bound() -> dict[str, Callable[..., Any]]:
    if _library is None:
        return {}
    use_isa(_library.best_isa)
    _in_use.update({f"{name}_on_threads": kernel for name, kernel in _library.on_threads.items()}, _threads=threads)
    functions = {
        name: bind(declaration, getattr(reference, name), getattr(arguments, name), _in_use, _ON_FAILURE.get(name))
        for name, declaration in _library.declarations.items()
    }
    # A few numbers per shard, or headers: torch is fast enough. Only the checksum is native.
    functions |= {"shard_scale": reference.shard_scale, "clear_words": reference.clear_words}
    for name in ("packet_seal", "packet_check"):
        functions[name] = functools.partial(getattr(reference, name), checksum=functions["crc32c"])
    return functions


KERNELS = _bound()
"""The functions of this backend by their name."""
