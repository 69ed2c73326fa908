"""What happens when a run goes on with other ranks, where it is not so simple: a worker that has not moved what others
have, a learning rate of zero; and where nothing should happen at all, in the same world."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from tests.conformance.test_conformance import Grid
from tests.distributed.reshard_cases import AFTERWARDS, APART, CASES, ENTRIES, SWITCHED, Case, backward, nodes_of, train
from tests.distributed.stages import VARIANCE, flat, noise, parameters
from tests.harness import run_ranks
from tests.resharding import adopt
from tests.saved_states import SavedStates
from thinwire.optimizers.reshard import SavedRun

pytestmark = pytest.mark.timeout(300)  # the first test of a change waits for two runs of all cases

# Some parameters have a gradient here and there ----------------------------------------------------------------------

SHAPES = ((70,), (13, 10), (40,), (90,))
EVERYWHERE, ON_RANK_1, NOWHERE, WITHOUT_RATE = range(4)
OLD, NEW = Grid(3), Grid(2)
LAST_SYNCHRONISATION = 18


def start() -> tuple[list[nn.Parameter], Any]:
    params = parameters(*SHAPES)
    groups = [{"params": params[:WITHOUT_RATE], "weight_decay": 0.1}, {"params": params[WITHOUT_RATE:]}]
    return params, thinwire.ZeroOneAdam(groups, lr=0.01, bucket_mb=0.0005, topology="flat", **VARIANCE)


def gradient(parameter: int, rank: int, step: int) -> torch.Tensor | None:
    """In the local steps all but the first and the last parameter have one on one rank or none; and that of rank 0 is
    no number, so that it stays where it is."""
    g = noise(SHAPES[parameter], rank, step, parameter)
    if step > LAST_SYNCHRONISATION:
        if parameter == NOWHERE or (parameter == ON_RANK_1 and rank != 1):
            return None
        if parameter == EVERYWHERE and rank == 0:
            g[3] = torch.nan
    return g


def save_apart(rank: int, world_size: int) -> tuple[dict[str, Any], list[torch.Tensor], list[torch.Tensor]]:
    """A state, its parameters, and these as they were when all were equal."""
    params, optimizer = start()
    agreed = []
    for step in range(1, APART + 1):
        if step == LAST_SYNCHRONISATION + 1:
            agreed = [p.detach().clone() for p in params]
            optimizer.param_groups[1]["lr"] = 0.0
        for i, p in enumerate(params):
            p.grad = gradient(i, rank, step)
        optimizer.step()
    return optimizer._state_of_this_rank(), [p.detach() for p in params], agreed


def as_tensors(value: Any) -> Any:
    """The harness gives arrays."""
    if isinstance(value, np.ndarray):
        return torch.as_tensor(value)
    if isinstance(value, dict):
        return {key: as_tensors(of) for key, of in value.items()}
    return [as_tensors(of) for of in value] if isinstance(value, list) else value


def take_apart(rank: int, world_size: int, saved: list[Any], how: Any) -> tuple[dict[str, Any], list[torch.Tensor]]:
    params, optimizer = start()
    with torch.no_grad():
        for p, value in zip(params, saved[(rank + 1) % OLD.nodes][1], strict=True):
            p.copy_(torch.as_tensor(value))
    adopt(optimizer, SavedRun(nodes_of(OLD), 0.0005, lambda r: as_tensors(saved[r][0])), how)
    return optimizer._state_of_this_rank(), [p.detach() for p in params]


@pytest.mark.parametrize("how", ["average", "reset"])
def test_those_who_have_not_moved_are_joined_too(how: str) -> None:
    saved = run_ranks(save_apart, OLD.nodes)
    taken = run_ranks(take_apart, NEW.nodes, saved, how)
    before = SavedStates([as_tensors(state) for state, *_ in saved], SHAPES, nodes_of(OLD), 0.0005)
    after = SavedStates([as_tensors(state) for state, *_ in taken], SHAPES, nodes_of(NEW), 0.0005)
    agreed, x = saved[0][2], taken[0][1]
    np.testing.assert_array_equal(saved[0][1][EVERYWHERE], agreed[EVERYWHERE])  # rank 0 has not moved
    assert (saved[1][1][EVERYWHERE] != agreed[EVERYWHERE]).all()
    assert (saved[1][1][ON_RANK_1] != agreed[ON_RANK_1]).all()

    def split(values: np.ndarray) -> list[np.ndarray]:
        ends = np.cumsum([np.prod(shape, dtype=int) for shape in SHAPES])[:-1]
        return [part.reshape(shape) for part, shape in zip(np.split(values, ends), SHAPES, strict=True)]

    u = split(before.worker_errors().mean(axis=0) + before.owner_errors())
    left = split(after.worker_errors().mean(axis=0) + after.owner_errors())
    p, m, m_before = split(before.shared("v")), split(after.shared("m")), split(before.of_workers("m").mean(axis=0))
    rates, lost = before.shared("interval")[[2, 4]]
    for i in range(len(SHAPES)):
        for _, replica in taken:
            np.testing.assert_array_equal(replica[i], x[i])
        moves = i in (EVERYWHERE, ON_RANK_1) and how == "average"
        expected = (1 - lost) * agreed[i].astype(float) - u[i] * p[i] if moves else agreed[i]
        np.testing.assert_allclose(x[i], expected, rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(m[i], u[i] / rates if moves else m_before[i], rtol=1e-6, atol=1e-8)
        stays = how == "average" and not moves
        np.testing.assert_allclose(left[i], u[i] if stays else 0 * u[i], rtol=1e-5, atol=1e-8)
    assert not after.shared("touched").any()


# The same world ------------------------------------------------------------------------------------------------------


def continue_both_ways(rank: int, world_size: int, grid: Grid, case: Case) -> dict[str, list[Any]]:
    """All values after each step, after an ordinary load and after an adoption by average of equal states on all ranks,
    and the variance that 1-bit LAMB follows."""
    net, optimizer = case.start(grid)
    for step in range(SWITCHED):
        train(net, optimizer, 0, step)
    weights = {name: value.clone() for name, value in net.state_dict().items()}
    states: list[Any] = [None] * world_size
    dist.all_gather_object(states, optimizer._state_of_this_rank())

    loaded, optimizer = case.start(grid)
    loaded.load_state_dict(weights)
    optimizer.load_state_dict(states[rank])
    seen: dict[str, list[Any]] = {"loaded": [flat(loaded.parameters())], "adopted": [], "w": []}
    for step in range(SWITCHED, SWITCHED + AFTERWARDS):
        train(loaded, optimizer, 0, step)
        seen["loaded"].append(flat(loaded.parameters()))

    # The other one has been somewhere else, and is in the middle of a step there.
    net, optimizer = case.start(grid)
    model = DistributedDataParallel(net)
    thinwire.attach(model, optimizer)
    for step in range(3):
        train(model, optimizer, 0, step)
    backward(model, 0, 3)
    optimizer.zero_grad()
    net.load_state_dict(weights)
    adopt(optimizer, SavedRun(nodes_of(grid), optimizer._bucket_mb, lambda r: states[r]), "average")
    seen["adopted"].append(flat(net.parameters()))
    for step in range(SWITCHED, SWITCHED + AFTERWARDS):
        seen["w"].append(flat(optimizer.state[p].get("w", torch.zeros(())) for p in net.parameters()))
        train(model, optimizer, 0, step)
        seen["adopted"].append(flat(net.parameters()))
    return seen


@pytest.mark.parametrize("case", [case for case in CASES if "error_dtype" not in case.options], ids=str)
@pytest.mark.parametrize("grid", [Grid(2), pytest.param(Grid(2, 2), marks=pytest.mark.long)], ids=str)
def test_equal_states_in_the_same_world_go_on_as_they_were(grid: Grid, case: Case) -> None:
    """To the bit, but for roundings in which a mean and its parts differ, and for a variance that stands still once."""
    for seen in grid.run(continue_both_ways, grid, case):
        loaded, adopted = np.stack(seen["loaded"]), np.stack(seen["adopted"])
        moved = np.abs(loaded[1] - loaded[0]).max()
        assert moved > 0.5 * case.lr
        if case.entry.optimizer is thinwire.OneBitLamb:
            # Factors of layers have changed by another tenth at most.
            np.testing.assert_allclose(adopted[:2], loaded[:2], atol=0.22 * moved)
            first, second, third = seen["w"][:3]
            np.testing.assert_array_equal(first, second)  # the momentum before the last one is not known
            assert (second != third).any()
        elif case.entry is ENTRIES["CDAdam-topk"]:
            np.testing.assert_allclose(adopted, loaded, atol=1e-3 * moved)
        else:
            np.testing.assert_array_equal(adopted, loaded)
