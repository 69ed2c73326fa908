"""In which order a device is given its work, and that the host waits for none of it: told by streams that write down
what they are asked for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import thinwire
from tests.distributed.common import token_loss, token_net
from tests.distributed.stages import PAPER
from tests.harness import run_ranks
from thinwire.kernels import ops
from thinwire.transport import stream_transport
from thinwire.transport.collectives import Collectives

CURRENT, ASIDE = "current", "aside"


class Log:
    """What happened, and on which stream. The host may read tensors inside kernels, which run on it here, and its
    own."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str]] = []
        self.stream = CURRENT
        self.step = 0
        self.in_kernel = False
        self.shared: set[int] = set()
        self.forked_after: list[int] = []

    def note(self, what: str) -> None:
        self.events.append((self.stream, what))


class WritingStreams:
    """As `thinwire.transport.streams.Streams`."""

    def __init__(self, log: Log) -> None:
        self._log = log

    @contextmanager
    def aside(self) -> Iterator[None]:
        self._log.note("fork")
        self._log.stream = ASIDE
        try:
            yield
        finally:
            self._log.stream = CURRENT

    def join(self) -> None:
        self._log.note("join")

    def record_event(self) -> WritingEvent:
        return WritingEvent(self._log)

    def share(self, tensor: Tensor) -> None:
        self._log.shared.add(tensor.data_ptr())


class WritingEvent:
    def __init__(self, log: Log) -> None:
        self._log = log
        self._step = log.step

    def query(self) -> bool:
        self._log.note(f"wait for step {self._step}")
        return True


class NoHostReads(TorchDispatchMode):
    """Fails where a tensor's value is read, as `.item()`, `bool()` and `.tolist()` do, and what takes as long."""

    _READS = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select")

    def __init__(self, log: Log, of_host: set[int]) -> None:
        super().__init__()
        self._log = log
        self._of_host = of_host

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.partition(".")[0]
        if name in self._READS and not self._log.in_kernel and args[0].data_ptr() not in self._of_host:
            raise AssertionError(f"{func} on {args[0].shape}: on a GPU the host would wait")
        return func(*args, **(kwargs or {}))


def writing(kernels: ops.Kernels, log: Log) -> ops.Kernels:
    def wrapped(name: str, operation: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            log.note("or" if name == "vote_bit" and args[2] is None else name)
            log.in_kernel = True
            try:
                return operation(*args, **kwargs)
            finally:
                log.in_kernel = False

        return noted

    return dataclasses.replace(kernels, **{name: wrapped(name, getattr(kernels, name)) for name in ops.OPERATIONS})


def three_steps(
    rank: int, world_size: int, optimizer: Callable[..., Any], options: dict[str, Any], steps: int
) -> tuple[list[list[tuple[str, str]]], int]:
    """What happened in each step, and how many buckets there are."""
    log = Log()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream_transport, "streams_of", lambda _: WritingStreams(log))
        on_device = ops.Kernels.on_device
        patch.setattr(ops.Kernels, "on_device", lambda self, *args: writing(on_device(self, *args), log))
        for name in ("scatter", "gather"):
            collective = getattr(Collectives, name)

            def noted(*args: Any, name: str = name, collective: Callable[..., None] = collective) -> None:
                log.note(name)
                collective(*args)

            patch.setattr(Collectives, name, noted)
        net = token_net()
        ddp = DistributedDataParallel(net)
        opt = optimizer(net.parameters(), bucket_mb=0.02, check_replicas_every=0, **options)
        thinwire.attach(ddp, opt)
        # The host's own: how many steps there have been, and of a report that has come what it says.
        of_host = {opt._step_count.data_ptr(), *(slot.data_ptr() for slot in opt._session.side.report._slots)}
        of_host |= {kept.data_ptr() for kept in (*opt._flat_state.layers.values(), *opt._flat_state.common.values())}
        events = []
        for step in range(1, steps + 1):
            log.step, log.events = step, []
            if step < steps - 1:
                token_loss(ddp, rank, step).backward()
                opt.step()
            else:
                loss = token_loss(ddp, rank, step)
                with NoHostReads(log, of_host):
                    loss.backward()
                    opt.step()
            opt.zero_grad()
            events.append(log.events)
        buffers = opt._session.channel.buffers
        assert {buffers.sent.data_ptr(), buffers.answers.data_ptr()} <= log.shared
    return events, len(opt._session.layout.buckets)


CASES = {
    "Birder": (thinwire.Birder, {}, "birder_encode", ["activity_refresh"], ["vote_bit", "or"], "birder_apply"),
    "OneBitAdam": (
        thinwire.OneBitAdam,
        {"betas": (0.5, 0.5), "warmup_steps": 2, **PAPER},
        "sign_encode",
        ["shard_scale"] * 2,
        ["sign_merge", "shard_scale"],
        "sign_apply",
    ),
    # torch computes the scales of blocks.
    "OneBitAdam, blocks": (
        thinwire.OneBitAdam,
        {"betas": (0.5, 0.5), "warmup_steps": 2},
        "sign_encode",
        [],
        ["sign_merge"],
        "sign_apply",
    ),
    "CDAdam": (
        thinwire.CDAdam,
        {},
        "markov_encode",
        ["shard_scale"] * 2,
        ["or", "clear_words", "markov_merge", "shard_scale"],
        "amsgrad_apply",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_order_of_work_and_that_nobody_waits(case: str) -> None:
    optimizer, options, encode, seal, merge, apply = CASES[case]
    steps = 6
    for events, buckets in run_ranks(three_steps, 2, optimizer, options, steps):
        assert buckets > 1
        for step, of_step in enumerate(events[-2:], start=steps - 1):
            # Of the step before, which is done as long as this one's gradients are; of no other.
            waits = [what for _, what in of_step if what.startswith("wait")]
            assert waits == [f"wait for step {step - 1}"]
            aside = [what for stream, what in of_step if stream == ASIDE]
            round_trip = [
                "packet_seal",
                "scatter",
                "packet_check",
                *merge,
                "or",
                "packet_seal",
                "gather",
                "packet_check",
            ]
            commit_round = ["packet_seal", "gather", "packet_check"]
            assert aside == [*seal, *round_trip] * buckets + commit_round
            current = [what for stream, what in of_step if stream == CURRENT and not what.startswith("wait")]
            encodes = [what for what in current[: current.index("join")] if what != "fork"]
            assert set(encodes) == {encode}
            assert current[: current.index("join")].count("fork") == buckets + 1, "one more for the commit round"
            assert current[0] == encode
            assert current[current.index("join") - 1] == "fork", "buckets are under way before anything is waited for"
            assert apply in current[current.index("join") :]
            assert apply not in encodes
