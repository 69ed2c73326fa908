"""What came of it: the faults, what they have found, and a report for people and for programs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import thinwire

HANG = "hang"
WRONG_ERROR = "wrong error"
CRASH = "crash"
FALSE_ALARM = "false alarm"
DIVERGENCE = "silent divergence"
LOST = "lost checkpoint"
WRONGS = {
    HANG: "a rank that had not ended by itself within the timeout and 5 s",
    WRONG_ERROR: "a rank that raised something else than PeerLost or CorruptPacket",
    CRASH: "a rank that was ended by a signal that was not part of a fault",
    FALSE_ALARM: "a rank that failed where it should have gone on",
    DIVERGENCE: "parameters or skipped steps other than those of the run without faults",
    LOST: "a checkpoint that all ranks had saved, and that was not what they went on from",
}
"""What must not happen, by name."""


@dataclass
class Fault:
    """One fault, and how long it took."""

    kind: str
    episode: int
    contender: str
    step: int
    """The last step that any rank had reported."""
    victims: list[int]
    noticed_after: float | None = None
    """Until the last rank that had to raise had raised, in seconds; None if none had to."""
    ended_after: float | None = None
    """Until the last of them had ended."""
    restarted: bool = False

    def take_down(self, seconds: Iterable[tuple[float, float]]) -> None:
        """When ranks that had to end noticed and ended."""
        self.restarted = True
        noticed, ended = zip(*seconds, strict=True)
        self.noticed_after = max(self.noticed_after or 0.0, *noticed)
        self.ended_after = max(self.ended_after or 0.0, *ended)


@dataclass(frozen=True)
class Wrong:
    """Something that must not happen, with all that is known of it."""

    what: str
    episode: int
    contender: str
    fault: str
    rank: int | None
    step: int
    details: str


@dataclass(frozen=True)
class Ending:
    """An episode that has come to its end."""

    episode: int
    contender: str
    steps: int
    skipped: int
    faults: int
    restarts: int
    digest: str


_RECORDS: dict[str, type] = {"faults": Fault, "wrongs": Wrong, "endings": Ending}


@dataclass
class ChaosResults:
    """All of a run, of one call or of several that write to the same file."""

    seed: int
    hosts: int
    timeout: float
    faults: list[Fault] = field(default_factory=list)
    wrongs: list[Wrong] = field(default_factory=list)
    endings: list[Ending] = field(default_factory=list)
    restart_seconds: list[float] = field(default_factory=list)
    """Each from the forks to the first step of the slowest rank."""
    seconds: float = 0.0
    episodes: int = 0
    """Those that are over, ended or given up: the next call goes on with the one after them."""

    def to_json(self) -> str:
        """Everything, for programs; a fault is a line."""
        found = Counter(wrong.what for wrong in self.wrongs)
        summary: dict[str, Any] = {
            "thinwire": thinwire.__version__,
            "torch": torch.__version__,
            "faults_by_kind": dict(Counter(fault.kind for fault in self.faults)),
            "wrongs_by_kind": {what: found[what] for what in WRONGS},
            "worst_seconds_to_notice": _worst(fault.noticed_after for fault in self.faults),
            "worst_seconds_to_end": _worst(fault.ended_after for fault in self.faults),
            "restarts": self.restarts,
        }
        entries = {name: json.dumps(value) for name, value in {**summary, **asdict(self)}.items()}
        for name in _RECORDS:
            lines = ",\n  ".join(json.dumps(asdict(record)) for record in getattr(self, name))
            entries[name] = f"[\n  {lines}\n ]" if lines else "[]"
        return "{\n" + ",\n".join(f" {json.dumps(name)}: {value}" for name, value in entries.items()) + "\n}\n"

    @classmethod
    def from_json(cls, text: str) -> ChaosResults:
        """What `to_json` was made of.

        Raises:
            ValueError: if it is something else.
        """
        try:
            saved = json.loads(text)
            given = {each.name: saved[each.name] for each in fields(cls)}
            records = {name: [kind(**entry) for entry in given[name]] for name, kind in _RECORDS.items()}
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"it has no results of thinwire chaos that could go on: {error!r}") from None
        return cls(**{**given, **records})

    @property
    def restarts(self) -> int:
        """How often all ranks were started again."""
        return sum(fault.restarted for fault in self.faults)

    def print(self, console: Console) -> None:
        """The tables, and what must not have happened."""
        table = _table("Faults", ("fault", "times", "restarts", "raised within", "ended within"))
        for kind in sorted({fault.kind for fault in self.faults}):
            table.add_row(kind, *_cells([fault for fault in self.faults if fault.kind == kind]))
        table.add_section()
        table.add_row("all", *_cells(self.faults))
        console.print(table)
        found = Counter(wrong.what for wrong in self.wrongs)
        table = _table("What must not happen", ("what", "times", "it is"))
        for what, meaning in WRONGS.items():
            table.add_row(what, f"[{'bold red' if found[what] else 'green'}]{found[what]}[/]", meaning)
        console.print(table)
        for wrong in self.wrongs:
            console.print(f"[bold red]{wrong.what}[/], {escape(_where(wrong))}")
            console.print(wrong.details, markup=False, highlight=False, soft_wrap=True)
        equal = len(self.endings) - len({w.episode for w in self.wrongs if w.what == DIVERGENCE})
        minutes = self.seconds / 60
        console.print(
            f"{len(self.endings)} episodes, {equal} of them equal to the bit to the run without faults; "
            f"{len(self.faults)} faults in {minutes:.1f} minutes, {len(self.faults) / minutes:.0f} per minute",
            highlight=False,
        )

    def write(self, path: Path) -> None:
        """Write everything to a file, which is whole at any time, or to a pipe."""
        if path.exists() and not path.is_file():
            path.write_text(self.to_json(), encoding="utf-8")
            return
        written = path.with_name(f"{path.name}.new")
        written.write_text(self.to_json(), encoding="utf-8")
        written.replace(path)


def _cells(faults: Sequence[Fault]) -> list[str]:
    worst = (_worst(fault.noticed_after for fault in faults), _worst(fault.ended_after for fault in faults))
    restarts = sum(fault.restarted for fault in faults)
    return [str(len(faults)), str(restarts), *("" if seconds is None else f"{seconds:.2f} s" for seconds in worst)]


def _worst(seconds: Iterable[float | None]) -> float | None:
    return max((value for value in seconds if value is not None), default=None)


def _where(wrong: Wrong) -> str:
    rank = "" if wrong.rank is None else f", rank {wrong.rank}"
    return f"episode {wrong.episode} ({wrong.contender}), {wrong.fault}{rank}, after step {wrong.step}"


def _table(title: str, headings: tuple[str, ...]) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in headings:
        numeric = heading not in ("fault", "what", "it is")
        table.add_column(heading, justify="right" if numeric else "left", no_wrap=heading != "it is")
    return table
