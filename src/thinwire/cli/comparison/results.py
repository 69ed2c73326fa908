"""Two runs side by side: who was where first, and whether their times can be compared."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

from thinwire.cli.comparison.network import Network
from thinwire.cli.comparison.pace import PredictedClock
from thinwire.cli.comparison.training import TrainingResult

# The runs follow one another, so a machine that did something else meanwhile makes their times differ for no reason of
# theirs. It shows in forward + backward, which is the same work in both, and in mean steps far above the median one.
# Over loopback the times differ by what each exchange costs in work, a few percent; over slow links they differ a lot.
COMPARABLE_COMPUTE_ON_LOOPBACK = 1.05
COMPARABLE_COMPUTE = 1.25
COMPARABLE_MEAN = 1.25
# A smaller difference between two times is within their noise.
SAME_TIME = 1.05
BUSY = "The machine was not equally fast in both runs, so their times say little: try again when it is idle."


@dataclass(frozen=True)
class Comparison:
    """Two runs of the same model on the same data."""

    baseline: TrainingResult
    challenger: TrainingResult
    network: Network

    @property
    def times_are_comparable(self) -> bool:
        """Whether the machine was about as fast in both runs."""
        runs = (self.baseline, self.challenger)
        computes = [run.seconds.compute for run in runs]
        limit = COMPARABLE_COMPUTE if self.network.is_emulated else COMPARABLE_COMPUTE_ON_LOOPBACK
        # With stages, the steps of one are slower than those of another.
        alike = [run.seconds for run in runs if run.remark is None]
        steady = all(seconds.mean_step <= COMPARABLE_MEAN * seconds.step for seconds in alike)
        return steady and max(computes) <= limit * min(computes)

    @property
    def axis_is_comparable(self) -> bool:
        """Whether the curves over time can be compared. Predicted times use the same computation in both runs."""
        return self.network.is_predicted or self.times_are_comparable

    def predicted_step_seconds(self, outcome: TrainingResult, bits_per_second: float) -> float:
        """Mean step time if every worker had such a link of its own."""
        # Both runs compute the same, so a difference in compute is noise: the prediction uses the mean.
        compute = (self.baseline.seconds.compute + self.challenger.seconds.compute) / 2
        clock = PredictedClock(bits_per_second, compute, outcome.seconds.optimizer, outcome.overlaps)
        # Step by step: one that waits for the wire is not made good by others that hardly use it.
        sent = [after - before for before, after in pairwise([0.0, *outcome.cumulative_bytes])]
        return fmean(map(clock.step_seconds, sent))

    @property
    def seconds_to_baseline(self) -> float | None:
        """When the challenger's validation loss first was the baseline's last one; None if it never was."""
        return self._where_reached(self.challenger.cumulative_seconds)

    @property
    def bytes_to_baseline(self) -> float | None:
        """What each worker of the challenger had sent by then."""
        return self._where_reached(self.challenger.cumulative_bytes)

    def _where_reached(self, positions: list[float]) -> float | None:
        """Interpolated between two validations."""
        goal = self.baseline.validation_loss
        before: tuple[float, float] | None = None
        for step, loss in self.challenger.validation_losses:
            here = positions[step - 1]
            if loss <= goal:
                if before is None:
                    return here
                there, higher = before
                return here if math.isinf(higher) else there + (higher - goal) / (higher - loss) * (here - there)
            # A loss that is not a number is as good as none.
            before = (here, math.inf if math.isnan(loss) else loss)
        return None

    def sentence(self) -> str:
        """The result in one sentence, and a second one if the first says little."""
        baseline, challenger = self.baseline, self.challenger
        ended = (
            f"{challenger.label} ended at a loss of {challenger.validation_loss:.3f}, {baseline.label} at "
            f"{baseline.validation_loss:.3f}, {self._after()}"
        )
        reached = self.seconds_to_baseline
        if not math.isfinite(baseline.validation_loss):
            said = f"Nothing to compare with: the loss of {baseline.label} is {baseline.validation_loss}."
        elif not self.axis_is_comparable:
            said = f"{ended}. {BUSY}"
        elif reached is None:
            said = f"No gain in this run: {ended}."
        else:
            said = (
                f"The same loss {_sooner(baseline.training_seconds / reached)}: {challenger.label} was at "
                f"{baseline.validation_loss:.3f} after {_seconds(reached)}, {baseline.label} after "
                f"{_seconds(baseline.training_seconds)}."
            )
        if self.network.is_predicted:
            said = f"Predicted for {self.network.rate_name}, not measured: {said[0].lower()}{said[1:]}"
        return said

    def _after(self) -> str:
        ours, theirs = self.challenger.training_seconds, self.baseline.training_seconds
        if max(ours, theirs) <= SAME_TIME * min(ours, theirs):
            return f"both after {_seconds(theirs)}"
        return f"after {_seconds(ours)} and {_seconds(theirs)}"


def _sooner(ratio: float) -> str:
    if ratio >= SAME_TIME:
        return f"{ratio:.1f} × sooner"
    return "at the same time" if ratio > 1 / SAME_TIME else f"{1 / ratio:.1f} × later"


def _seconds(value: float) -> str:
    return f"{value:.1f} s"
