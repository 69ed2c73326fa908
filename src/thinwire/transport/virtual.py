"""Virtual workers: threads of one process that take turns and compute the bits of separate processes.

    losses = run_workers(4, train, settings)       # [train(0, 4, settings), ..., train(3, 4, settings)]

Inside `train`, thinwire finds the other workers in place of the default process group. Only the network is replaced;
compressors, kernels, packets and checksums are the usual ones. One worker runs at a time, until it needs a message from
another, so a run uses a single core and never waits, and several runs in parallel use all cores. Each worker has its
own state of torch's random number generator, as a process has.

DDP needs processes: call `step()` without `attach`, which gives the same bits.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire._torch_compat import PythonProcessGroup
from thinwire.errors import PeerLost
from thinwire.transport.connections import Connection
from thinwire.transport.peers import Peers, virtual_worker


def run_workers(workers: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Call `function(worker, workers, *args)` for every worker.

    Returns:
        The results, in order of workers.

    Raises:
        ValueError: `workers` is less than 1.
        BaseException: the error of the first worker that failed. The others get a `PeerLost`, as ranks would.
    """
    if workers < 1:
        raise ValueError(f"workers={workers!r}: expected a number of at least 1")
    world = _World(workers)

    def work(worker: int) -> None:
        with world.running(worker):
            virtual_worker.peers = VirtualPeers(None, worker, workers, world=world)
            world.results[worker] = function(worker, workers, *args)

    threads = [
        threading.Thread(target=work, args=(i,), name=f"thinwire-worker-{i}", daemon=True) for i in range(workers)
    ]
    random = torch.get_rng_state()
    try:
        for thread in threads:
            thread.start()
        world.begin()
        # Not by joining threads: if Ctrl-C interrupts that, Python 3.11 takes a running thread for an ended one.
        world.ended.wait()
    except BaseException:
        world.stop()
        raise
    finally:
        for thread in threads:
            if thread.is_alive():
                thread.join()
        torch.set_rng_state(random)
    if world.failure is not None:
        raise world.failure
    return world.results


@dataclass
class _Message:
    """One end of a message whose other end has not been posted yet."""

    row: Tensor
    done: bool = False


_Key = tuple[Hashable, int, int, int]
"""The name of a group, a sender and a receiver in it, and a tag."""


class _World:
    """All workers: which one runs, and the messages between them.

    There are no locks, because only one worker runs at a time.
    """

    def __init__(self, workers: int) -> None:
        self.results: list[Any] = [None] * workers
        self.failure: BaseException | None = None
        self.ended = threading.Event()
        """Whether all workers have ended."""
        self.sent: defaultdict[_Key, deque[_Message]] = defaultdict(deque)
        self.expected: defaultdict[_Key, deque[_Message]] = defaultdict(deque)
        self.gathered: defaultdict[int, dict[int, Any]] = defaultdict(dict)
        """By the number of the gather, the values by worker."""
        self.gathers = [0] * workers
        """The number of gathers that each worker has begun."""
        self.closed: set[Hashable] = set()
        """The names of aborted groups."""
        self._stopped = False
        self._turns = [threading.Semaphore(0) for _ in range(workers)]
        self._ready: list[Callable[[], bool] | None] = [lambda: True] * workers
        """The condition for which each worker waits; None for a worker that has ended."""
        self._random = [torch.get_rng_state()] * workers

    def begin(self) -> None:
        """Run the first worker."""
        self._turns[0].release()

    def stop(self) -> None:
        """Make every worker raise at its next turn, which all that wait for one have now."""
        self._stopped = True
        for turn in self._turns:
            turn.release()

    @contextmanager
    def running(self, worker: int) -> Iterator[None]:
        """Wait for the first turn of a worker, and give the turn to another at the end of the block."""
        try:
            self._take_turn(worker)
            yield
        except BaseException as error:  # raised again by run_workers
            self.failure = error if self.failure is None else self.failure
        finally:
            self._ready[worker] = None
            self._next(worker)

    def wait(self, worker: int, ready: Callable[[], bool]) -> bool:
        """Run other workers until a condition holds.

        Returns:
            Whether it holds. It does not if no other worker can make it so.
        """
        if ready():
            return True
        self._ready[worker] = ready
        self._random[worker] = torch.get_rng_state()
        self._next(worker)
        self._take_turn(worker)
        return ready()

    def _take_turn(self, worker: int) -> None:
        self._turns[worker].acquire()
        if self._stopped:
            raise RuntimeError("the workers have been stopped")
        torch.set_rng_state(self._random[worker])

    def _next(self, worker: int) -> None:
        # Round robin, so that workers always run in the same order.
        others = [(worker + i) % len(self._ready) for i in range(1, len(self._ready) + 1)]
        waiting = [(other, ready) for other in others if (ready := self._ready[other]) is not None]
        chosen = next((other for other, ready in waiting if ready()), None)
        if chosen is None and waiting:
            chosen = waiting[0][0]  # a deadlock: its wait fails, and the others fail when it has ended
        if chosen is not None:
            self._turns[chosen].release()
        if not waiting:
            self.ended.set()


@dataclass(frozen=True)
class VirtualPeers(Peers):
    """The virtual workers of a run, for one of them."""

    world: _World = field(kw_only=True)

    @property
    def threaded(self) -> bool:
        """See `Peers`. Lanes run on the worker's own thread, because workers take turns."""
        return False

    def ranks(self) -> list[int]:
        """See `Peers`."""
        return list(range(self.size))

    def check_initialized_first(self) -> None:
        """See `Peers`. Virtual workers are started first."""

    def check_backend(self, device: torch.device) -> None:
        """See `Peers`.

        Raises:
            ValueError: the device is not the CPU.
        """
        if device.type != "cpu":
            raise ValueError(f"parameters on {str(device)!r}: virtual workers need them on the CPU")

    def gather(self, value: Any, stage: str = "the values of all ranks", step: int | None = None) -> list[Any]:
        """See `Peers`."""
        number = self.world.gathers[self.rank]
        self.world.gathers[self.rank] += 1
        values = self.world.gathered[number]
        values[self.rank] = value
        if not self.world.wait(self.rank, lambda: len(values) == self.size):
            raise PeerLost(stage, "another worker has ended, or waits for something else", step=step)
        self.world.gathered.pop(number, None)
        return [values[rank] for rank in range(self.size)]

    def gather_on(self, target: int, value: Any, stage: str) -> list[Any] | None:
        """See `Peers`."""
        values = self.gather(value, stage)
        return values if self.rank == target else None

    def gather_integer(self, value: int, stage: str, step: int | None = None) -> list[int]:
        """See `Peers`."""
        return self.gather(value, stage, step)

    def connect(self, members: Sequence[int], name: str, device: torch.device) -> Connection | None:
        """See `Peers`."""
        if len(members) == 1:
            return None
        own = list(members).index(self.rank)
        return Connection(VirtualGroup(self.world, own, len(members), self.rank, (*members, name)))


class VirtualGroup(PythonProcessGroup):
    """A group of virtual workers, for one of them. It has the methods of a process group that messages need.

    Args:
        world: all workers.
        own: this worker's position in the group.
        size: the number of members.
        worker: this worker's number in the world.
        name: equal on all members, and used by no other group.
    """

    def __init__(self, world: _World, own: int, size: int, worker: int, name: Hashable) -> None:
        super().__init__(own, size)
        self._world = world
        self._own = own
        self._worker = worker
        self._name = name

    def name(self) -> str:
        """The name of the backend."""
        return "virtual"

    def abort(self) -> None:
        """Make all waits in the group fail."""
        self._world.closed.add(self._name)

    def send(self, rows: list[Tensor], member: int, tag: int) -> dist.Work:  # type: ignore[override]
        """Send a row. It is copied when the other end has posted the receive."""
        key = (self._name, self._own, member, tag)
        return self._start(rows[0], self._world.sent[key], self._world.expected[key], receives=False)

    def recv(self, rows: list[Tensor], member: int, tag: int) -> dist.Work:  # type: ignore[override]
        """Receive a row."""
        key = (self._name, member, self._own, tag)
        return self._start(rows[0], self._world.expected[key], self._world.sent[key], receives=True)

    def _start(self, row: Tensor, ours: deque[_Message], theirs: deque[_Message], *, receives: bool) -> dist.Work:
        message = _Message(row)
        if theirs:
            other = theirs.popleft()
            source, into = (other.row, row) if receives else (row, other.row)
            into[: source.numel()].copy_(source)  # a message may be shorter than its receiver has room for
            message.done = other.done = True
        else:
            ours.append(message)
        return _Work(self._world, self._worker, self._name, message)


class _Work(dist.Work):
    """A message that may be incomplete."""

    def __init__(self, world: _World, worker: int, group: Hashable, message: _Message) -> None:
        super().__init__()
        self._world = world
        self._worker = worker
        self._group = group
        self._message = message

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Run other workers until the message is complete.

        Raises:
            RuntimeError: it can never be complete, or there is a timeout and it is not complete now.
        """
        message, closed, group = self._message, self._world.closed, self._group
        if timeout is None:
            self._world.wait(self._worker, lambda: message.done or group in closed)
        if message.done:
            return True
        if group in closed:
            raise RuntimeError("the group of virtual workers is closed")
        raise RuntimeError("Timed out waiting for a virtual worker, which has ended, or waits for something else")
