"""A lane keeps the order of tasks, raises their errors in wait(), and leaves no thread running."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref

import pytest

from thinwire.transport.lane import Failure, Lane

either_kind = pytest.mark.parametrize("threaded", [True, False], ids=["threaded", "unthreaded"])
SOON = 30.0
"""Seconds within which an event that should happen at once must have happened."""


def thread_of(lane: Lane) -> threading.Thread:
    found: list[threading.Thread] = []
    lane.submit(lambda: found.append(threading.current_thread()))
    lane.wait()
    return found[0]


def divide_by_zero() -> None:
    raise ZeroDivisionError("division by zero")


@either_kind
def test_tasks_run_in_the_order_of_their_submission(threaded: bool) -> None:
    lane = Lane(threaded=threaded)
    done: list[int] = []
    for i in range(500):
        lane.submit(lambda i=i: done.append(i))
    lane.wait()
    assert done == list(range(500))


@either_kind
def test_waiting_for_nothing_returns_at_once(threaded: bool) -> None:
    lane = Lane(threaded=threaded)
    lane.wait()
    lane.wait()


def test_an_unthreaded_lane_runs_a_task_before_submit_returns_and_starts_no_thread() -> None:
    threads = set(threading.enumerate())
    lane = Lane(threaded=False)
    assert thread_of(lane) is threading.current_thread()
    done: list[str] = []
    lane.submit(lambda: done.append("now"))
    assert done == ["now"]
    # Those of earlier tests may end meanwhile.
    assert set(threading.enumerate()) <= threads


def test_a_threaded_lane_is_one_thread_that_does_not_keep_the_process_alive() -> None:
    lane = Lane(threaded=True)
    thread = thread_of(lane)
    assert thread is not threading.current_thread()
    assert thread is thread_of(lane)
    assert thread.daemon
    assert thread.name == "thinwire-lane"


def test_a_threaded_lane_works_while_its_owner_does_something_else() -> None:
    lane = Lane(threaded=True)
    go, done = threading.Event(), threading.Event()
    lane.submit(lambda: None if go.wait(SOON) else pytest.fail("submit or the next line waited for the task"))
    lane.submit(done.set)
    assert not done.is_set()
    go.set()
    lane.wait()
    assert done.is_set()


@either_kind
def test_wait_raises_the_error_of_a_task(threaded: bool) -> None:
    lane = Lane(threaded=threaded)
    failure = ValueError("no route to rank 3")

    def fail() -> None:
        raise failure

    lane.submit(fail)
    with pytest.raises(RuntimeError, match="no route to rank 3") as caught:
        lane.wait()
    assert caught.value.__cause__ is failure


@either_kind
def test_nothing_runs_after_a_failure_and_every_wait_raises(threaded: bool) -> None:
    """Replicas may have diverged: a bucket exchanged out of step would be averaged with another one."""
    lane = Lane(threaded=threaded)
    done: list[str] = []
    lane.submit(lambda: done.append("before"))
    lane.submit(divide_by_zero)
    lane.submit(lambda: done.append("queued"))
    for _ in range(3):
        with pytest.raises(RuntimeError, match="division") as caught:
            lane.wait()
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
        lane.submit(lambda: done.append("later"))
    assert done == ["before"]


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_an_exit_inside_a_task_is_raised_by_submit_without_a_thread(kind: type[BaseException]) -> None:
    def leave() -> None:
        raise kind

    with pytest.raises(kind):
        Lane(threaded=False).submit(leave)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_wait_reports_an_exit_inside_a_task(kind: type[BaseException]) -> None:
    """If the thread ended silently, `wait` would never return."""
    lane = Lane(threaded=True)

    def leave() -> None:
        raise kind("out of here")

    lane.submit(leave)
    with pytest.raises(RuntimeError, match="out of here") as caught:
        lane.wait()
    assert isinstance(caught.value.__cause__, kind)


@either_kind
def test_no_reference_to_a_task_is_left_when_wait_returns(threaded: bool) -> None:
    """A task refers to the owner of the lane, who may be about to drop it."""

    class Task:
        def __call__(self) -> None:
            pass

    lane = Lane(threaded=threaded)
    for _ in range(50):
        task = Task()
        forgotten = weakref.ref(task)
        lane.submit(task)
        del task
        lane.wait()
        assert forgotten() is None


def test_the_thread_ends_when_its_lane_is_dropped() -> None:
    lane = Lane(threaded=True)
    thread = thread_of(lane)
    assert thread.is_alive()
    del lane
    gc.collect()
    thread.join(SOON)
    assert not thread.is_alive()


def test_the_thread_of_a_lane_in_a_cycle_ends_when_the_cycle_is_collected() -> None:
    """A transport is in such a cycle: its tasks are bound methods, and it holds the lane."""

    class Owner:
        def __init__(self) -> None:
            self.lane = Lane(threaded=True)
            self.done = 0
            self.me = self

        def task(self) -> None:
            self.done += 1

    owner = Owner()
    thread = thread_of(owner.lane)
    owner.lane.submit(owner.task)
    owner.lane.wait()
    assert owner.done == 1
    del owner
    gc.collect()
    thread.join(SOON)
    assert not thread.is_alive()


def test_a_lane_that_failed_can_be_collected() -> None:
    """The traceback of its failure refers to the owner. A thread that kept it would keep the owner's memory."""

    class Owner:
        def __init__(self) -> None:
            self.lane = Lane(threaded=True)

        def fail(self) -> None:
            raise ValueError("no route to rank 3")

    owner = Owner()
    thread = thread_of(owner.lane)
    owner.lane.submit(owner.fail)
    with pytest.raises(RuntimeError, match="no route"):
        owner.lane.wait()
    forgotten = weakref.ref(owner)
    del owner
    gc.collect()
    assert forgotten() is None
    thread.join(SOON)
    assert not thread.is_alive()


def test_submitted_tasks_run_even_if_the_lane_is_dropped() -> None:
    """Other ranks wait for every bucket that this one has begun."""
    lane = Lane(threaded=True)
    thread = thread_of(lane)
    go = threading.Event()
    done: list[int] = []
    lane.submit(lambda: None if go.wait(SOON) else pytest.fail("the thread waited for its lane"))
    for i in range(5):
        lane.submit(lambda i=i: done.append(i))
    del lane
    gc.collect()
    assert done == []
    go.set()
    thread.join(SOON)
    assert done == list(range(5))


def test_a_program_does_not_end_before_the_tasks_of_a_lane_that_was_dropped() -> None:
    program = """if True:
        import time
        from thinwire.transport.lane import Lane

        def task():
            time.sleep(0.3)
            print("done", flush=True)

        Lane(threaded=True).submit(task)  # and nothing holds the lane
    """
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=170)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "done\n", "")


def test_lanes_are_independent_of_each_other() -> None:
    lanes = [Lane(threaded=True) for _ in range(8)]
    counts = [0] * len(lanes)

    def count(which: int) -> None:
        counts[which] += 1

    for _ in range(100):
        for i, lane in enumerate(lanes):
            lane.submit(lambda i=i: count(i))
    lanes[3].submit(divide_by_zero)
    for i, lane in enumerate(lanes):
        if i == 3:
            with pytest.raises(RuntimeError, match="division"):
                lane.wait()
        else:
            lane.wait()
    assert counts == [100] * len(lanes)


def test_lanes_that_share_a_failure_stop_together_and_raise_the_first_error() -> None:
    failure = Failure()
    first, second = (Lane(threaded=True, failure=failure) for _ in range(2))
    ran: list[str] = []

    def fail(message: str) -> None:
        raise ValueError(message)

    first.submit(lambda: fail("the cause"))
    first.drain()
    second.submit(lambda: ran.append("second"))
    second.drain()
    failure.record(ValueError("a consequence"))
    assert not ran
    for lane in (first, second):
        with pytest.raises(RuntimeError, match="exchange failed: the cause"):
            lane.wait()
