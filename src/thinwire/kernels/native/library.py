"""The shared library: where it is, what it declares, and the kernels of each instruction set.

The library exports the declarations of csrc/kernels.def as text. ctypes signatures are made from that text, so they
are those of the library that is loaded. The environment variable `THINWIRE_NATIVE_LIBRARY` names another build, which
must exist: for example that of `make sanitize`, whose kernels check every access. With `THINWIRE_REQUIRE_NATIVE=1` an
installation without the library cannot be imported.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_OTHER_BUILD = os.environ.get("THINWIRE_NATIVE_LIBRARY")
PATH = Path(_OTHER_BUILD or Path(__file__).parent.with_name("_native.so"))
REMEDY = "Install a C++ compiler (Debian: apt-get install g++) and then thinwire again."
_OFF = ("", "0", "n", "no", "off", "false", "f")
"""Values of THINWIRE_REQUIRE_NATIVE that require nothing: those of scikit-build-core, which reads it when it builds."""

_DECLARATION = re.compile(r"(?P<result>\w+) (?P<name>\w+) \((?P<parameters>[^()]*)\)")
_PARAMETER = re.compile(r"(?P<type>(const )?\w+( \*)?) ?(?P<name>\w+)")
_TYPES: dict[str, Any] = {
    "void": None,
    "int": ctypes.c_int,
    "int64_t": ctypes.c_int64,
    "uint32_t": ctypes.c_uint32,
    "uint64_t": ctypes.c_uint64,
    "float": ctypes.c_float,
    "double": ctypes.c_double,
}


@dataclass(frozen=True)
class Parameter:
    """A parameter of a kernel, as the library declares it: its name and its C type."""

    name: str
    type: str

    @property
    def is_pointer(self) -> bool:
        """Whether it is the address of a tensor's memory."""
        return self.type.endswith("*")

    @property
    def ctype(self) -> Any:
        """What ctypes converts an argument to."""
        return ctypes.c_void_p if self.is_pointer else _TYPES[self.type]


@dataclass(frozen=True)
class Declaration:
    """A kernel as the library declares it."""

    name: str
    result: str
    parameters: tuple[Parameter, ...]

    def at(self, address: int, *, on_threads: bool = False) -> Callable[..., Any]:
        """The kernel at an address, as a function; that on several threads takes a table and their number first."""
        first = (ctypes.c_void_p, ctypes.c_int) if on_threads else ()
        types = (parameter.ctype for parameter in self.parameters)
        return ctypes.CFUNCTYPE(_TYPES[self.result], *first, *types)(address)


def parse(text: str) -> dict[str, Declaration]:
    """The declarations of a library by their name, in the order of its tables.

    Raises:
        ImportError: when a declaration cannot be read.
    """
    declarations: dict[str, Declaration] = {}
    for line in text.splitlines():
        match = _DECLARATION.fullmatch(line)
        found = [_PARAMETER.fullmatch(part.strip()) for part in match["parameters"].split(",")] if match else []
        if not match or not all(found) or match["result"] not in _TYPES:
            raise ImportError(f"{PATH} declares {line!r}: expected `result name (type name, ...)`")
        parameters = tuple(Parameter(one["name"], one["type"]) for one in found if one)
        unknown = [one.type for one in parameters if not one.is_pointer and not _TYPES.get(one.type)]
        if unknown:
            raise ImportError(f"{PATH} declares {line!r}: expected one of the types {', '.join(_TYPES)} or a pointer")
        declarations[match["name"]] = Declaration(match["name"], match["result"], parameters)
    return declarations


class Library:
    """A loaded library."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        try:
            declarations, best_isa = self._library.thinwire_declarations, self._library.thinwire_best_isa
            self._kernels_for = self._library.thinwire_kernels_for
            table_on_threads = self._library.thinwire_on_threads
        except AttributeError as error:
            raise ImportError(f"{path} is of another version of thinwire: install thinwire again") from error
        declarations.restype = best_isa.restype = ctypes.c_char_p
        self._kernels_for.restype, self._kernels_for.argtypes = ctypes.c_void_p, [ctypes.c_char_p]
        self.declarations = parse(declarations().decode())
        self.best_isa: str = best_isa().decode()
        table_on_threads.restype = ctypes.c_void_p
        addresses = self._addresses(table_on_threads())
        self.on_threads = {
            name: self.declarations[name].at(at, on_threads=True) for name, at in addresses.items() if at
        }
        """The kernels that can run on several threads, by their name."""

    def _addresses(self, table: int) -> dict[str, int | None]:
        addresses = (ctypes.c_void_p * len(self.declarations)).from_address(table)
        return dict(zip(self.declarations, addresses, strict=True))

    def table_of(self, isa: str) -> int | None:
        """The address of the kernels of an instruction set; None when this build or machine does not have it."""
        return self._kernels_for(isa.encode())

    def kernels_at(self, table: int, isa: str) -> dict[str, Callable[..., Any]]:
        """The kernels of an instruction set by their name."""
        addresses = self._addresses(table)
        for name, address in addresses.items():
            if address is None:
                raise ImportError(
                    f"{PATH} declares the kernel {name} and has none for {isa}: no file in csrc defines it"
                )
        return {name: self.declarations[name].at(address) for name, address in addresses.items() if address}


def load() -> Library | None:
    """The library of this installation; None when it was installed without a C++ compiler.

    Raises:
        ImportError: when there is none and `THINWIRE_REQUIRE_NATIVE=1`.
    """
    if PATH.exists() or _OTHER_BUILD:
        return Library(PATH)
    required = os.environ.get("THINWIRE_REQUIRE_NATIVE", "")
    if required.lower() not in _OFF:
        raise ImportError(
            f"THINWIRE_REQUIRE_NATIVE={required}, but thinwire was installed without its native kernels: {PATH} does "
            f"not exist. {REMEDY}"
        )
    return None
