"""The rate of a link: how it is written, and how the kernel's queues are configured."""

from __future__ import annotations

import json
import re

from thinwire.testbed.tools import run_tool

UNLIMITED = "unlimited"
_BITS = {"bit": 1e0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "tbit": 1e12}
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1e0}
_SLOWEST, _FASTEST = 1e3, 1e12

_FRAME = 1514  # an Ethernet frame of a 1500 byte packet, as the queue counts it
_LARGEST_PACKET = 65536  # what TCP hands over at most, to be cut into frames later
# A bucket fills to what the link carries in this time. It is given away at memory speed after every pause, so it has to
# be small against a message: 25 kB at 1 Gbit/s. It is also how late a timer may be before the link loses throughput:
# 200 µs are plenty for the kernel's high-resolution timers.
_BUCKET_SECONDS = 200e-6
# On slower links it holds a packet of this size, so that TCP need not be cut into frames: the hosts of a testbed share
# this machine's cores, and every packet takes some 50 µs of one. Of four hosts that train over 100 Mbit/s, frames would
# take a quarter of two cores, which real hosts have for themselves. But no more than so many seconds of the link.
_PACKET = 16384
_LONGEST_BUCKET_SECONDS = 1.5e-3
# A network card does not drop what its own host sends, it makes it wait. TCP keeps a few milliseconds a socket queued.
_QUEUE_BYTES = 32 << 20


def parse_rate(rate: str | None) -> float | None:
    """Bits per second of "100mbit", "2.5gbit" and the like; none of None and "unlimited".

    Raises:
        ValueError: for anything else.
    """
    if rate is None or rate == UNLIMITED:
        return None
    bits = _quantity(rate, _BITS)
    if bits is None or not _SLOWEST <= bits <= _FASTEST:
        raise ValueError(f"rate must be like '100mbit' or '1gbit' (1kbit to 1tbit), or 'unlimited', got {rate!r}")
    return bits


def parse_delay(delay: str | None) -> float | None:
    """Seconds of "5ms", "100us" and the like; none of None.

    Raises:
        ValueError: for anything else.
    """
    if delay is None:
        return None
    seconds = _quantity(delay, _SECONDS)
    if seconds is None or not 0 < seconds <= 10:
        raise ValueError(f"delay must be like '5ms' or '200us', more than 0 and at most 10s, got {delay!r}")
    return seconds


def _quantity(text: str, units: dict[str, float]) -> float | None:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([a-z]+)", text)
    if match is None or match[2] not in units:
        return None
    return float(match[1]) * units[match[2]]


class Egress:
    """The queue of one interface in one namespace.

    Two token buckets, one in the other. The outer one never holds anything back and is never replaced: it counts the
    bytes that leave, every frame with its headers (the interface's own counter sees a large TCP packet before it is cut
    into frames, with one header for all of them). The inner one shapes. It is replaced to change the rate, not changed,
    because a packet that is larger than the new bucket would never leave it.
    """

    def __init__(self, namespace: str, interface: str) -> None:
        self._namespace = namespace
        self._interface = interface
        self._handle = 1
        self._tc("replace", "root", "handle", "1:", *_token_bucket(_FASTEST))

    def shape(self, bits_per_second: float | None) -> None:
        """Let at most so much pass from now on. What waits to be sent is lost; TCP sends it again."""
        rate = bits_per_second or _FASTEST
        self._handle += 1
        # A packet that does not fit into the bucket is cut into frames before its time, which costs a core at 1 Gbit/s
        # and a handful of hosts; two that do fit leave the timer some slack. Sockets take note when they connect.
        largest_packet = min(max(_bucket_bytes(rate) // 2, _PACKET), _LARGEST_PACKET)
        run_tool(
            *("ip", "-n", self._namespace, "link", "set", "dev", self._interface),
            *("gso_max_size", str(largest_packet)),
        )
        self._tc("replace", "parent", "1:1", "handle", f"{self._handle:x}:", *_token_bucket(rate))

    def bytes_sent(self) -> int:
        """All that left so far, Ethernet headers included."""
        shown = run_tool("tc", "-n", self._namespace, "-s", "-j", "qdisc", "show", "dev", self._interface)
        return next(queue["bytes"] for queue in json.loads(shown) if queue.get("root"))

    def _tc(self, verb: str, *arguments: str) -> None:
        run_tool("tc", "-n", self._namespace, "qdisc", verb, "dev", self._interface, *arguments)


def delay_egress(namespace: str, interface: str, seconds: float) -> None:
    """Let every packet leave so much later. Needs the kernel's ``netem``."""
    # The limit is in packets; netem drops what exceeds it, and its default is less than a fast link holds.
    run_tool(
        *("tc", "-n", namespace, "qdisc", "replace", "dev", interface, "root"),
        *("netem", "delay", f"{round(seconds * 1e6)}us", "limit", "1000000"),
    )


def _token_bucket(rate: float) -> tuple[str, ...]:
    return ("tbf", "rate", f"{round(rate)}bit", "burst", f"{_bucket_bytes(rate)}b", "limit", f"{_QUEUE_BYTES}b")


def _bucket_bytes(rate: float) -> int:
    # Two frames at least, or a slow link would lose the time between the timer and the next frame.
    packet = min(_PACKET + _FRAME, rate / 8 * _LONGEST_BUCKET_SECONDS)
    return round(max(2 * _FRAME, packet, rate / 8 * _BUCKET_SECONDS))
