"""The report: which laws hold, how fast it is, and on what; as tables, as Markdown and as JSON."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from thinwire.cli import markdown as md
from thinwire.cli.selftest.speed import Kernel, Steps

PASSED, FAILED, NOT_TESTED = "passed", "failed", "not tested"


@dataclass(frozen=True)
class LawResult:
    """What came of a law."""

    number: int
    title: str
    compared: str
    status: str
    seconds: float
    complaints: list[str]
    notes: list[str]


@dataclass(frozen=True)
class _Section:
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    numeric: Sequence[str] = ()


@dataclass(frozen=True)
class SelftestResults:
    """All that the test has found."""

    device: str
    ranks: int
    quick: bool
    machine: dict[str, str]
    laws: list[LawResult]
    kernels: list[Kernel]
    steps: list[Steps]
    errors: dict[str, str]
    """Of benchmarks that have no result, why."""

    @property
    def failed(self) -> bool:
        """Whether anything has."""
        return bool(self.errors) or any(law.status == FAILED for law in self.laws)

    @property
    def summary(self) -> str:
        """In a line."""
        counts = {status: sum(law.status == status for law in self.laws) for status in (PASSED, FAILED, NOT_TESTED)}
        laws = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
        broken = "".join(f"; no benchmark of {name}" for name in self.errors)
        result = "FAILED" if self.failed else "passed"
        ranks = f"{self.ranks} rank{'s' if self.ranks > 1 else ''}"
        return f"thinwire selftest on {self.device}, {ranks}: {result} (laws: {laws}{broken})"

    def _sections(self) -> list[_Section]:
        sections = [
            _Section("Machine", ("what", "which"), [[name, value] for name, value in self.machine.items()]),
            _Section(
                "Laws",
                ("law", "what must hold", "result", "s"),
                [[str(law.number), law.title, _loud(law.status), f"{law.seconds:.1f}"] for law in self.laws],
                numeric=("s",),
            ),
        ]
        if self.kernels:
            sections.append(
                _Section(
                    f"Kernels over {self.kernels[0].elements:,} elements",
                    ("kernel", "µs", "bytes an element", "GB/s", "of a memcpy"),
                    [
                        [
                            k.name,
                            f"{k.seconds * 1e6:,.0f}",
                            f"{k.bytes_per_element:g}",
                            f"{k.bytes_per_second / 1e9:.1f}",
                            f"{k.memcpy_ratio:.2f}",
                        ]
                        for k in self.kernels
                    ],
                    numeric=("µs", "bytes an element", "GB/s", "of a memcpy"),
                )
            )
        if self.steps:
            sections.append(
                _Section(
                    f"Training steps per second, a transformer of {self.steps[0].parameters / 1e6:.2g} M parameters",
                    ("optimizer", "steps/s", "DDP + AdamW", "ratio"),
                    [
                        [s.label, f"{s.per_second:.2f}", f"{s.adamw_per_second:.2f}", f"{s.ratio:.2f}"]
                        for s in self.steps
                    ],
                    numeric=("steps/s", "DDP + AdamW", "ratio"),
                )
            )
        return sections

    def _remarks(self) -> list[tuple[str, list[str]]]:
        """What there is to say that does not fit into a table."""
        remarks = [("Compared", [f"{law.number}. {law.compared}" for law in self.laws])]
        remarks += [(f"Law {law.number} {law.status}", law.complaints) for law in self.laws if law.complaints]
        remarks += [(f"Law {law.number}, left out", law.notes) for law in self.laws if law.notes]
        return remarks + [(f"No benchmark of {name}", [error]) for name, error in self.errors.items()]

    def print_tables(self, console: Console) -> None:
        """For people at a terminal."""
        for section in self._sections():
            table = Table(title=section.title, title_justify="left")
            for column in section.columns:
                table.add_column(column, justify="right" if column in section.numeric else "left")
            for row in section.rows:
                table.add_row(*map(escape, row))
            console.print(table)
        for title, lines in self._remarks():
            console.print(f"{title}:", markup=False, highlight=False)
            for line in lines:
                console.print(f"  {line}", markup=False, highlight=False, soft_wrap=True)
        console.print(self.summary, markup=False, highlight=False, soft_wrap=True)

    def markdown(self) -> str:
        """For an issue."""
        parts = [f"**{self.summary}**"]
        for section in self._sections():
            rules = ["--:" if column in section.numeric else "---" for column in section.columns]
            rows = [section.columns, rules, *section.rows]
            lines = [md.row([_markdown_cell(cell) for cell in row]) for row in rows]
            parts.append("\n".join([f"### {section.title}", "", *lines]))
        for title, lines in self._remarks():
            fence = _fence(lines)
            parts.append("\n".join([f"### {title}", "", f"{fence}text", *lines, fence]))
        return "\n\n".join(parts) + "\n"

    def write_json(self, path: Path) -> None:
        """For programs."""
        figures = {
            **asdict(self),
            "failed": self.failed,
            "kernels": [{**asdict(k), "bytes_per_second": k.bytes_per_second} for k in self.kernels],
            "steps": [{**asdict(s), "ratio": s.ratio} for s in self.steps],
        }
        path.write_text(json.dumps(figures, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def _markdown_cell(text: str) -> str:
    """Text that stays in its cell of a table, and is shown as it is."""
    return re.sub(r"([\\`*|\[\]])", r"\\\1", html.escape(" ".join(text.split()), quote=False))


def _fence(lines: Sequence[str]) -> str:
    """What begins and ends a block of code that contains these lines."""
    longest = max((len(run) for line in lines for run in re.findall("`+", line)), default=0)
    return "`" * max(3, longest + 1)


def _loud(status: str) -> str:
    return status.upper() if status == FAILED else status
