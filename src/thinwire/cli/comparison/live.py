"""What the demo shows while it runs: a bar per run in a terminal, a few lines elsewhere."""

from __future__ import annotations

from collections import deque
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from thinwire.cli.comparison.training import TrainingProgress, TrainingResult
from thinwire.cli.units import byte_count

# Bytes per second are a mean over this time, or they would jump with every message.
SECONDS_OF_RATE = 2.0
PLAIN_LINES = 4


class LiveView:
    """Shows runs one after another. Where the output is no terminal, a run is a few plain lines.

    Args:
        console: where to.
        labels: of the runs, in their order.
        time_name: what to call seconds: "s", or "s predicted".
    """

    def __init__(self, console: Console, labels: list[str], time_name: str) -> None:
        self._console, self._time_name = console, time_name
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=12),
            TextColumn("{task.fields[status]}"),
            console=console,
            # Drawn when there is something to say, not ten times a second: the workers need the cores.
            auto_refresh=False,
            # In a file or a pipe a bar is nothing but noise.
            disable=not console.is_terminal,
        )
        self._bars: list[TaskID] = [self._progress.add_task(label, total=1.0, status="") for label in labels]
        self._labels = labels
        self._run = -1
        self._recent: deque[tuple[float, float]] = deque()
        self._lines_said = 0

    def __enter__(self) -> LiveView:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def begin(self, ranks: int) -> None:
        """The next run begins."""
        self._run += 1
        self._recent.clear()
        self._recent.append((0.0, 0.0))
        self._lines_said = 0
        self._show(0.0, f"starting {ranks} workers")

    def show(self, at: TrainingProgress) -> None:
        """A run has come this far."""
        status = self._status(at)
        self._show(at.share, status)
        if self._progress.disable and at.share < 1 and int(at.share * PLAIN_LINES) > self._lines_said:
            self._lines_said = int(at.share * PLAIN_LINES)
            self._say(status)

    def end(self, result: TrainingResult) -> None:
        """A run is over."""
        status = (
            f"{result.training_seconds:.1f} {self._time_name}, {result.steps} steps, validation "
            f"loss {result.validation_loss:.3f}, {byte_count(result.cumulative_bytes[-1])} sent"
        )
        self._show(1.0, status)
        if self._progress.disable:
            self._say(status)

    def _status(self, at: TrainingProgress) -> str:
        self._recent.append((at.seconds, at.bytes_sent))
        while len(self._recent) > 2 and self._recent[0][0] < at.seconds - SECONDS_OF_RATE:
            self._recent.popleft()
        began, sent = self._recent[0]
        rate = (at.bytes_sent - sent) / (at.seconds - began) if at.seconds > began else 0.0
        # With the bar and the label it has to fit into 80 columns.
        return f"{at.seconds:.1f} {self._time_name}, step {at.step}, loss {at.loss:.2f}, {byte_count(rate)}/s sent"

    def _show(self, share: float, status: str) -> None:
        self._progress.update(self._bars[self._run], completed=share, status=status, refresh=True)

    def _say(self, text: str) -> None:
        self._console.print(
            f"{self._labels[self._run]}: {text}", markup=False, emoji=False, highlight=False, soft_wrap=True
        )
