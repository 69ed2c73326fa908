"""`scale_block`: what it sends, what it refuses, and that a state belongs to its blocks."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch

from tests.distributed.stages import FREEZE, make, noise, parameters
from tests.harness import run_ranks

NAMES = ("OneBitAdam", "OneBitLamb", "ZeroOneAdam")
SIZE = (400, 500)
SHARD = 100_032
"""Half of them, in whole words."""
BLOCKS = (None, 64, 4096)


def send(rank: int, world_size: int) -> dict[tuple[str, int | None], tuple[int, tuple[int, ...], str]]:
    """For each optimizer and block: the bytes of the first step after the freeze, the shape of the scales, and how
    another optimizer refuses the state."""
    found = {}
    for name, block in itertools.product(NAMES, BLOCKS):
        (p,) = params = parameters(SIZE)
        optimizer = make(name, params, scale_block=block)
        before = 0
        for step in range(1, FREEZE + 2):
            p.grad = noise(SIZE, rank, step)
            before = optimizer.metrics().bytes_sent
            optimizer.step()
        sent = optimizer.metrics().bytes_sent - before
        other = make(name, parameters(SIZE), scale_block=2 * block if block else 64)
        with pytest.raises(ValueError, match="the state dict is of bucket_mb=") as refusal:
            other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        found[name, block] = sent, tuple(optimizer.state[p]["sent_scale"].shape), str(refusal.value)
    return found


def test_it_sends_a_scale_per_block_and_a_state_belongs_to_its_blocks() -> None:
    for found in run_ranks(send, 2):
        for (name, block), (sent, shape, refusal) in found.items():
            blocks = -(-SHARD // block) if block else 1
            assert shape == ((2, blocks) if block else (2,))
            # One packet up and one answer down, with two scales in a word. Without blocks there is a word for one.
            assert sent - found[name, None][0] == 2 * 8 * (-(-blocks // 2) - 1)
            assert f"scale_block={block or 64}" in refusal
            assert "so resume with the bucket_mb that was saved, and its scale_block" in refusal


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("block", [0, 1, 63, 96, -64, 64.0, True, "64"])
def test_other_blocks_are_refused(name: str, block: Any) -> None:
    with pytest.raises(ValueError, match=r"scale_block=.*: expected a positive multiple of 64, or None"):
        make(name, parameters((5,)), scale_block=block)


def disagree(rank: int, world_size: int) -> str:
    (p,) = parameters((70,))
    optimizer = make("ZeroOneAdam", [p], scale_block=(None, 64)[rank])
    p.grad = torch.ones(70)
    with pytest.raises(RuntimeError) as refusal:
        optimizer.step()
    return str(refusal.value)


def test_ranks_must_agree_on_the_block() -> None:
    for refusal in run_ranks(disagree, 2):
        assert "ranks disagree on scale_block: missing on rank 0; 64 on rank 1" in refusal
