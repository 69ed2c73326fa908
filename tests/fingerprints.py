"""Hashes of whole runs: all parameters after every step, and all bytes that ranks have sent.

    python -m tests.fingerprints > before.json      # then change the code without changing results
    python -m tests.fingerprints --compare before.json

Every optimizer of the conformance table runs through all of its stages, flat on three ranks and on two nodes of two,
by `step()` alone and attached to DDP, with float32 and with bfloat16 parameters, through a skipped step, parameters
without a gradient, and a state dict that is saved and loaded. Two versions of the code that give the same hashes train
to the same bits and send the same packets.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import importlib
import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire
from tests.conformance.test_conformance import OPTIMIZERS
from tests.distributed.common import run_nodes, token_loss, token_net

STEPS = 34
SKIPPED, WITHOUT, RELOADED = 7, 12, 20
"""The steps with an infinite gradient, with parameters that have none, and before which a state is loaded."""
GRIDS = {"flat": (3, 1), "2x2": (2, 2)}


class Sent:
    """The sum of the hashes of all messages, which does not depend on their order."""

    def __init__(self) -> None:
        self.total = 0
        self._lock = threading.Lock()  # lanes send at the same time

    def add(self, member: int, row: torch.Tensor) -> None:
        """Take in a message to a member."""
        data = member.to_bytes(4, "little") + row.contiguous().view(torch.uint8).numpy().tobytes()
        number = int.from_bytes(hashlib.blake2b(data, digest_size=16).digest(), "little")
        with self._lock:
            self.total += number


@contextmanager
def hashing_messages() -> Iterator[Sent]:
    """Take in everything that is sent inside, by all threads."""
    sent, kind = Sent(), dist.ProcessGroup
    # Not getattr(): what it returns for a method of C++ would be put back as a function that has no self.
    original = vars(kind)["send"]
    call = kind.send

    def send(group: Any, rows: list[torch.Tensor], member: int, tag: int) -> Any:
        sent.add(member, rows[0])
        return call(group, rows, member, tag)

    kind.send = send  # type: ignore[method-assign]
    try:
        yield sent
    finally:
        kind.send = original


def _train(rank: int, entry: Any, dtype: torch.dtype, *, attach: bool) -> tuple[str, int]:
    net = token_net(dtype)
    model: nn.Module = DDP(net) if attach else net
    optimizer = entry.make(model.parameters(), lr=entry.lr, bucket_mb=0.02)
    if isinstance(model, DDP):
        thinwire.attach(model, optimizer)
    digest = hashlib.blake2b(digest_size=16)
    with hashing_messages() as sent:
        for step in range(STEPS):
            if step == RELOADED:
                optimizer.synchronize()
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            token_loss(model, rank, step).backward()
            first = next(p for p in net.parameters() if p.grad is not None)
            if step == SKIPPED and rank == 0 and not attach:
                assert first.grad is not None
                first.grad.fill_(torch.inf)
            if step == WITHOUT and rank == 1 and not attach:
                first.grad = None
            optimizer.step()
            optimizer.zero_grad()
            for p in net.parameters():
                digest.update(p.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest(), sent.total


def _train_all(rank: int, world_size: int) -> dict[str, tuple[str, int]]:
    outcomes = {}
    for entry in OPTIMIZERS:
        for dtype in (torch.float32, torch.bfloat16):
            for attach in (False, True):
                name = f"{entry}, {str(dtype).removeprefix('torch.')}, {'attach' if attach else 'step'}"
                outcomes[name] = _train(rank, entry, dtype, attach=attach)
    return outcomes


def fingerprints() -> dict[str, dict[str, str]]:
    """By run, the hash of its parameters on all ranks, and that of its messages."""
    found = {}
    for grid, (nodes, ranks) in GRIDS.items():
        of_ranks = run_nodes(_train_all, nodes, ranks, timeout=900)
        for name in of_ranks[0]:
            hashes = [outcomes[name][0] for outcomes in of_ranks]
            parameters = hashlib.blake2b("".join(hashes).encode(), digest_size=16).hexdigest()
            messages = f"{sum(outcomes[name][1] for outcomes in of_ranks) % 2**128:032x}"
            found[f"{grid}: {name}"] = {"parameters": parameters, "messages": messages}
    return found


def main() -> None:
    """Print the hashes, or compare them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compare", type=Path, metavar="FILE", help="what another version has printed")
    arguments = parser.parse_args()
    found = fingerprints()
    if arguments.compare is None:
        print(json.dumps(found, indent=1))
        return
    before = json.loads(arguments.compare.read_text())
    different = [
        f"{name}: {kind}"
        for name in found
        for kind in found[name]
        if found[name][kind] != before.get(name, {}).get(kind)
    ]
    print(f"{len(found)} runs, {len(different)} hashes differ", *different, sep="\n")
    sys.exit(bool(different))


if __name__ == "__main__":
    # Ranks import the functions that they run from their module, and cannot import "__main__".
    importlib.import_module("tests.fingerprints").main()
