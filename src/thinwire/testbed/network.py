"""The testbed: hosts, a switch between them, and the processes on the hosts."""

from __future__ import annotations

import itertools
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from thinwire.testbed.leftovers import SWITCH, new_testbed_name, remove_leftovers, remove_testbed
from thinwire.testbed.processes import check_options, check_ranks, end, rank_environments, start_in, wait_for
from thinwire.testbed.shaping import Egress, delay_egress, parse_delay, parse_rate
from thinwire.testbed.signals import signals_as_exceptions, signals_deferred
from thinwire.testbed.tools import TestbedUnavailable, ToolError, require_tools, run_tool

# Every testbed has these to itself, nothing of them is seen from outside.
_NETWORK = "10.77.0."
_MOST_HOSTS = 254
_BRIDGE = "br0"
_INTERFACE = "eth0"
_FIRST_PORT = 29500


@dataclass(frozen=True)
class Host:
    """A host of a testbed: a network namespace with one address on one interface."""

    index: int
    namespace: str
    address: str
    interface: str = _INTERFACE


class Testbed:
    """Hosts on one switch, each with a link of its own that lets no more than ``rate`` out.

        with Testbed(hosts=2, rate="100mbit") as testbed:
            testbed.run(["python", "train.py"])

    Everything that was started is ended and everything that was made is removed when the block is left, however that
    happens; SIGTERM and SIGHUP raise SystemExit meanwhile, unless they have handlers. What a killed process could not
    remove, the next testbed does. Testbeds do not see each other.

    Args:
        hosts: how many, 1 to 254.
        rate: what each host may send, like "100mbit" or "1gbit"; None and "unlimited" are what this machine can do.
        delay: how long every packet travels, like "5ms". Needs a kernel with ``netem``.

    Raises:
        ValueError: for a bad argument.
        TestbedUnavailable: on entry, if this machine cannot have a testbed; nothing is left then.
    """

    __test__ = False  # pytest takes every class for tests whose name begins like this

    def __init__(self, hosts: int, *, rate: str | None = None, delay: str | None = None) -> None:
        if not 1 <= hosts <= _MOST_HOSTS:
            raise ValueError(f"hosts must be 1 to {_MOST_HOSTS}, got {hosts}")
        self._rate = parse_rate(rate)
        self._delay = parse_delay(delay)
        self._host_count = hosts
        self.hosts: tuple[Host, ...] = ()
        self._egress: list[Egress] = []
        self._started: list[subprocess.Popen[Any]] = []
        # Ranks are killed when the thread that started them ends, so it has to be one that lives as long as the
        # testbed. Nor does a signal handler ever run in it, so that nothing comes between a start and the note of it.
        self._starter = ThreadPoolExecutor(1, thread_name_prefix="thinwire-testbed")
        self._ports = itertools.count(_FIRST_PORT)
        self._undo = ExitStack()
        self._entered = False
        self._switch = ""

    def __enter__(self) -> Testbed:
        if self._entered:
            raise RuntimeError("a testbed is used once; make another one")
        require_tools()
        self._entered = True
        with ExitStack() as undo:
            undo.enter_context(signals_as_exceptions())
            remove_leftovers()
            name = new_testbed_name()
            undo.callback(self._tear_down, name)
            self._build(name)
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._undo.close()

    def set_rate(self, rate: str | None, *, host: int | None = None) -> None:
        """Let every host, or one of them, send so much from now on.

        Packets that wait to be sent are lost; TCP sends them again.
        """
        bits_per_second = parse_rate(rate)
        for index in self._indices() if host is None else [self._checked(host)]:
            self._egress[index].shape(bits_per_second)

    def cut(self, host: int) -> None:
        """Pull the cable out of a host, while processes run: it sees no carrier, and packets both ways are lost."""
        self._plug(host, "down")

    def mend(self, host: int) -> None:
        """Plug the cable in again. TCP connections that have not given up go on, within about a second."""
        self._plug(host, "up")

    def bytes_sent(self) -> list[int]:
        """What has left each host's interface so far, headers of every frame included; loopback does not count."""
        self._require_hosts()
        return [egress.bytes_sent() for egress in self._egress]

    def start(
        self, command: Sequence[str], *, ranks: int = 1, env: Mapping[str, str] | None = None, **popen: Any
    ) -> list[subprocess.Popen[Any]]:
        """Start the command ``ranks`` times on every host, each with torchrun's environment variables.

        Args:
            command: program and arguments.
            ranks: processes a host.
            env: added to this process's environment; what torchrun would set is set here in any case.
            popen: passed on to `subprocess.Popen`.

        Returns:
            The processes in rank order, host by host. Each leads a process group of its own.
        """
        if isinstance(command, str) or not command:
            raise ValueError(f"command must be a sequence of a program and its arguments, got {command!r}")
        check_options(popen)
        places = self.places(ranks, env)
        processes: list[subprocess.Popen[Any]] = []

        def start_all() -> None:
            for host, environment in places:
                process = start_in(host.namespace, command, environment, popen)
                processes.append(process)
                self._started.append(process)

        starting = self._starter.submit(start_all)
        try:
            starting.result()
        except BaseException:
            with signals_deferred():
                wait([starting])
                end(processes)
            raise
        return processes

    def places(self, ranks: int = 1, env: Mapping[str, str] | None = None) -> list[tuple[Host, dict[str, str]]]:
        """The host of each rank and its environment with torchrun's variables, for processes that a caller starts."""
        self._require_hosts()
        check_ranks(ranks)
        # A new port each time: the last one may still be waiting for late packets.
        environments = rank_environments(
            len(self.hosts), ranks, self.hosts[0].address, next(self._ports), _INTERFACE, env
        )
        return [(self.hosts[rank // ranks], environment) for rank, environment in enumerate(environments)]

    def run(self, command: Sequence[str], *, ranks: int = 1, env: Mapping[str, str] | None = None) -> int:
        """Start the command on every host and wait for it; when one rank fails, the others are ended.

        Returns:
            0, or the exit code of the rank that failed first (128 + n if it was ended by signal n).
        """
        processes = self.start(command, ranks=ranks, env=env)
        try:
            return wait_for(processes)
        finally:
            with signals_deferred():
                end(processes)

    def _require_hosts(self) -> None:
        if not self.hosts:
            raise RuntimeError("a testbed has hosts only inside its with block")

    def _indices(self) -> range:
        self._require_hosts()
        return range(len(self.hosts))

    def _checked(self, host: int) -> int:
        if host not in self._indices():
            raise ValueError(f"host must be 0 to {len(self.hosts) - 1}, got {host}")
        return host

    def _plug(self, host: int, state: str) -> None:
        port = _port(self._checked(host))
        # The switch's end: were the host's own interface set down, the host would lose its routes as well, and its
        # processes hear at once what a cable does not tell them.
        run_tool("ip", "-n", self._switch, "link", "set", "dev", port, state)

    def _tear_down(self, name: str) -> None:
        with signals_deferred():
            try:
                # In the thread that starts, hence after a start that a signal has cut short.
                self._starter.submit(end, self._started).result()
                self._starter.shutdown()
            finally:
                self.hosts = ()
                remove_testbed(name)

    def _build(self, name: str) -> None:
        self._switch = switch = f"{name}-{SWITCH}"
        with _kernel_feature("network namespaces"):
            run_tool("ip", "netns", "add", switch)
        if self._delay is not None:
            # Checked first, on an unused loopback: small kernels have all features but this.
            with _kernel_feature("netem for delay="):
                delay_egress(switch, "lo", self._delay)
        with _kernel_feature("bridges"):
            run_tool("ip", "-n", switch, "link", "add", _BRIDGE, "type", "bridge", "mcast_snooping", "0")
            _bring_up(switch, _BRIDGE)
        hosts = [Host(k, f"{name}-h{k}", f"{_NETWORK}{k + 1}") for k in range(self._host_count)]
        for host in hosts:
            self._connect(host, switch)
        self.hosts = tuple(hosts)

    def _connect(self, host: Host, switch: str) -> None:
        port = _port(host.index)
        with _kernel_feature("network namespaces"):
            run_tool("ip", "netns", "add", host.namespace)
            run_tool("ip", "-n", host.namespace, "link", "set", "dev", "lo", "up")
        with _kernel_feature("veth"):
            # Both ends are created in their namespaces: in the caller's, names might collide.
            peer = ("peer", "name", host.interface, "netns", host.namespace)
            run_tool("ip", "-n", switch, "link", "add", port, "type", "veth", *peer)
        run_tool("ip", "-n", switch, "link", "set", "dev", port, "master", _BRIDGE)
        run_tool("ip", "-n", host.namespace, "address", "add", f"{host.address}/24", "dev", host.interface)
        with _kernel_feature("tbf"):
            egress = Egress(host.namespace, host.interface)
            egress.shape(self._rate)
        if self._delay is not None:
            delay_egress(switch, port, self._delay)
        _bring_up(host.namespace, host.interface)
        _bring_up(switch, port)
        self._egress.append(egress)


def _port(host: int) -> str:
    """The name of the switch's end of a host's cable."""
    return f"port{host}"


@contextmanager
def _kernel_feature(name: str) -> Iterator[None]:
    try:
        yield
    except ToolError as error:
        raise TestbedUnavailable(f"a testbed needs {name}, and this kernel refuses: {error}") from None


def _bring_up(namespace: str, interface: str) -> None:
    if os.path.exists("/proc/sys/net/ipv6"):
        # Without an IPv6 address the interface says nothing of its own accord that would be counted.
        run_tool("ip", "-n", namespace, "link", "set", "dev", interface, "addrgenmode", "none")
    run_tool("ip", "-n", namespace, "link", "set", "dev", interface, "up")
