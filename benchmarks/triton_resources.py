"""Compile all of thinwire's Triton kernels for GPUs that need not be there, and print what each of them takes.

pip install 'thinwire[dev,gpu]'
python -m benchmarks.triton_resources
python -m benchmarks.triton_resources --only sign_encode --capability 90

Every operation is called with small tensors, of all the dtypes that matter, and with what a call would start on a GPU
its kernels are compiled for: the types of arguments, which of them are multiples of 16, the constants and the options.
Exits with 1 if a kernel spills registers or has instructions that round in another way than the reference.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

CAPABILITIES = (80, 90)
_INEXACT = (r"\bfma\.\w+\.f32", r"\.ftz", r"\bdiv\.full", r"\bdiv\.approx", r"\bsqrt\.approx")
"""Instructions that fuse two roundings into one, lose subnormals, or are not rounded as IEEE 754 has it."""


@dataclass(frozen=True)
class Resources:
    """What one kernel takes, compiled for one kind of GPU."""

    operation: str
    kernel: str
    variant: str
    """Types of pointers and constants."""
    capability: int
    registers: int
    """Of a thread."""
    shared: int
    """Bytes of a program."""
    stack: int
    local: int
    spills: int
    """Bytes that are stored because registers do not suffice, and loaded again."""
    vectors: str
    """How many of the loads and stores of global memory move 16 bytes, or 8."""
    inexact: list[str]
    """Instructions that round in a way of their own."""

    @property
    def complaints(self) -> list[str]:
        """Why it would be slow, or not equal the reference to the bit."""
        wrong = [f"{name} {value} bytes" for name, value in self._memory.items() if value]
        return wrong + [f"rounds by {instruction}" for instruction in self.inexact]

    @property
    def _memory(self) -> dict[str, int]:
        return {"spills": self.spills, "stack": self.stack, "local": self.local}


@dataclass(frozen=True)
class _Job:
    """A kernel as a call would have started it."""

    operation: str
    function: Any
    signature: dict[str, str]
    constants: dict[Any, Any]
    attributes: dict[Any, Any]
    options: dict[str, Any]
    capability: int

    @property
    def variant(self) -> str:
        pointers = [f"{name}:{kind[1:]}" for name, kind in self.signature.items() if kind.startswith("*")]
        names = [parameter.name for parameter in self.function.params]
        constants = [f"{names[path[0]]}={value}" for path, value in self.constants.items() if names[path[0]].isupper()]
        return " ".join([*pointers, *constants])


_jobs: list[_Job] = []
"""What there is to compile: worker processes inherit it, since functions do not travel well."""


def collect(calls: Iterable[tuple[str, Callable[..., Any], dict[str, Any]]], capabilities: Iterable[int]) -> set[str]:
    """Call operations by name, and note what their kernels would be compiled for; returns those that started none."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend
    from triton.runtime.jit import JITFunction, create_function_from_signature

    backends = {capability: make_backend(GPUTarget("cuda", capability, 32)) for capability in capabilities}
    known: set[str] = set()
    operation, started = "", {}

    def note(function: Any, *args: Any, grid: tuple[int, ...], warmup: bool, **options: Any) -> None:
        del grid, warmup
        started[operation] = True
        options["debug"] = False  # as Triton adds it, which otherwise depends on the environment
        for capability, backend in backends.items():
            binder = create_function_from_signature(function.signature, function.params, backend)
            bound, specialization, _ = binder(*args, **options)
            parsed, signature, constants, attributes = function._pack_args(backend, options, bound, specialization, {})
            job = _Job(operation, function, signature, constants, attributes, parsed.__dict__, capability)
            key = repr((function.__name__, function.__module__, signature, constants, attributes, parsed, capability))
            if key not in known:
                known.add(key)
                _jobs.append(job)

    run = JITFunction.run
    setattr(JITFunction, "run", note)  # noqa: B010 - its types do not allow it
    try:
        for operation, function, arguments in calls:
            started.setdefault(operation, False)
            function(**arguments)
    finally:
        JITFunction.run = run
    return {name for name, has_kernel in started.items() if not has_kernel}


def compile_all(processes: int = 2) -> tuple[list[Resources], list[str]]:
    """Compile everything that was collected; returns what did, and why others did not."""
    with multiprocessing.get_context("fork").Pool(processes) as pool:
        outcomes = pool.map(_try_to_compile, range(len(_jobs)), chunksize=1)
    rows = [outcome for outcome in outcomes if isinstance(outcome, Resources)]
    rows.sort(key=lambda row: (row.operation, row.kernel, row.variant, row.capability))
    return rows, [outcome for outcome in outcomes if isinstance(outcome, str)]


def _try_to_compile(index: int) -> Resources | str:
    from triton.compiler.errors import CompilationError

    try:
        return _compile(index)
    except CompilationError as error:
        job = _jobs[index]
        return f"{job.operation} ({job.variant}, sm_{job.capability}) does not compile: {error}"


def _compile(index: int) -> Resources:
    import triton
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    job = _jobs[index]
    source = ASTSource(job.function, job.signature, job.constants, job.attributes)
    knobs.nvidia.dump_ptxas_log = True
    with contextlib.redirect_stdout(io.StringIO()) as log, tempfile.TemporaryDirectory() as cache:
        knobs.cache.dir = cache  # the log is of a compilation, and of none that was done before
        compiled = triton.compile(source, target=GPUTarget("cuda", job.capability, 32), options=job.options)
    spilled = [int(size) for size in re.findall(r"(\d+) bytes spill", log.getvalue())]
    if not spilled:
        raise RuntimeError(f"ptxas does not tell of spills: {log.getvalue()!r}")
    usage = _usage(compiled.asm["cubin"])
    ptx = compiled.asm["ptx"]
    return Resources(
        operation=job.operation,
        kernel=job.function.__name__,
        variant=job.variant,
        capability=job.capability,
        registers=usage["REG"],
        shared=compiled.metadata.shared,
        stack=usage["STACK"],
        local=usage["LOCAL"],
        spills=sum(spilled),
        vectors=_vectors(ptx),
        inexact=sorted({found for pattern in _INEXACT for found in re.findall(rf"\S*{pattern}\S*", ptx)}),
    )


def _usage(cubin: bytes) -> dict[str, int]:
    """Registers and memory, as the binary itself has them."""
    from triton.backends import nvidia

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = Path(nvidia.__path__[0]) / "bin" / "cuobjdump"
        command = [str(tool), "--dump-resource-usage", file.name]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", printed)}


def _vectors(ptx: str) -> str:
    accesses = re.findall(r"\b(?:ld|st)\.global\S*", ptx)
    wide = [access for access in accesses if ".v4.b32" in access or ".v2.b64" in access]
    half = [access for access in accesses if ".v2.b32" in access]
    return f"{len(wide)}, {len(half)} of {len(accesses)}"


def print_table(rows: Iterable[Resources]) -> None:
    """One line a kernel and GPU."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title="Triton kernels, compiled ahead of time")
    left = ("operation", "kernel", "variant")
    numbers = ("sm", "registers", "shared", "stack", "local", "spills", "16 and 8 bytes at once", "rounds by")
    for column in (*left, *numbers):
        table.add_column(column, justify="left" if column in left else "right", overflow="fold")
    for row in rows:
        memory = (row.registers, row.shared, row.stack, row.local, row.spills)
        cells = (row.operation, row.kernel, row.variant, row.capability, *memory, row.vectors, " ".join(row.inexact))
        table.add_row(*map(str, cells), style="red" if row.complaints else None)
    Console(width=None if sys.stdout.isatty() else 240).print(table)


def main() -> None:
    """Compile, print, and complain."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="an operation; all by default")
    parser.add_argument("--capability", type=int, choices=CAPABILITIES, help="80 or 90; both by default")
    parser.add_argument("--quick", action="store_true", help="a few variants of each; all by default, some minutes")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write what was found there too")
    plan = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET"):
        sys.exit(f"{parser.prog}: TRITON_INTERPRET is set, and Triton does not compile then")
    from tests.unit.triton_calls import calls
    from thinwire.kernels import triton

    chosen = [call for call in calls(thorough=not plan.quick) if plan.only in (None, call[0])]
    missing = collect(
        ((operation, getattr(triton, operation), arguments) for operation, arguments in chosen),
        [plan.capability] if plan.capability else CAPABILITIES,
    )
    rows, complaints = compile_all()
    complaints += [
        f"{row.operation} ({row.variant}, sm_{row.capability}): {what}" for row in rows for what in row.complaints
    ]
    complaints += [f"{operation} has started no kernel" for operation in sorted(missing)]
    if plan.json is not None:
        plan.json.write_text(json.dumps([asdict(row) for row in rows]), encoding="utf-8")
    print_table(rows)
    if complaints:
        sys.exit("\n".join(complaints))


if __name__ == "__main__":
    main()
