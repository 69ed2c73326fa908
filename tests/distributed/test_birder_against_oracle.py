"""Law 3: a distributed run is the NumPy oracle, bit by bit of the answers, and to rounding in its numbers.

Gradients are given, not computed, so that both sides see the same ones. A learning rate of 0.01 against a tolerance of
1e-5 makes any differing answer, at any step and element, impossible to miss.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tests.distributed.common import MANY_CASES_SECONDS, WORLD_SIZES, by_case, each_case, named
from tests.distributed.scenarios import (
    SEED,
    SHAPES,
    Scenario,
    assert_it_is_the_oracle,
    partly_absent,
    ramp,
    rows_untouched,
    run_birder,
    sometimes_nonfinite,
    stop_and_return,
)
from tests.harness import run_ranks
from tests.oracles.birder import BirderOracle, Group

SMALL = (((7, 9), (70,), (), (12, 5)),)
PAPER: dict[str, Any] = {"beta": 0.8, "beta_b": None}
"""The rule as it is printed, whose b forgets in a hundred steps."""
SCENARIOS = {
    "defaults": Scenario(),
    "majority": Scenario(options={"downlink": "majority"}),
    "votes": Scenario(options={"downlink": "votes"}),
    "amsgrad": Scenario(options={"amsgrad": True}),
    "amsgrad, rows untouched, votes": Scenario(rows_untouched, options={"amsgrad": True, "downlink": "votes"}),
    "maximize": Scenario(options={"maximize": True}),
    "another beta for b": Scenario(options={"beta": 0.7, "beta_b": 0.95}),
    "a gain": Scenario(options={"gain": 1.5}),
    "another beta for b, amsgrad, votes": Scenario(
        options={"beta": 0.9, "beta_b": 0.6, "gain": 2.0, "amsgrad": True, "downlink": "votes"}
    ),
    "beta 0, large eps": Scenario(options={"beta": 0.0, "eps": 0.3}),
    "two groups": Scenario(shapes=(SHAPES[:2], SHAPES[2:]), lrs=(0.01, 0.03), decays=(0.0, 0.5)),
    "schedule": Scenario(schedule=ramp),
    "partly absent": Scenario(partly_absent),
    "partly absent, majority": Scenario(partly_absent, options={"downlink": "majority"}),
    "partly absent, votes": Scenario(partly_absent, options={"downlink": "votes"}),
    "rows untouched": Scenario(rows_untouched),
    "sometimes nonfinite": Scenario(sometimes_nonfinite),
    "sometimes nonfinite, amsgrad, votes": Scenario(
        sometimes_nonfinite, options={"amsgrad": True, "downlink": "votes"}
    ),
    "sometimes nonfinite, majority": Scenario(sometimes_nonfinite, options={"downlink": "majority"}),
    "many buckets": Scenario(rows_untouched, options={"bucket_mb": 0.0005}),
    "stop and return": Scenario(stop_and_return, steps=300, shapes=SMALL, options=PAPER),
    "stop and return, amsgrad": Scenario(stop_and_return, steps=300, shapes=SMALL, options=PAPER | {"amsgrad": True}),
    "stop and return, small buckets": Scenario(
        stop_and_return, steps=300, shapes=SMALL, options=PAPER | {"bucket_mb": 0.0005, "downlink": "votes"}
    ),
}


LONG = [name for name in SCENARIOS if name.startswith("stop and return")]
SHORT = [name for name in SCENARIOS if name not in LONG]


# Every scenario with one number of ranks, and in `make test-all` with all others.
IN_MAKE_TEST = [(2, LONG), (3, SHORT)]
IN_TEST_ALL = [(n, names) for n in WORLD_SIZES for names in (SHORT, LONG) if (n, names) not in IN_MAKE_TEST]


@pytest.mark.parametrize(
    ("world_size", "names"),
    [*IN_MAKE_TEST, *(pytest.param(*case, marks=pytest.mark.long) for case in IN_TEST_ALL)],
    ids=lambda value: value if isinstance(value, int) else "stop and return" if value is LONG else "others",
)
def test_the_distributed_run_is_the_oracle(world_size: int, names: Sequence[str]) -> None:
    scenarios = {name: SCENARIOS[name] for name in names}
    results = run_ranks(each_case, world_size, run_birder, scenarios, timeout=MANY_CASES_SECONDS)
    for name, ranks in by_case(results).items():
        with named(name):
            assert_it_is_the_oracle(SCENARIOS[name], ranks)


def test_the_scenarios_do_what_their_names_say() -> None:
    """Guards against a scenario that no longer reaches its corner: the comparison above would pass all the same."""
    rested = BirderOracle([Group(SCENARIOS["stop and return"].starting_values()[0], 0.01)], 2, seed=SEED, **PAPER)
    alive_then = {}
    for step in range(1, 301):
        rested.step([SCENARIOS["stop and return"].gradients_at(step, worker, 2) for worker in range(2)])
        alive_then[step] = np.concatenate([p.alive for p in rested.parameters]).mean()
    assert alive_then[19] == alive_then[300] == 1.0
    assert alive_then[270] < 0.6

    outcomes = BirderOracle([Group(SCENARIOS["sometimes nonfinite"].starting_values()[0], 0.01)], 2, seed=SEED)
    skipped = [
        step
        for step in range(1, 25)
        if outcomes.step([SCENARIOS["sometimes nonfinite"].gradients_at(step, w, 2) for w in range(2)]).skipped
    ]
    assert skipped == [1, 7, 8, 15]
