"""The lane: one thread that exchanges buckets in the order in which they are given to it.

Collectives must start in the same order on all ranks. Whoever starts them from callbacks of futures gets whatever order
the callbacks run in; one thread with a process group of its own cannot be out of order, and while it waits for the
network it holds neither the GIL nor a core.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable

Job = Callable[[], None]


class _Failure:
    """The exception that stopped a lane, once there is one."""

    exception: BaseException | None = None


class Lane:
    """Runs jobs in order, on a thread of its own, or at once on the caller's when `threaded` is false.

    The first job that raises stops the lane: later jobs are dropped, and `wait` raises from that exception, now and
    ever after, because ranks may have parted.
    """

    def __init__(self, *, threaded: bool) -> None:
        self._failure = _Failure()
        self._threaded = threaded
        if threaded:
            # The garbage collector may find a forgotten lane at any moment, even while the lane's own thread is inside
            # the queue. Only a SimpleQueue can be put something into then; a Queue would wait for itself.
            self._jobs: queue.SimpleQueue[Job | threading.Event | None] = queue.SimpleQueue()
            # The thread knows neither the lane nor, for long, its failure, whose traceback knows the owner of the lane:
            # what is forgotten is collected, and the thread ends.
            arguments = (self._jobs, weakref.ref(self._failure))
            threading.Thread(target=_work, args=arguments, name="thinwire-lane", daemon=True).start()
            farewell = weakref.finalize(self, self._jobs.put, None)
            # When the interpreter exits, the thread is left asleep. Woken then, it would race with the teardown of
            # Python, and CPython ends threads that lose that race by unwinding torch's C++ frames: std::terminate.
            farewell.atexit = False

    def submit(self, job: Job) -> None:
        """Append a job."""
        if self._threaded:
            self._jobs.put(job)
        else:
            _run(job, self._failure)

    def wait(self) -> None:
        """Return when all jobs are done.

        Raises:
            RuntimeError: from the exception of the job that failed.
        """
        if self._threaded:
            reached = threading.Event()
            self._jobs.put(reached)
            reached.wait()
        failure = self._failure.exception
        if failure is not None:
            raise RuntimeError(f"thinwire's exchange failed: {failure}") from failure


def _work(jobs: queue.SimpleQueue[Job | threading.Event | None], failure_of_lane: weakref.ref[_Failure]) -> None:
    forgotten = _Failure()  # when the lane is gone nobody will ask, but the last jobs run: other ranks count on them
    while (job := jobs.get()) is not None:
        if isinstance(job, threading.Event):
            job.set()
        else:
            _run(job, failure_of_lane() or forgotten)
        # A job holds the optimizer, and whoever waits may be about to let go of it.
        del job


def _run(job: Job, failure: _Failure) -> None:
    if failure.exception is not None:
        return
    try:
        job()
    except BaseException as exception:  # raised again, on the thread that waits
        failure.exception = exception
