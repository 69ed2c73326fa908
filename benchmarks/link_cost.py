"""What emulated links cost the cores: how much slower ranks compute while links of a testbed carry data.

python -m benchmarks.link_cost                         # as root; 10, 20 and 100 Mbit/s and 1 Gbit/s
python -m benchmarks.link_cost --rates 20mbit --json link-cost.json

`thinwire bench step` compares methods with `local`, which sends nothing. Its hosts are namespaces of one machine, so
the kernel shapes, forwards and acknowledges what all of them send on the cores that also compute. Separate hosts do
not have this cost, and no method can avoid it here. Four processes multiply matrices, outside of the namespaces. In
turns with that, four others send plain TCP streams through four hosts as fast as the links allow. They do nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

import torch
from rich.console import Console
from rich.table import Table

import thinwire
from thinwire.cli.units import rate as in_words
from thinwire.testbed import Testbed, TestbedUnavailable, parse_rate
from thinwire.testbed.supervisor import Child, Supervisor

HOSTS = 4
PORT = 7777
_SIZE = 256
"""Of the matrices: they stay in a cache, as those of a small model do."""
_PIECE = bytes(1 << 16)
_SECONDS_TO_DRAIN = 1.0
"""What was handed to the kernel is still on its way when a stream ends."""


@dataclass(frozen=True)
class Cost:
    """At one rate."""

    rate: str
    products_per_second: float
    """Of all four processes, while no link carries anything."""
    with_streams: float
    """The same while all links are busy."""
    slower_by: float
    """The median over turns of the ratio of both, minus 1."""
    bytes_per_second: float
    """Sent by a host while links were busy, with headers."""


def compute(channel: Connection) -> None:
    """Multiply matrices for as many seconds as the parent asks for, and tell how often that was."""
    torch.set_num_threads(1)
    matrix = torch.rand(_SIZE, _SIZE)
    while True:
        seconds, count = channel.recv(), 0
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            torch.mm(matrix, matrix)
            count += 1
        channel.send(count / seconds)


def receive(channel: Connection, address: str) -> None:
    """Take in a stream."""
    with socket.create_server((address, PORT)) as server:
        channel.send("listening")
        with server.accept()[0] as stream:
            while stream.recv(1 << 20):
                pass


def send(channel: Connection, address: str) -> None:
    """Send for as many seconds as the parent asks for."""
    with socket.create_connection((address, PORT)) as stream:
        channel.send("connected")
        while True:
            seconds = channel.recv()
            end = time.monotonic() + seconds
            while (left := end - time.monotonic()) > 0:
                stream.settimeout(left)
                with suppress(TimeoutError):
                    stream.send(_PIECE)


def answers(group: Supervisor, children: list[Child]) -> list[float]:
    """What each of them says next."""
    heard: dict[int, float] = {}
    while len(heard) < len(children):
        heard |= {child.pid: message for child, message in group.messages() if child in children}
    return [heard[child.pid] for child in children]


def measure(testbed: Testbed, rate: str, turns: int, seconds: float) -> Cost:
    """Compute with and without streams, in turns."""
    testbed.set_rate(rate)
    with Supervisor(grace=0.0) as group:
        hosts = testbed.hosts
        sinks = [group.start(receive, host.address, namespace=host.namespace) for host in hosts]
        answers(group, sinks)
        pairs = zip(hosts, hosts[1:] + hosts[:1], strict=True)
        sources = [group.start(send, to.address, namespace=host.namespace) for host, to in pairs]
        answers(group, sources)
        computers = [group.start(compute) for _ in hosts]
        quiet: list[float] = []
        busy: list[float] = []
        sent: list[float] = []
        for turn in range(turns + 1):  # the first one does not count
            for streams, found in ((False, quiet), (True, busy)):
                before = testbed.bytes_sent()
                for child in (*computers, *(sources if streams else ())):
                    child.send(seconds)
                products = sum(answers(group, computers))
                if turn:
                    found.append(products)
                if turn and streams:
                    each = (after - begin for begin, after in zip(before, testbed.bytes_sent(), strict=True))
                    sent.append(sum(each) / len(hosts) / seconds)
                time.sleep(_SECONDS_TO_DRAIN)
    slower = median(without / carrying for without, carrying in zip(quiet, busy, strict=True)) - 1
    return Cost(rate, median(quiet), median(busy), slower, median(sent))


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", default="10mbit,20mbit,100mbit,1gbit", help="of the links, separated by commas")
    parser.add_argument("--turns", type=int, default=5, help="that count")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each half of a turn")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    rates = options.rates.split(",")
    for rate in rates:
        try:
            parse_rate(rate)
        except ValueError as error:
            parser.error(f"--rates: {error}")
    if options.turns < 1 or options.seconds <= 0:
        parser.error("expected at least one turn, and more than 0 seconds")
    try:
        with Testbed(HOSTS) as testbed, Console(stderr=True).status("This takes a minute or two."):
            costs = [measure(testbed, rate, options.turns, options.seconds) for rate in rates]
    except TestbedUnavailable as error:
        sys.exit(f"{parser.prog}: {error}")
    table = Table(title=f"{HOSTS} processes compute while {HOSTS} hosts send")
    for heading in ("links", "products a second", "with streams", "slower by", "sent by a host, MB/s"):
        table.add_column(heading, justify="right")
    for cost in costs:
        table.add_row(
            in_words(cost.rate),
            f"{cost.products_per_second:,.0f}",
            f"{cost.with_streams:,.0f}",
            f"{100 * cost.slower_by:.1f} %",
            f"{cost.bytes_per_second / 1e6:.2f}",
        )
    Console().print(table)
    if options.json is not None:
        report = {
            "benchmark": "link_cost",
            "thinwire": thinwire.__version__,
            "machine": f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()} {platform.release()}",
            "settings": {"turns": options.turns, "seconds": options.seconds},
            "results": [asdict(cost) for cost in costs],
        }
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
