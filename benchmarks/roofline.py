"""A roofline model of steps on GPUs: bytes of device memory, kernel time, network time, and when compression pays.

python -m benchmarks.roofline
python -m benchmarks.roofline --markdown      # the tables of docs/gpu-roofline.md

Nothing is measured. All numbers follow from `benchmarks.roofline_kernels`, the layouts of two models, and the constants
below.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.roofline_kernels import CHECKSUMS, FLOAT, FORMS, METHODS, TILE, WORKERS, YARDSTICK, Bytes, Form, Method
from thinwire.transport.buffers import WORD_BYTES
from thinwire.transport.layout import WORD, Layout, bucket_elements
from thinwire.transport.packet import HEADER_BYTES

PEAKS = {"A100": 2039e9, "H100": 3350e9}
"""Bytes per second of device memory, from NVIDIA's data sheets: A100 80GB SXM and H100 SXM."""
ATTAINED = 0.85
"""The assumed part of the peak that a kernel reaches if it only streams memory."""
LINKS = {"10 Gbit/s": 10e9, "100 Gbit/s": 100e9}
SECONDS_PER_TILE = 20e-9
"""Assumed for one iteration of the loop that adds the sums of tiles in order."""
INTEGER_RATES = {"A100": 9.75e12, "H100": 16.7e12}
"""32-bit integer instructions per second: half of the peak of NVIDIA's white papers, which count each twice."""
CHECKSUM_INSTRUCTIONS = 32 * 7
"""Approximately, per 4 bytes: a product of polynomials takes 32 iterations."""
LAUNCH_SECONDS = (5e-6, 10e-6)
"""The time of the host to launch a kernel: least and most."""
_COMMIT_BYTES = 2 * HEADER_BYTES
"""Of a message of the commit round, to each other rank."""

# Models ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Model:
    """The sizes of a model's parameters, and how they lie in buckets."""

    name: str
    numels: Sequence[int]

    @property
    def elements(self) -> int:
        """The number of parameters."""
        return sum(self.numels)

    @functools.cached_property
    def layout(self) -> Layout:
        """With buckets of the default size."""
        return Layout(self.numels, WORKERS, bucket_elements(None, self.elements))

    @functools.cached_property
    def longest_runs(self) -> list[int]:
        """For every part, the tiles of its longest run. Runs are summed in parallel, the tiles of a run are not."""
        longest: list[int] = []
        for slot in self.layout.slots:
            for _, pieces in itertools.groupby(self.layout.pieces(slot), key=lambda piece: piece.bucket):
                longest.append(max(-(-(piece.stop - piece.start) // TILE) for piece in pieces))
        return longest

    @functools.cached_property
    def longest_owned_runs(self) -> list[int]:
        """For every bucket, the tiles of the longest run in any of its shards."""
        longest = [0] * len(self.layout.buckets)
        for slot in self.layout.slots:
            for piece in self.layout.pieces(slot):
                longest[piece.bucket] = max(longest[piece.bucket], -(-(piece.stop - piece.start) // TILE))
        return longest


def _transformer(*, layers: int, width: int, tables: Sequence[int], tensors_of_qkv: int) -> list[int]:
    """The parameters of a transformer: embedding tables with these numbers of rows, a norm, and layers with biases."""
    norm = [width, width]
    qkv = [3 * width * width // tensors_of_qkv, 3 * width // tensors_of_qkv] * tensors_of_qkv
    layer = [*qkv, width * width, width, *norm, 4 * width * width, 4 * width, 4 * width * width, width, *norm]
    return [*(rows * width for rows in tables), *norm, *(layer * layers)]


MODELS = (
    Model("110 M", _transformer(layers=12, width=768, tables=(30_522, 512, 2), tensors_of_qkv=3)),
    Model("1.3 B", _transformer(layers=24, width=2048, tables=(50_257, 2048), tensors_of_qkv=1)),
)
"""BERT-base without its pooler, and GPT-3 XL."""


# Costs ----------------------------------------------------------------------------------------------------------------


def moved(method: Method, form: Form) -> tuple[float, float]:
    """Bytes read and written per parameter and step."""
    kernels = method.kernels(form)
    return sum(kernel.read for kernel in kernels), sum(kernel.written for kernel in kernels)


def kernel_seconds(method: Method, form: Form, model: Model, gpu: str) -> float:
    """The time of all kernels of a step if they are bound by memory."""
    return sum(moved(method, form)) * model.elements / (ATTAINED * PEAKS[gpu])


def sum_seconds(method: Method, form: Form, model: Model) -> float:
    """The time of the loops that add sums in order, one launch after another. One loop adds all sums of a kernel."""
    tiles = {"part": model.longest_runs, "bucket": model.longest_owned_runs}
    kernels = [kernel for kernel in method.kernels(form) if kernel.sums]
    return SECONDS_PER_TILE * sum(kernel.often * sum(tiles[kernel.each]) for kernel in kernels)


def checksum_seconds(method: Method, form: Form, model: Model, gpu: str) -> float:
    """The time of checksums, which are bound by arithmetic."""
    words = sum(kernel.read / FLOAT for kernel in method.kernels(form) if kernel.name in CHECKSUMS)
    return words * model.elements * CHECKSUM_INSTRUCTIONS / INTEGER_RATES[gpu]


def launches(method: Method, form: Form, model: Model) -> float:
    """The launches of a step. A kernel with sums takes one more."""
    buckets = len(model.layout.buckets)
    times = {"part": len(model.longest_runs), "shard": WORKERS * buckets, "bucket": buckets, "model": 1}
    kernels = method.kernels(form)
    return sum(kernel.often * (kernel.launches + (kernel.sums > 0)) * times[kernel.each] for kernel in kernels)


def spent_seconds(method: Method, form: Form, model: Model, gpu: str) -> float:
    """The time of the optimizer alone: that of the device, or that of the host with the slowest launches if longer."""
    on_device = kernel_seconds(method, form, model, gpu) + checksum_seconds(method, form, model, gpu)
    on_device += sum_seconds(method, form, model)
    return max(on_device, launches(method, form, model) * LAUNCH_SECONDS[1])


def wire_bytes(method: Method, layout: Layout) -> float:
    """Bytes that a rank sends in a step, headers included."""
    if method.payload is None:
        return 0.0
    payload = method.payload(Layout([WORD], WORKERS, WORD))
    sent = _COMMIT_BYTES * (WORKERS - 1)
    for bucket in layout.buckets:
        words = [to(bucket.shard_words) - (-len(bucket.slots) // WORD) for to in (payload.up_words, payload.down_words)]
        sent += (WORKERS - 1) * (2 * HEADER_BYTES + WORD_BYTES * sum(words))
    return method.sends * sent


def all_reduce_bytes(elements: int, of_each: float) -> float:
    """Bytes that a rank sends in DDP's ring all-reduce."""
    return 2 * (WORKERS - 1) / WORKERS * of_each * elements


# Tables ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Table:
    """Rows of text under a title."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> str:
        """The table in GitHub's Markdown."""
        lines = [self.header, ["---"] + ["---:"] * (len(self.header) - 1), *self.rows]
        return "\n".join([f"### {self.title}", "", *(f"| {' | '.join(cells)} |" for cells in lines)])


OURS = {name: method for name, method in METHODS.items() if name != YARDSTICK}
SENDERS = {name: method for name, method in OURS.items() if method.payload is not None}
ALL_REDUCES = {"DDP, fp32": FLOAT, "DDP, bf16": 2.0}


def tables() -> list[Table]:
    """All tables, in the order of the page."""
    return [
        _bytes_table(),
        _time_table(),
        _overhead_table(),
        _network_table(),
        *map(_ratio_table, FORMS),
        *map(_break_even_table, FORMS),
        *_kernel_tables(),
    ]


def _bytes_table() -> Table:
    rows: list[list[str]] = []
    for name, method in METHODS.items():
        cells: list[str] = []
        for form in FORMS:
            read, written = moved(method, form)
            ratio = (read + written) / sum(moved(METHODS[YARDSTICK], form))
            cells += [f"{read:.2f}", f"{written:.2f}", f"{read + written:.2f}", f"{ratio:.2f}"]
        rows.append([name, *cells])
    heads = [f"{form.name}: {what}" for form in FORMS for what in ("read", "written", "sum", "AdamW = 1")]
    return Table("Bytes of device memory per parameter and step", ["", *heads], rows)


def _time_table() -> Table:
    cases = list(itertools.product(FORMS, MODELS, PEAKS))
    heads = [f"{form.name}, {model.name}, {gpu}" for form, model, gpu in cases]
    rows = [
        [name, *(_ms(kernel_seconds(method, form, model, gpu)) for form, model, gpu in cases)]
        for name, method in METHODS.items()
    ]
    return Table(f"Kernel time in ms per step, at {ATTAINED:.0%} of peak memory bandwidth", ["", *heads], rows)


def _overhead_table() -> Table:
    form, rows = FORMS[0], []
    for name, method in OURS.items():
        cells: list[str] = []
        for model in MODELS:
            count = launches(method, form, model)
            low, high = (_ms(count * each) for each in LAUNCH_SECONDS)
            checksums = [_ms(checksum_seconds(method, form, model, gpu)) for gpu in PEAKS]
            cells += [f"{count:,.0f}", f"{low} to {high}", _ms(sum_seconds(method, form, model)), *checksums]
        rows.append([name, *cells])
    what = ("launches", "host time of launches", "sums in order", *(f"checksums, {gpu}" for gpu in PEAKS))
    heads = [f"{model.name}: {each}" for model in MODELS for each in what]
    return Table("In addition, in ms per step: launches, sums in order, and checksums", ["", *heads], rows)


def _network_table() -> Table:
    sent = {name: [all_reduce_bytes(model.elements, size) for model in MODELS] for name, size in ALL_REDUCES.items()}
    sent |= {name: [wire_bytes(method, model.layout) for model in MODELS] for name, method in SENDERS.items()}
    rows: list[list[str]] = []
    for name, sizes in sent.items():
        cells: list[str] = []
        for i, size in enumerate(sizes):
            less = [f"{sent[dense][i] / size:.1f}" for dense in ALL_REDUCES]
            cells += [f"{size / 1e6:,.2f}", *(_ms(8 * size / rate) for rate in LINKS.values()), *less]
        rows.append([name, *cells])
    what = ["MB", *(f"ms at {link}" for link in LINKS), *(f"factor to {dense}" for dense in ALL_REDUCES)]
    heads = [f"{model.name}: {each}" for model in MODELS for each in what]
    return Table(f"Bytes that one of {WORKERS} ranks sends per step", ["", *heads], rows)


def _ratio_table(form: Form) -> Table:
    cases = list(itertools.product(MODELS, PEAKS, LINKS.items()))
    rows: list[list[str]] = []
    for name, method in OURS.items():
        cells: list[str] = []
        for model, gpu, (_, rate) in cases:
            dense = spent_seconds(METHODS[YARDSTICK], form, model, gpu)
            dense += 8 * all_reduce_bytes(model.elements, form.grad) / rate
            ours = spent_seconds(method, form, model, gpu) + 8 * wire_bytes(method, model.layout) / rate
            cells.append(f"{dense / ours:.1f}")
        rows.append([name, *cells])
    heads = [f"{model.name}, {gpu}, {link}" for model, gpu, (link, _) in cases]
    title = f"Speed relative to DDP + AdamW with {form.name} gradients: network and optimizer only, no overlap"
    return Table(title, ["", *heads], rows)


def _break_even_table(form: Form) -> Table:
    cases = list(itertools.product(MODELS, PEAKS))
    rows: list[list[str]] = []
    for name, method in OURS.items():
        cells: list[str] = []
        for model, gpu in cases:
            saved = all_reduce_bytes(model.elements, form.grad) - wire_bytes(method, model.layout)
            times = (kernel_seconds(method, form, model, gpu), spent_seconds(method, form, model, gpu))
            cells += [f"{8 * saved / each / 1e9:,.0f}" if saved > 0 else "never" for each in times]
        rows.append([name, *cells])
    what = ("memory only", "all")
    heads = [f"{model.name}, {gpu}, {each}" for (model, gpu), each in itertools.product(cases, what)]
    title = f"Break-even in Gbit/s: kernel time equals the network time saved, relative to {form.name} gradients"
    return Table(title, ["", *heads], rows)


def _kernel_tables() -> Iterator[Table]:
    for name, method in METHODS.items():
        if name not in DETAILED:
            continue
        rows: list[list[str]] = []
        for wide, narrow in zip(*(method.kernels(form) for form in FORMS), strict=True):
            operands = [_operands(wide.reads, narrow.reads), _operands(wide.writes, narrow.writes)]
            sizes = [f"{kernel.read + kernel.written:.3f}" for kernel in (wide, narrow)]
            rows.append([wide.name, *operands, str(wide.sums or ""), f"{wide.share:.4g}", *sizes])
        header = ["", "reads", "writes", "sums", "part of the model", *(f"{form.name}: bytes" for form in FORMS)]
        yield Table(f"{name}: kernels", header, rows)


DETAILED = (
    "Birder, bit, fp32 state",
    "Birder, votes, fp32 state",
    "1-bit Adam, fp32 errors",
    "1-bit Adam, warm-up",
    "0/1 Adam, synchronising step",
    "0/1 Adam, local step",
    "1-bit LAMB",
    "CD-Adam",
)
"""The methods whose kernels are listed. Others differ only in the bytes of a state or in the name of a kernel."""


def _operands(wide: Bytes, narrow: Bytes) -> str:
    """Names and bytes per element, for both forms if they differ. The bf16 form has all names."""
    return ", ".join(f"{name} {_either(wide.get(name, 0.0), size)}" for name, size in narrow.items())


def _either(wide: float, narrow: float) -> str:
    return f"{wide:.4g}" if wide == narrow else f"{wide:.4g} or {narrow:.4g}"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.2f}" if seconds else "0"


def markdown() -> str:
    """All tables, as at the end of docs/gpu-roofline.md."""
    return "\n\n".join(table.markdown() for table in tables())


def main() -> None:
    """Print all tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--markdown", action="store_true", help="print the tables of docs/gpu-roofline.md")
    if parser.parse_args().markdown:
        print(markdown())
        return
    from rich import table as rich_table  # in the extra "cli", which --markdown does not need
    from rich.console import Console

    for table in tables():
        printed = rich_table.Table(title=table.title)
        for i, head in enumerate(table.header):
            printed.add_column(head, justify="right" if i else "left")
        for cells in table.rows:
            printed.add_row(*cells)
        Console(width=None if sys.stdout.isatty() else 240).print(printed)


if __name__ == "__main__":
    main()
