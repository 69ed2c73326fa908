"""Who is in the run: torchft's Manager and Lighthouse. The only file that knows torchft.

The Lighthouse is a process of its own, which hears from all workers several times a second. Before each exchange the
workers ask it for a *quorum*: the workers that take part in it, in order. If it differs from the one before, torchft
makes a new process group. A worker that is behind the others fetches a state from one of them, over HTTP.
"""

from __future__ import annotations

import logging
import time
import urllib.request
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

try:
    from torchft.checkpointing import HTTPTransport
    from torchft.manager import Manager
    from torchft.process_group import ProcessGroupGloo
except ImportError as error:
    raise ImportError("thinwire.elastic needs torchft: pip install thinwire[elastic]") from error

from thinwire._torch_compat import load_streamed
from thinwire.errors import PeerLost
from thinwire.transport.peers import Peers
from thinwire.transport.store_peers import StorePeers

_LOG = logging.getLogger(__name__)
ALONE = Peers(None, 0, 1)
_MOST_FAILURES = 20
"""So many exchanges may fail in a row: more than workers die at once."""
_SECONDS_BETWEEN_QUORUMS = 0.5


class Quorum:
    """The membership of one worker.

    Args:
        lighthouse: the address, such as "http://host:29510".
        name: of this worker. Workers are ordered by name.
        hostname: the name or address under which other workers reach this one.
        least: the smallest number of workers that may exchange.
        timeout: how long, in seconds, to wait for a worker that does not answer, and for a state.
        patience: how long, in seconds, to wait for the quorum.
        state: returns the state of this worker for one that is behind.
        take: is given the state of another worker, if this one is behind. What it raises, `meet` raises.

    Raises:
        ConnectionError: the Lighthouse cannot be reached.
    """

    def __init__(
        self,
        lighthouse: str,
        *,
        name: str,
        hostname: str,
        least: int,
        timeout: float,
        patience: float,
        state: Callable[[], dict[str, Any]],
        take: Callable[[dict[str, Any]], None],
    ) -> None:
        self._least, self._patience, self._lighthouse = least, patience, lighthouse
        limit = timedelta(seconds=timeout)
        self._store = dist.TCPStore(hostname, 0, is_master=True, wait_for_workers=False, timeout=limit)
        self._group = _Group(limit)
        self._transport = _Transport(limit, hostname)
        try:
            self._manager = Manager(
                pg=self._group,
                state_dict=state,
                load_state_dict=take,
                min_replica_size=least,
                # The quorum is complete, and this worker up to date, before inner steps begin.
                use_async_quorum=False,
                timeout=limit,
                quorum_timeout=timedelta(seconds=patience),
                connect_timeout=min(limit, timedelta(seconds=10)),
                rank=0,
                world_size=1,
                store_addr=hostname,
                store_port=self._store.port,
                lighthouse_addr=lighthouse,
                replica_id=name,
                hostname=hostname,
                checkpoint_transport=self._transport,
                max_retries=_MOST_FAILURES,
            )
        except (RuntimeError, TimeoutError) as error:
            self._transport.shutdown()
            self._transport.close()
            raise ConnectionError(
                f"lighthouse={lighthouse!r} cannot be reached: {error}. Start one, on a host that all workers reach, "
                "with `torchft_lighthouse --min_replicas 2`, and give its address, or set TORCHFT_LIGHTHOUSE"
            ) from error

    @property
    def members(self) -> Peers:
        """Those of the last quorum. The same object until new connections are needed."""
        return self._group.members

    @property
    def version(self) -> int:
        """Which state this worker has. Of two versions the larger is the one to continue from; 0 for a new worker."""
        return self._manager.current_step()

    @version.setter
    def version(self, version: int) -> None:
        # The Manager calls it a step.
        batches = self._manager.batches_committed()
        self._manager.load_state_dict({"step": version, "batches_committed": batches})

    def meet(self) -> None:
        """Wait until there is a quorum, and this worker has the state that the others have.

        Raises:
            PeerLost: there are too few workers for too long, or the Lighthouse does not answer.
        """
        deadline = time.monotonic() + self._patience
        stage = f"a quorum of at least {self._least} workers, from the Lighthouse {self._lighthouse}"
        while True:
            try:
                self._manager.start_quorum(timeout=timedelta(seconds=max(deadline - time.monotonic(), 1.0)))
            except (RuntimeError, TimeoutError) as error:
                raise PeerLost(stage, error) from error
            failed = self._manager.errored()
            if failed is None and self._manager.num_participants() >= self._least:
                return
            if time.monotonic() > deadline:
                found = f"there are {self._manager.num_participants()} for {self._patience:g} seconds"
                raise PeerLost(stage, found if failed is None else failed.original_exception)
            if failed is not None:
                _LOG.warning("%s: %s. Asking for another", stage, failed.original_exception)
                self._manager.should_commit()  # counts the failure, so that the next quorum makes new connections
            time.sleep(_SECONDS_BETWEEN_QUORUMS)

    def commit(self) -> None:
        """Take this worker's part in an exchange as complete. From now on its state may change.

        Raises:
            RuntimeError: it may not.
        """
        if not self._manager.should_commit():
            raise RuntimeError("torchft's Manager does not commit an exchange in which nothing failed")

    def fail(self, error: Exception) -> None:
        """Take this worker's part in an exchange as failed. The next quorum makes new connections.

        Raises:
            RuntimeError: too many exchanges have failed in a row.
        """
        self._manager.report_error(error)
        self._manager.should_commit()

    def close(self) -> None:
        """Leave. The others notice when they next wait for this worker."""
        self._manager.shutdown()
        self._transport.close()
        self._group.shutdown()


class _Group(ProcessGroupGloo):
    """A process group that torchft makes anew for each change of the members."""

    members: Peers = ALONE

    def _create_pg(self, store: dist.Store, rank: int, world_size: int) -> dist.ProcessGroup:
        group = super()._create_pg(store, rank, world_size)
        self.members = StorePeers(group, rank, world_size, store=store) if world_size > 1 else ALONE
        return group


class _Transport(HTTPTransport[Any]):
    """Serves the state of this worker, and fetches that of another, without executing what is in it."""

    def __init__(self, timeout: timedelta, hostname: str) -> None:
        self._hostname = hostname
        super().__init__(timeout, num_chunks=0)

    def address(self) -> str:
        """Where other workers find the state of this one. torchft takes the name of the machine."""
        port = self._server.socket.getsockname()[1]
        return f"http://{self._hostname}:{port}/checkpoint/"

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> Any:
        """Fetch a state. torchft lets pickle run whatever the other side sends; plain tensors and numbers do not."""
        with urllib.request.urlopen(f"{metadata}{step}/full", timeout=timeout.total_seconds()) as answer:
            return load_streamed(answer)

    def close(self) -> None:
        """Release the port."""
        self._server.server_close()
