"""Workers that come and go, as real processes with a real Lighthouse: equal to the NumPy oracle, to the bit."""

from __future__ import annotations

import importlib.util
import itertools
import re
import signal
import socket
from datetime import timedelta

import numpy as np
import pytest
import torch

if importlib.util.find_spec("torchft") is None:
    pytest.skip("torchft has no wheel for this Python and system", allow_module_level=True)

from torchft.manager import Manager

from tests.distributed.elastic_workers import EVERY, SECONDS, Given, elastic_run, lighthouse, moves_of, new_params
from tests.oracles.elastic import ElasticLocalSteps as Oracle
from thinwire.averaging.catalogue import SCHEMES
from thinwire.compressors.quantized import QuantizedScheme
from thinwire.elastic import ElasticLocalSteps
from thinwire.errors import PeerLost
from thinwire.testbed.supervisor import Raised

# torchft calls Logger.warn.
pytestmark = pytest.mark.filterwarnings("ignore:The 'warn' method is deprecated:DeprecationWarning")


class Course:
    """What every exchange must have led to, for the members that the test expects."""

    def __init__(self, first: int) -> None:
        scheme = SCHEMES["int4"]()
        assert isinstance(scheme, QuantizedScheme)
        params = [p.detach().numpy() for p in new_params(seed=first)]
        self._oracle = Oracle(params, (4, scheme.block, scheme.spread), 0.7, 0.9)
        self._exchanges = 0

    def after(self, *members: int, newcomer: int | None = None) -> tuple[int, list[np.ndarray]]:
        steps = range(EVERY * self._exchanges, EVERY * (self._exchanges + 1))
        self._exchanges += 1
        moves = {
            worker: [[move.numpy() for move in moves_of(worker, step)] for step in steps]
            for worker in members
            if worker != newcomer
        }
        return self._exchanges, self._oracle.exchange(members, moves)


def check(report: tuple[int, int, list[np.ndarray]], due: tuple[int, list[np.ndarray]], workers: int) -> None:
    assert report[:2] == (due[0], workers)
    for found, exact in zip(report[2], due[1], strict=True):
        np.testing.assert_array_equal(found, exact)


def test_a_course_of_deaths_and_joins_is_that_of_the_oracle() -> None:
    with elastic_run(least=1) as run:
        run.start(0)
        course = Course(first=0)
        run.reports(0)
        run.go(0)
        check(run.reports(0)[0], course.after(0), workers=1)

        # One joins: it is in the quorum after this exchange, and contributes from the exchange after the next on.
        run.start(1)
        run.wait_until_waiting(1)
        run.go(0)
        check(run.reports(0)[0], course.after(0), workers=2)
        run.go(0)
        due = course.after(0, 1, newcomer=1)
        for report in run.reports(0, 1):
            check(report, due, workers=2)
        run.start(2)
        run.wait_until_waiting(2)
        run.go(0, 1)
        due = course.after(0, 1)
        for report in run.reports(0, 1):
            check(report, due, workers=3)
        run.go(0, 1)
        due = course.after(0, 1, 2, newcomer=2)
        for report in run.reports(0, 1, 2):
            check(report, due, workers=3)
        run.go(0, 1, 2)
        due = course.after(0, 1, 2)
        for report in run.reports(0, 1, 2):
            check(report, due, workers=3)

        # One is killed between two exchanges: its inner steps are lost, and the mean is that of the others.
        run.kill(0)
        run.go(1, 2)
        due = course.after(1, 2)
        for report in run.reports(1, 2):
            check(report, due, workers=2)

        # One dies in the middle of an exchange, after some of its packets.
        run.start(3)
        run.wait_until_waiting(3)
        run.go(1, 2)
        due = course.after(1, 2)
        for report in run.reports(1, 2):
            check(report, due, workers=3)
        run.go(1, 2)
        due = course.after(1, 2, 3, newcomer=3)
        for report in run.reports(1, 2, 3):
            check(report, due, workers=3)
        run.go(2, 3)
        run.go(1, order="die in the exchange")
        due = course.after(2, 3)
        for report in run.reports(2, 3):
            check(report, due, workers=2)
        assert run.exit_code(1) == -signal.SIGKILL

        # An exchange succeeds on one worker and fails on another, which then gets its result, and has lost nothing.
        run.go(2, order="fail after the exchange")
        run.go(3)
        check(run.reports(3)[0], course.after(2, 3), workers=2)
        run.go(3)
        due = course.after(2, 3, newcomer=2)
        for report in run.reports(2, 3):
            check(report, due, workers=2)
        run.go(2, 3)
        due = course.after(2, 3)
        for report in run.reports(2, 3):
            check(report, due, workers=2)

        # The last one goes on alone, and keeps its residual until another joins.
        run.go(3, order="leave")
        run.go(2)
        check(run.reports(2)[0], course.after(2), workers=1)
        run.start(4)
        run.wait_until_waiting(4)
        run.go(2)
        check(run.reports(2)[0], course.after(2), workers=2)
        run.go(2)
        due = course.after(2, 4, newcomer=4)
        for report in run.reports(2, 4):
            check(report, due, workers=2)


def test_a_worker_with_other_settings_is_refused_without_harm_to_the_others() -> None:
    with elastic_run() as run:
        run.start(0)
        run.start(1)
        course = Course(first=0)
        run.reports(0, 1)
        run.start(2, every=EVERY + 1)
        run.wait_until_waiting(2)
        run.go(0, 1)
        due = course.after(0, 1)
        for report in run.reports(0, 1):
            check(report, due, workers=3)
        refused = run.outcome(2)
        assert isinstance(refused, Raised)
        assert refused.type_name == "ValueError"
        assert "this worker has every=4, the run has 3" in refused.message
        run.go(0, 1)
        due = course.after(0, 1)
        for report in run.reports(0, 1):
            check(report, due, workers=2)


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("compressor", "int8", "the compressor='int8', the run has 'int4'"),
        ("block", 32, "block=32, the run has 64"),
        ("outer_lr", 0.5, "outer_lr=0.5, the run has 0.7"),
        ("outer_momentum", 0.0, "outer_momentum=0.0, the run has 0.9"),
        ("residual_decay", 0.5, "residual_decay=0.5, the run has 1.0"),
        ("weighted", True, "weighted=True, the run has False"),
        ("fragments", 2, "fragments=2, the run has 1"),
    ],
)
def test_settings_that_a_run_must_share(setting: str, value: object, message: str) -> None:
    def made(**settings: object) -> ElasticLocalSteps:
        opt = ElasticLocalSteps(Given(new_params(0)), lighthouse="http://host:1", **settings)  # type: ignore[arg-type]
        opt._check_first()
        return opt

    of_run = made()._shared_state()
    with pytest.raises(ValueError, match=re.escape(message)):
        made(**{setting: value})._take(of_run)
    assert made(check_replicas_every=10)._settings() == made()._settings()


def test_too_few_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    start_quorum = Manager.start_quorum

    def patiently(self: Manager, timeout: timedelta) -> None:
        assert timeout <= timedelta(seconds=2)
        start_quorum(self, timeout=timedelta(seconds=SECONDS))

    # The Lighthouse answers, and in the end it has a second for that: on a busy machine too little.
    monkeypatch.setattr(Manager, "start_quorum", patiently)
    with lighthouse(least=1) as address:
        opt = ElasticLocalSteps(
            Given(new_params(0)), lighthouse=address, min_workers=2, patience=2.0, hostname="127.0.0.1"
        )
        with pytest.raises(PeerLost, match="a quorum of at least 2 workers") as alone:
            opt.join()
    assert "there are 1 for 2 seconds" in str(alone.value)


def test_no_lighthouse() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        # It stays bound, and nobody listens: the port must not become that of another process.
        address = f"http://127.0.0.1:{unused.getsockname()[1]}"
        params = new_params(seed=0)
        opt = ElasticLocalSteps(Given(params), lighthouse=address, timeout=2.0, hostname="127.0.0.1")
        with pytest.raises(ConnectionError, match="torchft_lighthouse --min_replicas"):
            opt.join()


def test_a_lighthouse_without_enough_workers_is_not_waited_for_longer_than_said() -> None:
    with lighthouse(least=2) as address:
        opt = ElasticLocalSteps(Given(new_params(0)), lighthouse=address, patience=1.0, hostname="127.0.0.1")
        with pytest.raises(PeerLost, match="a quorum of at least 1 workers"):
            opt.join()


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"lighthouse": "host:29510"}, ValueError, "lighthouse='host:29510': expected the address"),
        ({"lighthouse": None}, ValueError, "TORCHFT_LIGHTHOUSE"),
        ({"every": [3, 4]}, ValueError, r"every=\[3, 4\]"),
        ({"min_workers": 0}, ValueError, "min_workers=0"),
        ({"timeout": 0.5}, ValueError, r"timeout=0\.5"),
        ({"patience": float("inf")}, ValueError, "patience=inf"),
        ({"delay": 2}, TypeError, "delay=2: ElasticLocalSteps has no such argument"),
        ({"error_reset": True}, TypeError, "error_reset=True: ElasticLocalSteps has no such argument"),
        ({"compressor": "powersgd"}, ValueError, "compressor='powersgd'"),
    ],
)
def test_arguments(
    settings: dict[str, object], error: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHFT_LIGHTHOUSE", raising=False)
    with pytest.raises(error, match=message):
        ElasticLocalSteps(Given(new_params(0)), **{"lighthouse": "http://host:29510", **settings})  # type: ignore[arg-type]


def test_calls_in_the_wrong_order() -> None:
    opt = ElasticLocalSteps(Given(new_params(0)), lighthouse="http://host:29510")
    with pytest.raises(RuntimeError, match=r"call join\(\) once"):
        opt.step()
    with pytest.raises(RuntimeError, match="at_reference"):
        opt.synchronize()
    opt.close()
    with pytest.raises(RuntimeError, match="closed"):
        opt.join()


def test_a_saved_state_is_that_of_the_last_exchange() -> None:
    with lighthouse(least=1) as address:
        params = new_params(0)
        opt = ElasticLocalSteps(Given(params), lighthouse=address, every=2, hostname="127.0.0.1")
        opt.join()
        exact: list[torch.Tensor] = []
        for step in range(5):
            for p, move in zip(params, moves_of(0, step), strict=True):
                p.grad = move
            opt.step()
            if step == 3:
                exact = [p.detach().clone() for p in params]
        saved = opt.state_dict()
        with pytest.raises(RuntimeError, match="Call it before"):
            opt.load_state_dict(saved)
        opt.close()
        resumed = new_params(1)
        other = ElasticLocalSteps(Given(resumed), lighthouse=address, every=2, hostname="127.0.0.1")
        with pytest.raises(ValueError, match="every=3, the state dict has 2"):
            ElasticLocalSteps(Given(new_params(1)), lighthouse=address, every=3).load_state_dict(saved)
        other.load_state_dict(saved)
        other.join()
        assert (other.inner_steps, other.outer_steps) == (5, 2)
        for p, value in zip(resumed, exact, strict=True):
            assert p.equal(value)
        other.close()


def test_metrics_go_on_when_the_members_change() -> None:
    with lighthouse(least=1) as address:
        params = new_params(0)
        opt = ElasticLocalSteps(Given(params), lighthouse=address, every=1, hostname="127.0.0.1")
        opt.join()
        told = []
        for step in range(4):
            for p, move in zip(params, moves_of(0, step), strict=True):
                p.grad = move
            opt.step()
            told.append(opt.metrics())
            opt._unbind()  # as after a failed exchange: the next one makes new averagers
        opt.close()
    assert [metrics.exchanges for metrics in told] == [1, 2, 3, 4]
    assert all(earlier.elapsed_seconds < later.elapsed_seconds for earlier, later in itertools.pairwise(told))
    assert all(earlier.encode_seconds < later.encode_seconds for earlier, later in itertools.pairwise(told))
    assert told[3].as_dict(since=told[0])["steps_per_second"] == pytest.approx(
        3 / (told[3].elapsed_seconds - told[0].elapsed_seconds)
    )
