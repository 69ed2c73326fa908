"""Processes that run one configuration after another: the ranks of each grid, and one for virtual workers."""

from __future__ import annotations

import logging
import time
import traceback
import warnings
from contextlib import ExitStack
from datetime import timedelta
from multiprocessing.connection import Connection
from types import TracebackType

import torch
import torch.distributed as dist

from tests.differential.configurations import VIRTUAL, Configuration
from tests.differential.runs import Course, course, differences, virtually
from tests.harness import fork_server
from thinwire.testbed.supervisor import Supervisor

SECONDS = 120.0
"""Within which a configuration must be done. It takes less than one, but machines may be busy."""
_GRACE_SECONDS = 5.0
"""How long others may take to report when one has failed."""

Courses = dict[str, Course]
"""Of a rank, by way."""


class Pool:
    """All processes. None outlives the block."""

    def __enter__(self) -> Pool:
        self._groups: dict[str, _Group] = {}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with ExitStack() as stack:
            for group in self._groups.values():
                stack.callback(group.end)
        self._groups = {}

    def check(self, configuration: Configuration) -> str:
        """What is wrong with a configuration; empty if it gives the same bits in all ways."""
        ranks = self._group(configuration.grid, configuration.ranks)
        virtual = self._group(VIRTUAL, 1)
        for group in (ranks, virtual):
            group.begin(configuration)
        answers = {name: self._answers(name) for name in (configuration.grid, VIRTUAL)}
        failures = [each for of_group in answers.values() for each in of_group if isinstance(each, str)]
        if failures:
            return "\n".join(failures)
        of_ranks: list[Courses] = answers[configuration.grid]
        courses = {way: [by_way[way] for by_way in of_ranks] for way in of_ranks[0]}
        courses[VIRTUAL] = answers[VIRTUAL][0]
        return differences(configuration, courses)

    def _group(self, name: str, size: int) -> _Group:
        if name not in self._groups:
            self._groups[name] = _Group(name, size)
        return self._groups[name]

    def _answers(self, name: str) -> list:
        """Of each process, its courses or its error. After an error new processes take their place."""
        answers = self._groups[name].answers()
        if any(isinstance(answer, str) for answer in answers):
            self._groups.pop(name).end()
        return answers


class _Group:
    """The processes of one grid, or the one of virtual workers."""

    def __init__(self, name: str, size: int) -> None:
        self._supervisor = Supervisor(fork_server(), grace=0.0)
        self._supervisor.__enter__()
        store = str(self._supervisor.folder / "store")
        self._ranks = [
            self._supervisor.start(
                _serve, "" if name == VIRTUAL else store, rank, size, environment={"GLOO_SOCKET_IFNAME": "lo"}
            )
            for rank in range(size)
        ]

    def begin(self, configuration: Configuration) -> None:
        """Let all run it."""
        for rank in self._ranks:
            rank.send(configuration)

    def answers(self) -> list:
        """What all report. An error is a text."""
        answers: dict[int, object] = {}
        deadline, failed = time.monotonic() + SECONDS, False
        while len(answers) < len(self._ranks) and time.monotonic() < deadline:
            for child, message in self._supervisor.receive(deadline - time.monotonic()):
                answers[self._ranks.index(child)] = message
            for number, rank in enumerate(self._ranks):
                if rank.exit_code is not None or rank.outcome is not None:
                    answers.setdefault(number, f"rank {number}: the process ended with code {rank.exit_code}")
            if not failed and any(isinstance(answer, str) for answer in answers.values()):
                failed, deadline = True, min(deadline, time.monotonic() + _GRACE_SECONDS)
        return [answers.get(number, f"rank {number}: had not finished") for number in range(len(self._ranks))]

    def end(self) -> None:
        """Kill them."""
        self._supervisor.__exit__(None, None, None)


def _serve(channel: Connection, store: str, rank: int, size: int) -> None:
    """Run what comes through the channel, until it is closed."""
    torch.set_num_threads(1)
    logging.disable()  # of steps that are skipped
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", message="all ranks have the same gradients")
    if store:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(store, size),
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=SECONDS),
        )
    while True:
        try:
            configuration: Configuration = channel.recv()
        except EOFError:
            return
        try:
            if store:
                ways = [way for way in configuration.ways if way != VIRTUAL]
                channel.send({way: course(rank, size, configuration, way) for way in ways})
            else:
                channel.send(virtually(configuration))
        except Exception:
            where = f"rank {rank}" if store else "virtual workers"
            channel.send(f"{where}: {traceback.format_exc()}")
