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


class Lane:
    """Runs jobs in order, on a thread of its own, or at once on the caller's when `threaded` is false.

    The first job that raises stops the lane: later jobs are dropped, and `wait` raises from that exception, now and
    ever after, because ranks may have parted.
    """

    def __init__(self, *, threaded: bool) -> None:
        self._jobs: queue.Queue[Job | None] = queue.Queue()
        self._failures: list[BaseException] = []
        self._threaded = threaded
        if threaded:
            # The thread knows the queue and not the lane, so that a forgotten lane is collected and its thread ends.
            threading.Thread(target=_work, args=(self._jobs, self._failures), name="thinwire-lane", daemon=True).start()
            weakref.finalize(self, self._jobs.put, None)

    def submit(self, job: Job) -> None:
        """Append a job."""
        if self._threaded:
            self._jobs.put(job)
        else:
            _run(job, self._failures)

    def wait(self) -> None:
        """Return when all jobs are done.

        Raises:
            RuntimeError: from the exception of the job that failed.
        """
        self._jobs.join()
        if self._failures:
            failure = self._failures[0]
            raise RuntimeError(f"thinwire's exchange failed: {failure}") from failure


def _work(jobs: queue.Queue[Job | None], failures: list[BaseException]) -> None:
    while (job := jobs.get()) is not None:
        _run(job, failures)
        # Before task_done: a job holds the optimizer, and whoever waits may be about to let go of it.
        del job
        jobs.task_done()


def _run(job: Job, failures: list[BaseException]) -> None:
    if failures:
        return
    try:
        job()
    except BaseException as failure:  # raised again, on the thread that waits
        failures.append(failure)
