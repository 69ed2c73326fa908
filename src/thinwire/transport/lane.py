"""A lane: one thread that does its part of the exchange for bucket after bucket, in the order in which it gets them.

Whoever starts exchanges from callbacks of futures gets whatever order the callbacks run in, another one on every rank.
Threads that hand buckets on to each other keep their order, and while they wait for the network they hold neither the
GIL nor a core.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from types import TracebackType

from thinwire.errors import CorruptPacket, PeerLost

Job = Callable[[], None]

_A_WHILE = 1.0
"""Seconds."""


class Failure:
    """The first exception that stopped one of the lanes that share this, and with it all of them.

    Args:
        then: what to do when a lane has failed, so that the others do not wait in vain.
    """

    def __init__(self, then: Sequence[Callable[[], None]] = ()) -> None:
        self.exception: BaseException | None = None
        self._traceback: TracebackType | None = None
        self._lock = threading.Lock()
        self._then = then

    def note(self, exception: BaseException) -> None:
        """Remember an exception, if it is the first, or the first that tells more than that there was one."""
        with self._lock:
            if self.exception is None or (_is_secondhand(self.exception) and not _is_secondhand(exception)):
                self.exception, self._traceback = exception, exception.__traceback__

    def stop(self, exception: BaseException) -> None:
        """Remember an exception, and see to it that nobody waits for what will not come any more."""
        self.note(exception)
        for call in self._then:
            call()

    def check(self) -> None:
        """Raise if there is one, now and ever after, because ranks may have parted.

        Raises:
            PeerLost: if it is one, with the traceback of the lane.
            CorruptPacket: the same.
            RuntimeError: from any other.
        """
        if isinstance(self.exception, (PeerLost, CorruptPacket)):
            # As it was noted: a traceback grows by every raise.
            raise self.exception.with_traceback(self._traceback)
        if self.exception is not None:
            told = str(self.exception) or repr(self.exception)
            raise RuntimeError(f"thinwire's exchange failed: {told}") from self.exception


def _is_secondhand(exception: BaseException) -> bool:
    return isinstance(exception, PeerLost) and exception.secondhand


class Lane:
    """Runs jobs in order, on a thread of its own, or at once on the caller's when `threaded` is false.

    The first job that raises stops the lane, and all others that share its `failure`: later jobs are dropped.
    """

    _closed = False

    def __init__(self, *, threaded: bool, failure: Failure | None = None) -> None:
        self._failure = failure or Failure()
        self._threaded = threaded
        if threaded:
            # The garbage collector may find a forgotten lane at any moment, even while the lane's own thread is inside
            # the queue. Only a SimpleQueue can be put something into then; a Queue would wait for itself.
            self._jobs: queue.SimpleQueue[Job | threading.Event | None] = queue.SimpleQueue()
            # The thread knows neither the lane nor, for long, its failure, whose traceback knows the owner of the lane:
            # what is forgotten is collected, and the thread ends.
            arguments = (self._jobs, weakref.ref(self._failure))
            self._thread = threading.Thread(target=_work, args=arguments, name="thinwire-lane", daemon=True)
            self._thread.start()
            farewell = weakref.finalize(self, self._jobs.put, None)
            # Not when the interpreter exits: a thread that is woken then, and not waited for, races with the teardown
            # of Python, and CPython ends threads that lose that race by unwinding torch's C++ frames: std::terminate.
            farewell.atexit = False

    def submit(self, job: Job) -> None:
        """Append a job."""
        if self._closed:
            return
        if self._threaded:
            self._jobs.put(job)
        elif self._failure.exception is None:
            try:
                job()
            except Exception as exception:  # but not Ctrl-C, which is the caller's
                self._failure.stop(exception)

    def wait(self) -> None:
        """Return when all jobs are done.

        Raises:
            RuntimeError: from the exception of the job that failed.
        """
        self.drain()
        self._failure.check()

    def drain(self) -> None:
        """Return when all jobs are done or dropped."""
        if self._threaded and not self._closed:
            reached = threading.Event()
            self._jobs.put(reached)
            while not reached.wait(_A_WHILE):
                if not self._thread.is_alive():
                    raise RuntimeError("a lane of thinwire has ended before its jobs were done")

    def close(self, patience: float | None = None) -> bool:
        """Do what there is to do, and end the thread; later jobs are dropped.

        Args:
            patience: how many seconds that may take; None for any number.

        Returns:
            Whether the thread has ended.
        """
        if not self._threaded:
            self._closed = True
            return True
        if not self._closed:
            self._closed = True
            self._jobs.put(None)
        self._thread.join(patience)
        return not self._thread.is_alive()


def _work(jobs: queue.SimpleQueue[Job | threading.Event | None], failure_of_lane: weakref.ref[Failure]) -> None:
    forgotten = Failure()  # when the lane is gone nobody will ask, but the last jobs run: other ranks count on them
    while (job := jobs.get()) is not None:
        if isinstance(job, threading.Event):
            job.set()
        else:
            _run(job, failure_of_lane() or forgotten)
        # A job holds the optimizer, and whoever waits may be about to let go of it.
        del job


def _run(job: Job, failure: Failure) -> None:
    if failure.exception is not None:
        return
    try:
        job()
    except BaseException as exception:  # raised again, on the thread that waits
        failure.stop(exception)
