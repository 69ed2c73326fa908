"""What local steps have sent, and how far the workers have moved."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from thinwire.metrics import Metrics
from thinwire.outer.fragment import Motion


@dataclass(frozen=True)
class LocalMetrics(Metrics):
    """Totals of this rank since its `thinwire.LocalSteps` took its first step, and norms of the last exchange.

    A step is an inner step. `skipped_steps` are those that this rank skipped because a gradient of its own was not
    finite. `apply_seconds` is the time to read the answers; `elapsed_seconds` counts from the first step.
    """

    exchanges: int
    """Exchanges of fragments. Without fragments, outer steps. Those of a `step_compressor` are not counted."""
    dropped_exchanges: int
    """Exchanges that all ranks dropped because the update of some rank was not finite."""
    bytes_sent_per_step: float
    """`bytes_sent` divided by `steps`."""
    update_norm: float
    """‖Δ‖: how far this worker had moved when the last average was applied. NaN before the first."""
    mean_update_norm: float
    """‖mean Δ‖: the same for the average of all workers, as compression left it."""
    cosine: float
    """The cosine between Δ of this worker and the average that it received: 1 if all workers moved alike and
    compression lost nothing, about 1/√n for n workers whose directions have nothing in common. The average is then
    mostly noise, and fewer inner steps or a lower inner learning rate may help."""
    peer_cosine: float
    """The mean cosine between Δ of this rank and Δ of each other rank, estimated from the average, which needs no other
    messages: (n·⟨Δ, mean Δ⟩/‖Δ‖² - 1)/(n - 1). Exact if all ranks moved equally far, weigh alike, and compression lost
    nothing. NaN with one rank."""


def local_metrics(
    steps: int,
    skipped_steps: int,
    exchanges: Sequence[Metrics],
    motions: Sequence[Motion | None],
    ranks: int,
    of_steps: Metrics | None = None,
) -> LocalMetrics:
    """Add up the metrics of fragments.

    Args:
        steps: the number of inner steps.
        skipped_steps: those that this rank skipped.
        exchanges: of each fragment, the metrics of its averager.
        motions: of each fragment, how far this rank and the mean have moved in the last exchange.
        ranks: the number of ranks.
        of_steps: those of the exchange of every inner step, if there is one.
    """
    every = [*exchanges, *([] if of_steps is None else [of_steps])]
    totals: dict[str, Any] = {each.name: sum(getattr(one, each.name) for one in every) for each in fields(Metrics)}
    known = [motion for motion in motions if motion is not None]
    own = math.sqrt(sum(motion.own for motion in known)) if known else math.nan
    mean = math.sqrt(sum(motion.mean for motion in known)) if known else math.nan
    dot = sum(motion.own_and_mean for motion in known)
    exchanged, dropped = sum(one.steps for one in exchanges), totals["skipped_steps"]
    totals |= {
        "steps": steps,
        "skipped_steps": skipped_steps,
        "mean_abs_vote": math.nan,
        "contraction": exchanges[0].contraction if exchanges else math.nan,
        "elapsed_seconds": max((each.elapsed_seconds for each in exchanges), default=0.0),
    }
    return LocalMetrics(
        **totals,
        exchanges=exchanged,
        dropped_exchanges=dropped,
        bytes_sent_per_step=totals["bytes_sent"] / steps if steps else 0.0,
        update_norm=own,
        mean_update_norm=mean,
        cosine=_limited(dot / (own * mean)) if own and mean else math.nan,
        peer_cosine=_limited((ranks * dot / own**2 - 1) / (ranks - 1)) if own and ranks > 1 else math.nan,
    )


def continued(past: Metrics | None, metrics: Metrics) -> Metrics:
    """The totals of an averager and of those that it has replaced, one after another.

    Args:
        past: of those that it has replaced; None if it is the first.
        metrics: its own.
    """
    if past is None:
        return metrics
    totals = {each.name: getattr(past, each.name) + getattr(metrics, each.name) for each in fields(Metrics)}
    of_last_exchange = {"mean_abs_vote": metrics.mean_abs_vote, "contraction": metrics.contraction}
    return Metrics(**{**totals, **of_last_exchange})


def _limited(cosine: float) -> float:
    """In [-1, 1], which roundings and estimates may miss. NaN stays NaN."""
    return cosine if math.isnan(cosine) else max(-1.0, min(cosine, 1.0))
