"""States cut anew for any shapes, topologies and buckets, in one process: twins need nobody to talk to."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import thinwire
from tests.distributed.common import digest
from tests.resharding import adopt
from tests.saved_states import SavedStates
from thinwire.optimizers.optimizer import WireOptimizer
from thinwire.optimizers.reshard import Policy, SavedRun, copy_for, read
from thinwire.transport.peers import Peers

Shapes = Sequence[tuple[int, ...]]
Nodes = tuple[tuple[int, ...], ...]


def nodes_of(nodes: int, ranks: int) -> Nodes:
    return tuple(tuple(range(node * ranks, (node + 1) * ranks)) for node in range(nodes))


def ranks_of(optimizer: WireOptimizer, nodes: Nodes, bucket_mb: float) -> list[WireOptimizer]:
    """The optimizer as all ranks of a run would have it."""
    run = SavedRun(nodes, bucket_mb, lambda _: {})
    return [copy_for(optimizer, Peers(None, r, run.size), run.topology_of(r), bucket_mb) for r in range(run.size)]


def fill(ranks: Sequence[WireOptimizer], step: int = 3) -> None:
    """With random numbers: of their own where ranks may differ, the same on all elsewhere."""
    private = torch.Generator().manual_seed(1)
    for rank in ranks:
        rank._step_count.fill_(step)
        shared = torch.Generator().manual_seed(2)
        for p in rank._flat_params:
            for name, value in sorted(rank.state[p].items()):
                kept = rank._flat_state
                generator = private if name in {**kept.own, **kept.owned, **kept.own_words, **kept.shards} else shared
                if name in kept.checks:
                    value.copy_(torch.randint(0, step + 1, value.shape, generator=generator))
                elif value.dtype == torch.int64 and name != "step":
                    value.copy_(torch.randint(-(2**63), 2**63 - 1, value.shape, generator=generator))
                elif name != "step":
                    value.copy_(torch.randn(value.shape, generator=generator))


def run_of(ranks: Sequence[WireOptimizer]) -> SavedRun:
    first = ranks[0]
    return SavedRun(first._topology.nodes, first._bucket_mb, lambda rank: ranks[rank]._state_of_this_rank())


def together(ranks: Sequence[WireOptimizer], shapes: Shapes) -> SavedStates:
    bucket_mb = ranks[0]._bucket_mb
    assert bucket_mb is not None
    return SavedStates([rank._state_of_this_rank() for rank in ranks], shapes, ranks[0]._topology.nodes, bucket_mb)


def parameters(shapes: Shapes) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(shape)) for shape in shapes]


def cast_to_wire(optimizer: torch.optim.Optimizer) -> WireOptimizer:
    return cast("WireOptimizer", optimizer)


# Any cut -------------------------------------------------------------------------------------------------------------

SHAPES = st.lists(st.sampled_from([(), (0,), (1,), (64,), (65,), (7, 30), (500,), (3, 5, 40)]), min_size=1, max_size=5)
GRIDS = st.sampled_from([(1, 1), (2, 1), (3, 1), (5, 1), (2, 2), (3, 2), (2, 3)])
BUCKETS = st.sampled_from([1e-6, 0.0004, 0.001, 1.0])


@settings(deadline=None, max_examples=30)
@given(SHAPES, GRIDS, GRIDS, BUCKETS, BUCKETS)
def test_averages_are_the_means_of_all_workers(
    shapes: Shapes, old: tuple[int, int], new: tuple[int, int], old_mb: float, new_mb: float
) -> None:
    optimizer = cast_to_wire(thinwire.Birder(parameters(shapes)))
    before, after = ranks_of(optimizer, nodes_of(*old), old_mb), ranks_of(optimizer, nodes_of(*new), new_mb)
    fill(before)
    for rank in before:
        for state in rank.state.values():
            state["b"].copy_(state["m"].abs() * (1 + state["b"].abs()))
    for rank in after:
        adopt(rank, run_of(before), "average")
    ours, theirs = together(after, shapes), together(before, shapes)
    for name in ("m", "b"):
        mean = theirs.of_workers(name).mean(axis=0)
        for worker in ours.of_workers(name):
            np.testing.assert_allclose(worker, mean, rtol=1e-6, atol=1e-7)
    assert (np.abs(ours.of_workers("m")) <= ours.of_workers("b")).all()
    np.testing.assert_array_equal(ours.bits("alive"), theirs.bits("alive"))
    assert (ours.shared("step") == 3).all()


@settings(deadline=None, max_examples=30)
@given(SHAPES, GRIDS, GRIDS, BUCKETS, BUCKETS)
def test_what_owners_have_is_put_together_and_cut_anew(
    shapes: Shapes, old: tuple[int, int], new: tuple[int, int], old_mb: float, new_mb: float
) -> None:
    optimizer = cast_to_wire(thinwire.CDAdam(parameters(shapes)))
    before, after = ranks_of(optimizer, nodes_of(*old), old_mb), ranks_of(optimizer, nodes_of(*new), new_mb)
    fill(before)
    for rank in after:
        adopt(rank, run_of(before), "average")
    ours, theirs = together(after, shapes), together(before, shapes)
    mean = theirs.of_owners("mean")
    np.testing.assert_array_equal(ours.of_owners("mean"), mean)
    for worker in ours.of_workers("known"):
        np.testing.assert_array_equal(worker, mean)
    for name in ("m", "v", "peak", "followed", "updates", "alive", "spoke"):
        np.testing.assert_array_equal(ours.shared(name), theirs.shared(name), err_msg=name)


def test_rounding_keeps_averages_within_their_bound() -> None:
    """In bfloat16, with averages that are equal, and of which the mean must be rounded."""
    optimizer = cast_to_wire(thinwire.Birder(parameters([(4096,)]), state_dtype=torch.bfloat16))
    before = ranks_of(optimizer, nodes_of(3, 1), 1.0)
    fill(before)
    for rank in before:
        for state in rank.state.values():
            state["b"].copy_(state["m"].abs())
    adopt(optimizer, run_of(before), "average")
    (state,) = optimizer.state.values()
    assert (state["m"].abs() <= state["b"]).all()
    assert (state["m"].abs() == state["b"]).any()


# Whoever takes over --------------------------------------------------------------------------------------------------


@pytest.fixture
def optimizer() -> WireOptimizer:
    return cast_to_wire(thinwire.Birder(parameters([(100,), (3, 4)]), lr=0.5))


def test_hyper_parameters_are_those_that_were_saved(optimizer: WireOptimizer) -> None:
    before = ranks_of(optimizer, nodes_of(2, 1), 1.0)
    for rank in before:
        rank.param_groups[0].update(lr=0.25, initial_lr=2.0)
    adopt(optimizer, run_of(before), "average")
    (group,) = optimizer.param_groups
    assert (group["lr"], group["initial_lr"]) == (0.25, 2.0)
    assert group["wire_world_size"] == 1
    assert all(isinstance(p, nn.Parameter) for p in group["params"])


def test_taking_over_twice_adds_nothing_to_groups(optimizer: WireOptimizer) -> None:
    """torch adds to the defaults of an optimizer that has loaded something."""
    before = ranks_of(optimizer, nodes_of(2, 1), 1.0)
    names = []
    for _ in range(3):
        adopt(optimizer, run_of(before), "average")
        names.append(sorted(optimizer.param_groups[0]))
    assert names == [names[0]] * 3


def test_reading_changes_nothing(optimizer: WireOptimizer) -> None:
    optimizer._skips.note(1, skipped=True)
    before = ranks_of(optimizer, nodes_of(2, 1), 1.0)
    fill(before)
    digests = [digest(value for state in optimizer.state.values() for value in state.values())]
    defaults, skips = dict(optimizer.defaults), dict(vars(optimizer._skips))
    read(optimizer, run_of(before), "average")
    digests.append(digest(value for state in optimizer.state.values() for value in state.values()))
    assert digests[0] == digests[1]
    assert (optimizer.defaults, vars(optimizer._skips)) == (defaults, skips)


def test_names_of_parameters_stay() -> None:
    names = ("first", "second")
    named = list(zip(names, parameters([(5,), (6,)]), strict=True))
    optimizer = cast_to_wire(thinwire.Birder(named))
    adopt(optimizer, run_of(ranks_of(optimizer, nodes_of(2, 1), 1.0)), "average")
    assert optimizer.param_groups[0]["param_names"] == list(names)


def test_a_parameter_that_has_been_frozen_since_takes_part(optimizer: WireOptimizer) -> None:
    optimizer.param_groups[0]["params"][0].requires_grad_(False)
    before = ranks_of(optimizer, nodes_of(2, 1), 1.0)
    fill(before)
    adopt(optimizer, run_of(before), "average")
    p = optimizer.param_groups[0]["params"][0]
    means = [rank.state[rank.param_groups[0]["params"][0]]["m"] for rank in before]
    torch.testing.assert_close(optimizer.state[p]["m"], (means[0] + means[1]) / 2)
    assert not p.requires_grad


def test_memory_formats_are_kept() -> None:
    p = nn.Parameter(torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last))
    optimizer = cast_to_wire(thinwire.Birder([p]))
    before = ranks_of(optimizer, nodes_of(2, 1), 1.0)
    fill(before)
    adopt(optimizer, run_of(before), "average")
    means = [rank.state[rank.param_groups[0]["params"][0]]["m"] for rank in before]
    torch.testing.assert_close(optimizer.state[p]["m"], (means[0] + means[1]) / 2)


def test_hooks_hear_of_it_once(optimizer: WireOptimizer) -> None:
    heard: list[Any] = []
    optimizer.register_load_state_dict_post_hook(heard.append)
    optimizer.register_state_dict_post_hook(lambda of, _: heard.append(of))
    adopt(optimizer, run_of(ranks_of(optimizer, nodes_of(3, 1), 1.0)), "average")
    assert [id(one) for one in heard] == [id(optimizer)]


OPTIMIZERS = [
    (thinwire.Birder, {}),
    (thinwire.OneBitAdam, {}),
    (thinwire.ZeroOneAdam, {}),
    (thinwire.Lamb, {}),
    (thinwire.OneBitLamb, {}),
    (thinwire.CDAdam, {}),
    (thinwire.CDAdam, {"codec": "topk"}),
    (thinwire.SketchedAMSGrad, {}),
]


@pytest.mark.parametrize(("optimizer_class", "options"), OPTIMIZERS)
@pytest.mark.parametrize("nodes", [(2, 1), (2, 2), (1, 2)], ids=str)
def test_the_memory_of_a_twin_goes_with_it(
    nodes: tuple[int, int], optimizer_class: type[torch.optim.Optimizer], options: dict[str, Any]
) -> None:
    """States are read one after the other, and a model may be so large that two do not fit."""
    optimizer = cast_to_wire(optimizer_class(parameters([(100,)]), **options))
    twin = ranks_of(optimizer, nodes_of(*nodes), 1.0)[0]
    kept = [twin._flat_state.own, twin._flat_state.whole, twin._flat_state.owned, twin._flat_state.words]
    memory = [weakref.ref(tensor) for tensors in kept for tensor in tensors.values()]
    memory += [weakref.ref(channel.buffers) for channel in twin._session.channels.values()]
    gc.disable()
    try:
        del twin, kept
        assert not any(remains() for remains in memory)
    finally:
        gc.enable()


# What is refused, and leaves everything as it was --------------------------------------------------------------------


def another_step(before: Sequence[WireOptimizer]) -> None:
    before[1]._step_count.fill_(4)


def another_class(before: Sequence[WireOptimizer]) -> None:
    for group in before[1].param_groups:
        group["wire_class"] = "Adam"


def another_world(before: Sequence[WireOptimizer]) -> None:
    for group in before[1].param_groups:
        group["wire_world_size"] = 3


DAMAGES: dict[str, tuple[Callable[[Sequence[WireOptimizer]], None], str]] = {
    "step": (another_step, r"rank 1 was saved at .*steps taken': 4.*, rank 0 at .*steps taken': 3"),
    "class": (another_class, "the state dict is of Adam, this is Birder"),
    "world": (another_world, "the state dict is of 3 ranks, this run has 2"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_states_that_do_not_belong_together_are_refused(optimizer: WireOptimizer, damage: str) -> None:
    before = ranks_of(optimizer, nodes_of(2, 1), 1.0)
    fill(before)
    do, message = DAMAGES[damage]
    do(before)
    state = [value for of in optimizer.state.values() for value in of.values()]
    params = optimizer.param_groups[0]["params"]
    untouched = digest([*state, *params])
    with pytest.raises(ValueError, match=message):
        adopt(optimizer, run_of(before), "average")
    assert digest([*state, *params]) == untouched


def test_another_policy_is_refused(optimizer: WireOptimizer) -> None:
    with pytest.raises(ValueError, match=r"how='error': expected 'average' or 'reset'"):
        adopt(optimizer, run_of(ranks_of(optimizer, nodes_of(2, 1), 1.0)), cast("Policy", "error"))


@pytest.mark.parametrize("nodes", [(), ((),), ((0,), (2,)), ((0, 1), (1, 2)), ((0, 1), (2,)), ((1,), (2,))], ids=str)
def test_nodes_that_no_run_has_are_refused(nodes: Nodes) -> None:
    with pytest.raises(ValueError, match="expected every rank once, and the same number of ranks on every node"):
        SavedRun(nodes, None, lambda _: {})


def test_other_settings_are_a_warning(optimizer: WireOptimizer) -> None:
    before = ranks_of(cast_to_wire(thinwire.Birder(parameters([(100,), (3, 4)]), seed=5)), nodes_of(2, 1), 1.0)
    with pytest.warns(RuntimeWarning, match=r"saved with seed=5, .* this optimizer has seed=0"):
        adopt(optimizer, run_of(before), "average")
