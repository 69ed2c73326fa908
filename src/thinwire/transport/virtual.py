"""Workers without machines: threads of one process that take turns, and compute what as many processes would.

    losses = run_workers(4, train, settings)       # [train(0, 4, settings), ..., train(3, 4, settings)]

Inside of `train` an optimizer of thinwire finds the other workers by itself, as it would find the default process
group. Everything but the wire is the real thing: rules, compressors, kernels, packets and their checksums. One worker
runs at a time, until it needs something of another one; so a run takes a single core, none of which is spent on
waiting, and several runs at once take a machine whole. Each worker has torch's random numbers to itself, as a process
has.

DDP needs processes: call `step()` without `attach`, which gives the same bits.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict, deque
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
from thinwire.transport.peers import Peers, here


def run_workers(workers: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """What `function(worker, workers, *args)` returns for every worker, in their order.

    Raises:
        ValueError: when there is no worker.
        BaseException: what the first worker raised that failed; the others are told as ranks would be, by `PeerLost`.
    """
    if workers < 1:
        raise ValueError(f"workers={workers!r}: expected a number of at least 1")
    world = _World(workers)

    def work(worker: int) -> None:
        with world.part_of(worker):
            here.peers = VirtualPeers(None, worker, workers, world=world)
            world.results[worker] = function(worker, workers, *args)

    threads = [
        threading.Thread(target=work, args=(i,), name=f"thinwire-worker-{i}", daemon=True) for i in range(workers)
    ]
    random = torch.get_rng_state()
    try:
        for thread in threads:
            thread.start()
        world.begin()
        for thread in threads:
            thread.join()
    except BaseException:  # Ctrl-C: workers hear of it when they need each other next
        world.stopped = True
        for thread in threads:
            if thread.is_alive():
                thread.join()
        raise
    finally:
        torch.set_rng_state(random)
    if world.failure is not None:
        raise world.failure
    return world.results


@dataclass
class _Message:
    """One end of a message, until the other end is there."""

    row: Tensor
    done: bool = False


_Key = tuple[Hashable, int, int, int]
"""A group, a sender and a receiver in it, and a tag."""


class _World:
    """All workers: whose turn it is, and what they have for each other.

    Nothing here is locked. Whoever has the turn is alone.
    """

    def __init__(self, workers: int) -> None:
        self.results: list[Any] = [None] * workers
        self.failure: BaseException | None = None
        self.stopped = False
        self.sent: defaultdict[_Key, deque[_Message]] = defaultdict(deque)
        self.expected: defaultdict[_Key, deque[_Message]] = defaultdict(deque)
        self.said: defaultdict[int, dict[int, Any]] = defaultdict(dict)
        """What workers have said when all of them were asked, by the number of the question."""
        self.closed: set[Hashable] = set()
        """The groups in which nobody will say anything any more."""
        self._turns = [threading.Semaphore(0) for _ in range(workers)]
        self._ready: list[Callable[[], bool] | None] = [lambda: True] * workers
        """What each of them waits for; None for one that has ended."""
        self._random = [torch.get_rng_state()] * workers
        self._counts: Counter[tuple[Hashable, int]] = Counter()

    def begin(self) -> None:
        """Let the first one work."""
        self._turns[0].release()

    @contextmanager
    def part_of(self, worker: int) -> Iterator[None]:
        """Wait for a worker's first turn; at the end let the others go on, whatever has happened."""
        try:
            self._take_turn(worker)
            yield
        except BaseException as error:  # raised again where the workers were started
            self.failure = error if self.failure is None else self.failure
        finally:
            self._ready[worker] = None
            self._next(worker)

    def count(self, what: Hashable, worker: int) -> int:
        """How often a worker has asked this, now included."""
        self._counts[what, worker] += 1
        return self._counts[what, worker]

    def wait(self, worker: int, ready: Callable[[], bool]) -> bool:
        """Let others work until `ready`; whether it is. It is not when nobody could make it so."""
        if ready():
            return True
        self._ready[worker] = ready
        self._random[worker] = torch.get_rng_state()
        self._next(worker)
        self._take_turn(worker)
        return ready()

    def _take_turn(self, worker: int) -> None:
        self._turns[worker].acquire()
        if self.stopped:
            raise RuntimeError("the workers have been stopped")
        torch.set_rng_state(self._random[worker])

    def _next(self, worker: int) -> None:
        # In turn, beginning with the one after this: the order in which workers run is always the same.
        others = [(worker + i) % len(self._ready) for i in range(1, len(self._ready) + 1)]
        waiting = [(other, ready) for other in others if (ready := self._ready[other]) is not None]
        chosen = next((other for other, ready in waiting if ready()), None)
        if chosen is None and waiting:
            chosen = waiting[0][0]  # nobody can go on: it hears so, and tells the rest by its end
        if chosen is not None:
            self._turns[chosen].release()


@dataclass(frozen=True)
class VirtualPeers(Peers):
    """All workers of a world, as one of them sees them."""

    world: _World = field(kw_only=True)

    @property
    def threaded(self) -> bool:
        """See `Peers`: workers take turns, and so do their lanes."""
        return False

    def ranks(self) -> list[int]:
        """See `Peers`."""
        return list(range(self.size))

    def refuse_late_group(self) -> None:
        """See `Peers`: the world was there first."""

    def refuse_group_without(self, device: torch.device) -> None:
        """See `Peers`.

        Raises:
            ValueError: for any device but the CPU.
        """
        if device.type != "cpu":
            raise ValueError(f"parameters on {str(device)!r}: virtual workers exchange what is on the CPU only")

    def gather(self, value: Any, stage: str = "what all ranks have to say", step: int | None = None) -> list[Any]:
        """See `Peers`."""
        question = self.world.count("questions", self.rank)
        said = self.world.said[question]
        said[self.rank] = value
        if not self.world.wait(self.rank, lambda: len(said) == self.size):
            raise PeerLost(stage, "another worker has ended, or waits for something else", step=step)
        self.world.said.pop(question, None)
        return [said[rank] for rank in range(self.size)]

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
    """Some of the workers, as one of them sees them: as much of a process group as messages need.

    Args:
        world: of them all.
        own: this worker's position in the group.
        size: of the group.
        worker: this worker's number in the world.
        name: which all members give it, and nobody gives to another.
    """

    def __init__(self, world: _World, own: int, size: int, worker: int, name: Hashable) -> None:
        super().__init__(own, size)
        self._world = world
        self._own = own
        self._worker = worker
        self._name = name

    def name(self) -> str:
        """As a backend it is one of its own."""
        return "virtual"

    def abort(self) -> None:
        """Let all waits in the group fail."""
        self._world.closed.add(self._name)

    def send(self, rows: list[Tensor], member: int, tag: int) -> dist.Work:  # type: ignore[override]
        """Send a row, which is taken from where it lies when the other end is ready."""
        key = (self._name, self._own, member, tag)
        return self._start(rows[0], self._world.sent[key], self._world.expected[key], receives=False)

    def recv(self, rows: list[Tensor], member: int, tag: int) -> dist.Work:  # type: ignore[override]
        """Expect a row."""
        key = (self._name, member, self._own, tag)
        return self._start(rows[0], self._world.expected[key], self._world.sent[key], receives=True)

    def _start(self, row: Tensor, ours: deque[_Message], theirs: deque[_Message], *, receives: bool) -> dist.Work:
        message = _Message(row)
        if theirs:
            other = theirs.popleft()
            source, into = (other.row, row) if receives else (row, other.row)
            into.copy_(source)
            message.done = other.done = True
        else:
            ours.append(message)
        return _Work(self._world, self._worker, self._name, message)


class _Work(dist.Work):
    """A message under way."""

    def __init__(self, world: _World, worker: int, group: Hashable, message: _Message) -> None:
        super().__init__()
        self._world = world
        self._worker = worker
        self._group = group
        self._message = message

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Let others work until the message is complete.

        Raises:
            RuntimeError: when it will never be, or, with a timeout, is not yet.
        """
        message, closed, group = self._message, self._world.closed, self._group
        if timeout is None:
            self._world.wait(self._worker, lambda: message.done or group in closed)
        if message.done:
            return True
        if group in closed:
            raise RuntimeError("the group of virtual workers is closed")
        raise RuntimeError("Timed out waiting for a virtual worker, which has ended, or waits for something else")
