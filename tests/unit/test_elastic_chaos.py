"""The figures of `thinwire chaos --elastic`, from what workers report: throughput, divergences, rejoins, exit codes."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import replace

import pytest
from rich.console import Console
from typer.testing import CliRunner

from thinwire.cli.app import app
from thinwire.cli.chaos.elastic import ElasticPlan
from thinwire.cli.chaos.elastic_results import (
    DEATH,
    FIRST,
    JOIN,
    QUIET,
    ElasticResults,
    Life,
    OuterStep,
    divergences,
    intervals_of,
    throughput,
)
from thinwire.testbed import Testbed, TestbedUnavailable

EVERY = 20


def outer_step(number: int, at: float, **others: object) -> OuterStep:
    known: dict[str, object] = {
        "exchange": (number, 1),
        "steps": EVERY,
        "exchanging": 0.2,
        "starved": 0.0,
        "workers": 2,
        "digest": f"after {number}",
        "loss": 1.0,
    }
    return OuterStep(number=number, at=at, **{**known, **others})  # type: ignore[arg-type]


def life(host: int, *steps: OuterStep, number: int = 0, started: float = -10.0, **others: float) -> Life:
    return Life(host, number, started, outer_steps=list(steps), **others)


def results(*lives: Life) -> ElasticResults:
    """Of a run with 10 seconds without kills, and 30 with them."""
    report = ElasticResults(
        hosts=2,
        rate="100mbit",
        every=EVERY,
        step_seconds=0.1,
        seconds_between_kills=30.0,
        seconds_to_restart=2.0,
        heartbeat_timeout=1.0,
        seed=0,
    )
    report.lives, report.quiet_began, report.began, report.ended = list(lives), 0.0, 10.0, 40.0
    return report


def a_run(*, starved: float = 0.0, started: float = 15.0, others: str = "after 12") -> ElasticResults:
    """An interval takes 2 s. Host 1 is killed at 13 s, and the other one then takes 3 s. The successor is in the quorum
    at 17 s, and has state at 19 s. `others` is what it has after outer step 12."""
    times = {**{number: 2.0 * number for number in range(7)}, **{number: 2.0 * number + 1 for number in range(7, 21)}}
    steps = {number: outer_step(number, at) for number, at in times.items()}
    survivor = {**steps, 7: replace(steps[7], workers=1)}
    successor = {number: step for number, step in steps.items() if number >= 9}
    successor |= {9: replace(steps[9], starved=starved), 12: replace(steps[12], digest=others)}
    return results(
        life(0, *survivor.values()),
        life(1, *(steps[number] for number in range(7)), killed=13.0),
        life(1, *successor.values(), number=1, started=started, imported=started + 1.5),
    )


def printed(report: ElasticResults) -> str:
    text = io.StringIO()
    report.print(Console(file=text, width=200))
    return " ".join(text.getvalue().split())


def test_throughput_is_inner_steps_per_second_of_the_living() -> None:
    report = a_run()
    assert throughput(report.quiet) == EVERY / 2.0
    # The survivor has 15 intervals that began in time, one of 3 s and the others of 2 s; the victim the one before its
    # death, and not the one that it did not end; the successor 11.
    steps, seconds = EVERY * (15 + 1 + 11), 14 * 2.0 + 3.0 + 2.0 + 11 * 2.0
    assert throughput(report.disturbed) == pytest.approx(steps / seconds)
    assert report.relative_throughput == pytest.approx(steps / seconds / 10.0)
    # Two hosts take 10 steps a second each for 30 s, if nobody dies.
    assert report.share_of_full_strength == pytest.approx(steps / 600.0)
    assert "98.18% of quiet 97% yes" in printed(report)


def test_a_worker_that_sits_out_an_interval_is_slower() -> None:
    whole = [outer_step(number, 2.0 * number) for number in range(22)]
    with_gap = results(life(0, *whole[:8], *whole[9:]))
    assert throughput(with_gap.disturbed) == pytest.approx(EVERY * 14 / 30.0)
    assert "93.33% of quiet 97% no" in printed(with_gap)
    assert with_gap.misses == []


def test_what_happened_in_intervals() -> None:
    report = a_run()
    survivor, victim, successor = report.lives
    happened = [interval.happened for interval in intervals_of(survivor)]
    assert happened == [*[QUIET] * 6, DEATH, JOIN, FIRST, *[QUIET] * 11]
    assert {interval.happened for life in (victim, successor) for interval in intervals_of(life)} == {QUIET}
    assert report.extra_seconds(DEATH) == (1, pytest.approx(1.0))
    assert report.extra_seconds(JOIN) == (1, pytest.approx(0.0))


def test_what_deaths_and_joins_cost_does_not_depend_on_the_time_without_kills() -> None:
    for slower in (0.0, 0.5):
        report = a_run()
        for life in report.lives[:2]:
            life.outer_steps[:5] = [
                replace(step, at=step.at * (1 + slower) - 10 * slower) for step in life.outer_steps[:5]
            ]
        report.quiet_began -= 10 * slower
        # One second of the 55: the death.
        assert report.share_of_deaths_and_joins == pytest.approx(1 - 54 / 55)


def test_nothing_to_measure() -> None:
    with pytest.raises(ValueError, match="no worker has taken two outer steps"):
        throughput(results(life(0, outer_step(0, 1.0))).quiet)


def test_equal_workers_do_not_diverge() -> None:
    report = a_run()
    assert report.divergences == report.misses == []
    assert "divergences 0 0 yes" in printed(report)


def test_a_divergence() -> None:
    report = a_run(others="other bits")
    (found,) = report.divergences
    assert found.number == 12
    assert found.found == {
        "the worker of host 0": "(12, 1) after 12",
        "the worker of host 1, restart 1": "(12, 1) other bits",
    }
    assert report.misses == ["after outer step 12 workers are not equal"]
    assert "divergences 1 0 no" in printed(report)


def test_two_exchanges_in_the_place_of_one() -> None:
    """Workers may complete an exchange and die, so that the others repeat it; two that go on may not disagree."""
    same, other = (
        [outer_step(number, 2.0 * number) for number in range(4)],
        outer_step(3, 6.0, exchange=(3, 2), digest="x"),
    )
    died = life(1, *same[:3], other, killed=6.5)
    assert divergences([life(0, *same), died]) == []
    lived = life(1, *same[:3], other)
    assert [each.number for each in divergences([life(0, *same), lived])] == [3]
    died_later = life(1, *same[:3], other, outer_step(4, 8.0), killed=8.5)
    assert [each.number for each in divergences([life(0, *same), died_later])] == [3]
    # The same exchange, and other bits: that the worker was killed is no excuse.
    died_with_others = life(1, *same[:3], replace(other, exchange=(3, 1)), killed=6.5)
    assert [each.number for each in divergences([life(0, *same), died_with_others])] == [3]


@pytest.mark.parametrize(
    ("started", "starved", "seconds", "in_time"),
    [(15.0, 0.0, 4.0, True), (4.0, 0.0, 15.0, True), (3.9, 0.0, 15.1, False), (3.0, 1.5, 16.0, True)],
)
def test_seconds_to_rejoin(started: float, starved: float, seconds: float, in_time: bool) -> None:
    report = a_run(started=started, starved=starved)
    (rejoin,) = report.rejoins
    assert rejoin.seconds == pytest.approx(seconds)
    assert rejoin.seconds_to_import == pytest.approx(1.5)
    assert report.slowest_rejoin == pytest.approx(seconds - starved)
    assert (rejoin.host, rejoin.killed_at, rejoin.lost_steps) == (1, 3.0, 10)
    assert (rejoin.in_time, report.misses == []) == (in_time, in_time)
    assert f"15 s {'yes' if in_time else 'no'}" in printed(report)


@pytest.mark.parametrize("successors", [0, 1])
def test_a_worker_that_never_rejoins(successors: int) -> None:
    report = a_run()
    report.lives[2:] = [Life(1, 1, 15.0)] * successors
    (miss,) = report.misses
    assert "the worker of host 1, killed after 3 s, rejoined never" in miss
    assert "slowest rejoin, with a core never 15 s no" in printed(report)
    assert json.loads(report.to_json())["slowest_rejoin"] is None


def test_json() -> None:
    told = json.loads(a_run().to_json())
    assert told["kills"] == 1
    assert told["misses"] == []
    assert told["relative_throughput"] == pytest.approx(0.981818, abs=1e-6)
    assert told["longer_than_without_kills"][DEATH] == {"intervals": 1, "seconds": pytest.approx(1.0)}
    survivor = told["lives"][0]
    assert survivor["columns"] == ["number", "at", "steps", "exchanging", "starved", "workers", "digest", "loss"]
    assert survivor["outer_steps"][7] == [7, 5.0, EVERY, 0.2, 0.0, 1, "after 7", 1.0]


def test_kill_times() -> None:
    plan = ElasticPlan(4, 10.0, 30.0, 10.0, "100mbit", 60.0, None, 0)
    assert plan.kill_times() == [15.0 + 30.0 * number for number in range(20)]
    assert replace(plan, kills=2).kill_times() == [15.0, 45.0]
    assert replace(plan, minutes=0.4).kill_times() == []


def chaos(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["chaos", "--elastic", *arguments], env={"COLUMNS": "200", "NO_COLOR": "1"})
    return result.exit_code, " ".join(result.output.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--minutes", "0.4"], "Invalid value for '--minutes': must be at least 0.5 with one kill every 30 s, got 0.4"),
        (
            ["--hosts", "254"],
            "'--hosts': must be at most 253, because the Lighthouse has a host of its own",
        ),
        (["--rate", "fast"], "Invalid value for '--rate': rate must be like '100mbit'"),
        (["--every", "0"], "Invalid value for '--every'"),
    ],
)
def test_bad_arguments(arguments: list[str], message: str) -> None:
    code, output = chaos(*arguments)
    assert code == 2
    assert message in output


@pytest.mark.parametrize(("option", "value"), [("--every", "30"), ("--rejoin", "10"), ("--rate", "10mbit")])
def test_options_that_need_elastic(option: str, value: str) -> None:
    result = CliRunner().invoke(app, ["chaos", option, value], env={"COLUMNS": "200", "NO_COLOR": "1"})
    assert result.exit_code == 2
    assert f"Invalid value for '{option}'" in result.output
    assert "is of use with --elastic only" in result.output


def test_without_torchft(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [name for name in sys.modules if name.startswith(("thinwire.elastic", "torchft"))]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "torchft", None)
    assert chaos() == (2, "thinwire chaos: thinwire.elastic needs torchft: pip install thinwire[elastic]")


def test_where_there_can_be_no_testbed(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torchft", reason="torchft has no wheel for this Python and system")

    def refuse(_: Testbed) -> Testbed:
        raise TestbedUnavailable("a testbed needs root")

    monkeypatch.setattr(Testbed, "__enter__", refuse)
    assert chaos() == (2, "thinwire chaos: a testbed needs root")
