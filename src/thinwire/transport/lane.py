"""A lane: a thread that performs one stage of the exchange for bucket after bucket, in the order of submission.

Callbacks of futures run in an order that differs from rank to rank, and so would exchanges that they start. Threads
that pass buckets to each other keep the order. While they wait for the network they hold neither the GIL nor a core.
"""

from __future__ import annotations

import atexit
import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from types import TracebackType

from thinwire.errors import CorruptPacket, GradientChanged, PeerLost
from thinwire.kernels.threads import Lent, borrow

Task = Callable[[], None]

_POLL_SECONDS = 1.0
_EXIT_SECONDS = 5.0


class Failure:
    """The first exception in any of the lanes that share this object. It stops all of them.

    Args:
        on_stop: called when a lane has failed, so that no rank waits for it.
    """

    def __init__(self, on_stop: Sequence[Callable[[], None]] = ()) -> None:
        self.exception: BaseException | None = None
        self._traceback: TracebackType | None = None
        self._lock = threading.Lock()
        self._on_stop = on_stop

    def record(self, exception: BaseException) -> None:
        """Keep the first exception. One that names a cause replaces a `PeerLost` that is only a consequence."""
        with self._lock:
            if self.exception is None or (_is_secondhand(self.exception) and not _is_secondhand(exception)):
                self.exception, self._traceback = exception, exception.__traceback__

    def stop(self, exception: BaseException) -> None:
        """Record an exception, and end the waits of this and other ranks."""
        self.record(exception)
        for call in self._on_stop:
            call()

    def check(self) -> None:
        """Raise the recorded exception, if there is one, at every call: replicas may have diverged.

        Raises:
            PeerLost: as recorded, with the traceback of the lane.
            CorruptPacket, GradientChanged: the same.
            RuntimeError: from any other exception.
        """
        if isinstance(self.exception, (PeerLost, CorruptPacket, GradientChanged)):
            # With the recorded traceback, because every raise adds to it.
            raise self.exception.with_traceback(self._traceback)
        if self.exception is not None:
            message = str(self.exception) or repr(self.exception)
            raise RuntimeError(f"thinwire's exchange failed: {message}") from self.exception


def _is_secondhand(exception: BaseException) -> bool:
    return isinstance(exception, PeerLost) and exception.secondhand


class Lane:
    """Runs tasks in order: on its own thread, or inside `submit` if `threaded` is false.

    The first task that raises stops the lane and all others that share its `failure`. Later tasks are dropped. Kernels
    on its thread use as many threads as are `lent` to it, by default one.
    """

    _closed = False

    def __init__(self, *, threaded: bool, failure: Failure | None = None, lent: Lent | None = None) -> None:
        self._failure = failure or Failure()
        self._threaded = threaded
        if threaded:
            # The garbage collector may finalize an unreferenced lane at any moment, even while the lane's own thread is
            # inside the queue. `SimpleQueue.put` is reentrant; `Queue.put` would deadlock.
            self._tasks: queue.SimpleQueue[Task | threading.Event | None] = queue.SimpleQueue()
            # The thread holds no reference to the lane, and none to its failure for long, whose traceback refers to the
            # owner of the lane. So the owner can be collected, and the thread ends.
            arguments = (self._tasks, weakref.ref(self._failure), lent or Lent())
            self._thread = _LaneThread(target=_run_tasks, args=arguments, name="thinwire-lane", daemon=True)
            self._thread.start()
            finalizer = weakref.finalize(self, _dismiss, self._thread, self._tasks)
            # Not at the exit of the interpreter: a thread that wakes up then, with no one joining it, races with the
            # teardown of Python. CPython unwinds the C++ frames of threads that lose the race: std::terminate.
            finalizer.atexit = False

    def submit(self, task: Task) -> None:
        """Append a task."""
        if self._closed:
            return
        if self._threaded:
            self._tasks.put(task)
        elif self._failure.exception is None:
            try:
                task()
            except Exception as exception:  # but not KeyboardInterrupt, which belongs to the caller
                self._failure.stop(exception)

    def wait(self) -> None:
        """Return when all tasks are done.

        Raises:
            RuntimeError: from the exception of the task that failed.
        """
        self.drain()
        self._failure.check()

    def drain(self) -> None:
        """Return when all tasks are done or dropped."""
        if self._threaded and not self._closed:
            reached = threading.Event()
            self._tasks.put(reached)
            while not reached.wait(_POLL_SECONDS):
                if not self._thread.is_alive():
                    raise RuntimeError("a lane of thinwire has ended before its tasks were done")

    def close(self, seconds: float | None = None) -> bool:
        """Run the tasks that were submitted, and end the thread. Later tasks are dropped.

        Args:
            seconds: how long to wait for that; None for no limit.

        Returns:
            Whether the thread has ended.
        """
        if not self._threaded:
            self._closed = True
            return True
        if not self._closed:
            self._closed = True
            self._tasks.put(None)
        self._thread.join(seconds)
        return not self._thread.is_alive()


class _LaneThread(threading.Thread):
    dismissed = False
    """Its lane has been collected: nobody else will join it."""


def _dismiss(thread: _LaneThread, tasks: queue.SimpleQueue[Task | threading.Event | None]) -> None:
    thread.dismissed = True
    tasks.put(None)


@atexit.register
def _join_dismissed() -> None:
    # The exception that ends a program may have held the last reference to a lane. Its thread then runs its last tasks
    # while Python exits, and would lose the race that `Lane` describes.
    for thread in threading.enumerate():
        if isinstance(thread, _LaneThread) and thread.dismissed:
            thread.join(_EXIT_SECONDS)


def _run_tasks(
    tasks: queue.SimpleQueue[Task | threading.Event | None], failure_of_lane: weakref.ref[Failure], lent: Lent
) -> None:
    borrow(lent)
    # When the lane has been collected, the last tasks still run, because other ranks wait for their messages.
    own_failure = Failure()
    while (task := tasks.get()) is not None:
        if isinstance(task, threading.Event):
            task.set()
        else:
            _run(task, failure_of_lane() or own_failure)
        # A task refers to the owner of the lane, who may be about to drop it.
        del task


def _run(task: Task, failure: Failure) -> None:
    if failure.exception is not None:
        return
    try:
        task()
    except BaseException as exception:  # raised again on the thread that waits
        failure.stop(exception)
