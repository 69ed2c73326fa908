"""Which native kernels this machine can run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from thinwire.kernels import native


def instruction_sets() -> list[str]:
    """Their names; none where thinwire was installed without a compiler. The one in use stays in use."""
    if not native.available():
        return []
    in_use, found = native.isa(), []
    for name in ("plain", "neon", "avx2", "avx512"):
        try:
            native.use_isa(name)
        except ValueError:
            continue
        found.append(name)
    native.use_isa(in_use)
    return found


@contextmanager
def instruction_set_restored() -> Iterator[None]:
    """Whatever is chosen inside, by THINWIRE_ISA or otherwise, is not what runs afterwards."""
    in_use = native.isa() if native.available() else None
    try:
        yield
    finally:
        if in_use is not None:
            native.use_isa(in_use)
