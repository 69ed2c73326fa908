"""The most memory that this process has held, as Linux counts it."""

from __future__ import annotations

import ctypes
from pathlib import Path


def peak_bytes(*, reset: bool) -> int | None:
    """The most since the last reset, or since now; None where the system does not report it."""
    process = Path("/proc/self")
    if not (process / "clear_refs").exists():
        return None
    if reset:
        (process / "clear_refs").write_text("5")
    status = (process / "status").read_text().splitlines()
    peak = next(line for line in status if line.startswith("VmHWM:"))
    return int(peak.split()[1]) * 1024


def return_free_memory() -> None:
    """Have glibc return what was freed. It keeps blocks of up to 32 MB, which then look as if they were in use."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:  # other C libraries do not have it
        trim(0)
