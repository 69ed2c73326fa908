"""A session averages tensors with a compressor and without any optimizer: flat, in nodes, over several exchanges."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.distributed.common import run_nodes
from thinwire.compressors.dense import Dense
from thinwire.kernels.modes import Scale
from thinwire.transport import packet
from thinwire.transport.buffers import Part
from thinwire.transport.peers import Peers
from thinwire.transport.session import Session
from thinwire.transport.topology import choose

NUMELS = (700, 1, 0, 130)
STEPS = 3


class DenseEncoder:
    """Writes gradients as they are."""

    def __init__(self, dense: Dense) -> None:
        self._dense = dense
        self.exchanges = 0

    def before_exchange(self) -> None:
        self.exchanges += 1

    def encode(self, position: int, part: Part, grad: Tensor | None, scale: Scale) -> bool | None:
        return self._dense.encode(part, grad, scale)

    def for_lanes(self) -> DenseEncoder:
        return self


def gradients_of(rank: int, step: int) -> list[Tensor | None]:
    """Small integers, whose means over 1, 2 and 4 ranks are exact. Tensor 1 is absent everywhere at step 2."""
    draw = torch.Generator().manual_seed(100 * step + rank)
    gradients: list[Tensor | None] = [torch.randint(-64, 64, (n,), generator=draw).float() for n in NUMELS]
    if step == 2:
        gradients[1] = None
    return gradients


def averages(rank: int, world_size: int) -> list[tuple[list[int], list[np.ndarray], int]]:
    """Per step the tensors that are present, the means, and the flags; step 3 has an infinite gradient on rank 0."""
    peers = Peers.of(None)
    session = Session(NUMELS, torch.device("cpu"), peers, choose("auto", None, peers), bucket_mb=0.0005)
    dense = Dense(session.kernels)
    session.open_channels({"dense": dense})
    session.connect("test_session")
    encoder = DenseEncoder(dense)
    found = []
    for step in range(1, STEPS + 1):
        session.begin_step(step, "dense")
        gradients = gradients_of(rank, step)
        if step == STEPS and rank == 0:
            gradients[0] = torch.full((NUMELS[0],), torch.inf)
        # Positions are those of the flat space, which has the last tensor first. Ranks may encode in any order.
        order = sorted(range(len(NUMELS)), key=lambda position: (position * (rank + 2)) % 5)
        for position in order:
            session.encode(position, gradients[session.layout.slots[position].index], 1.0, encoder)
        flags = session.wait()
        means = [np.zeros(n, dtype=np.float32) for n in NUMELS]
        answers = session.channel.buffers.answers
        for position, parts in enumerate(session.channel.buffers.parts):
            for part in parts:
                for _, start, count, byte, *_ in part.down_runs.tolist():
                    values = answers[byte : byte + 4 * count].view(torch.float32)
                    means[session.layout.slots[position].index][start : start + count] = values.numpy()
        present = sorted(session.layout.slots[position].index for position in session.present())
        found.append((present, means, flags))
    assert encoder.exchanges == STEPS
    session.disconnect()
    assert not session.connected
    return found


@pytest.mark.parametrize(("nodes", "ranks"), [(1, 1), (2, 1), (4, 1), (2, 2)], ids=["1", "2", "4", "2x2"])
def test_session_averages_without_an_optimizer(nodes: int, ranks: int) -> None:
    world_size = nodes * ranks
    of_ranks = run_nodes(averages, nodes, ranks)
    for rank, found in enumerate(of_ranks):
        for step, (present, means, flags) in enumerate(found, start=1):
            where = f"rank {rank}, step {step}"
            assert present == ([0, 3] if step == 2 else [0, 1, 3]), where
            assert bool(flags & packet.NONFINITE) == (step == STEPS), where
            if step == STEPS:
                continue
            gradients = [gradients_of(other, step) for other in range(world_size)]
            for index in present:
                wanted = np.mean([np.asarray(of_rank[index]) for of_rank in gradients], axis=0)
                np.testing.assert_array_equal(means[index], wanted, err_msg=f"{where}, tensor {index}")
