"""The dense stage is AdamW's, or LAMB's, on the concatenated batch; where it ends, and what the switch leaves alone."""

from __future__ import annotations

import copy
import gc
import logging
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from tests.distributed.common import digest, run_nodes
from tests.distributed.stages import FREEZE, STAGES, flat, make, noise, parameters
from tests.harness import run_ranks
from tests.oracles.flat_space import Group
from tests.oracles.onebit_adam import OneBitAdamOracle
from thinwire.optimizers.joint_calls import JointCalls

SWITCHING = ("OneBitAdam", "OneBitLamb")
INT4 = {"warmup_bits": 4}


def small_net(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 5)).to(dtype)


def batch(rank: int, step: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    return noise((16, 20), rank, step).to(dtype), noise((16, 5), rank, step, 1).to(dtype)


def loss_of(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(model(inputs), targets)


# Against torch's AdamW -----------------------------------------------------------------------------------------------

ADAMW: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.9), "eps": 1e-8, "weight_decay": 0.5}
DENSE_STEPS = {"OneBitAdam": FREEZE, "ZeroOneAdam": 4}
"""From the first on."""


def train(rank: int, world_size: int, name: str, attach: bool) -> list[torch.Tensor]:
    net = small_net()
    optimizer = make(name, net.parameters(), **ADAMW)
    model: nn.Module = net
    if attach:
        model = DistributedDataParallel(net)
        thinwire.attach(model, optimizer)
    values = []
    for step in range(1, DENSE_STEPS[name] + 1):
        loss_of(model, *batch(rank, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        values.append(flat(net.parameters()))
    return values


def adamw_on_the_concatenated_batch(world_size: int, steps: int) -> list[np.ndarray]:
    net = small_net(torch.float64)
    optimizer = torch.optim.AdamW(net.parameters(), **ADAMW)
    values = []
    for step in range(1, steps + 1):
        shares = [batch(rank, step, torch.float64) for rank in range(world_size)]
        loss_of(net, *map(torch.cat, zip(*shares, strict=True))).backward()
        optimizer.step()
        optimizer.zero_grad()
        values.append(flat(net.parameters()).numpy())
    return values


@pytest.mark.parametrize("attach", [False, True], ids=["", "attach"])
@pytest.mark.parametrize("name", DENSE_STEPS)
def test_dense_steps_are_adamw_on_the_concatenated_batch(name: str, attach: bool) -> None:
    expected = adamw_on_the_concatenated_batch(3, DENSE_STEPS[name])
    for values in run_ranks(train, 3, name, attach):
        for ours, theirs in zip(values, expected, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)  # a thousandth of a step


def train_low(rank: int, world_size: int, name: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """bfloat16 parameters and gradients: they and their masters after every step."""
    params = [nn.Parameter(p.detach().to(torch.bfloat16)) for p in parameters((13, 11), (70,))]
    optimizer = make(name, params, **ADAMW)
    seen = []
    for step in range(1, DENSE_STEPS[name] + 1):
        for i, p in enumerate(params):
            p.grad = noise(tuple(p.shape), rank, step, i).to(torch.bfloat16)
        optimizer.step()
        seen.append((flat(params), flat(optimizer.state[p]["master"] for p in params)))
    return seen


@pytest.mark.parametrize("name", DENSE_STEPS)
def test_dense_steps_of_bfloat16_are_adamw_on_fp32_masters(name: str) -> None:
    masters = [nn.Parameter(p.detach().to(torch.bfloat16).double()) for p in parameters((13, 11), (70,))]
    adamw = torch.optim.AdamW(masters, **ADAMW)
    results = run_ranks(train_low, 3, name)
    for step in range(1, DENSE_STEPS[name] + 1):
        for i, p in enumerate(masters):
            shares = [noise(tuple(p.shape), rank, step, i).to(torch.bfloat16).double() for rank in range(3)]
            p.grad = torch.stack(shares).mean(0)
        adamw.step()
        for seen in results:
            low, master = seen[step - 1]
            np.testing.assert_allclose(master, flat(masters).numpy(), rtol=0, atol=1e-5)
            np.testing.assert_array_equal(low, torch.tensor(master).to(torch.bfloat16).float().numpy())


# Against a literal LAMB ----------------------------------------------------------------------------------------------

LAMB: dict[str, Any] = {"lr": 0.05, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.3}
LAYERS = ((13, 11), (70,), ())


def train_lamb(rank: int, world_size: int, name: str) -> list[torch.Tensor]:
    params = parameters(*LAYERS)
    optimizer = make(name, params, **LAMB)
    values = []
    for step in range(1, FREEZE + 1):
        for i, p in enumerate(params):
            p.grad = noise(tuple(p.shape), rank, step, i)
        optimizer.step()
        values.append(flat(params))
    return values


def literal_lamb(world_size: int) -> Iterator[np.ndarray]:
    (beta1, beta2), eps = LAMB["betas"], LAMB["eps"]
    layers = [p.detach().double().numpy() for p in parameters(*LAYERS)]
    m, v = ([np.zeros_like(x) for x in layers] for _ in range(2))
    for t in range(1, FREEZE + 1):
        for i, x in enumerate(layers):
            g = np.mean([noise(x.shape, rank, t, i).double().numpy() for rank in range(world_size)], axis=0)
            m[i] = beta1 * m[i] + (1 - beta1) * g
            v[i] = beta2 * v[i] + (1 - beta2) * g**2
            r = m[i] / (1 - beta1**t) / (np.sqrt(v[i] / (1 - beta2**t)) + eps) + LAMB["weight_decay"] * x
            c = min(max(float(np.linalg.norm(x) / np.linalg.norm(r)), 0.01), 10.0)
            layers[i] = x - LAMB["lr"] * c * r
        yield np.concatenate([x.reshape(-1) for x in layers])


def test_lamb_and_the_warm_up_of_1_bit_lamb_are_a_literal_lamb() -> None:
    lamb, onebit_lamb = (run_ranks(train_lamb, 3, name) for name in ("Lamb", "OneBitLamb"))
    for ours, theirs in zip(lamb, onebit_lamb, strict=True):
        np.testing.assert_array_equal(np.stack(ours), np.stack(theirs))
        for values, expected in zip(ours, literal_lamb(3), strict=True):
            np.testing.assert_allclose(values, expected, rtol=0, atol=1e-5)


# Where it ends -------------------------------------------------------------------------------------------------------


class Kept(logging.Handler):
    """What was logged by "thinwire"."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []
        logger = logging.getLogger("thinwire")
        logger.setLevel(logging.INFO)
        logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def follow(
    rank: int, world_size: int, name: str, options: dict[str, Any], rises_until: int, sizes: list[float]
) -> dict[str, Any]:
    """A run on noise of given sizes; when its warm-up ended, what was sent in each step, and what was logged."""
    log = Kept()
    params = parameters((40, 30), (7,))
    optimizer = make(name, params, **options)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(step + 1, rises_until) / rises_until)
    ended_at, sent = [], [0]
    for step, size in enumerate(sizes, 1):
        for i, p in enumerate(params):
            p.grad = size * noise(tuple(p.shape), rank, step, i)
        optimizer.step()
        scheduler.step()
        ended_at.append(int(optimizer.state[params[0]]["warmup"][0]))
        sent.append(optimizer.metrics().bytes_sent)
    return {"ended_at": ended_at, "sent": np.diff(sent), "log": log.messages, "values": flat(params)}


def assert_it_ends_with(step: int, seen: dict[str, Any]) -> None:
    steps = len(seen["ended_at"])
    assert seen["ended_at"] == [0] * (step - 1) + [step] * (steps - step + 1)
    assert (seen["sent"] > 10 * seen["sent"].min()).tolist() == [i < step for i in range(steps)]
    assert len(seen["log"]) == 1
    assert f"ended with step {step};" in seen["log"][0]


@pytest.mark.parametrize("name", SWITCHING)
def test_an_integer_ends_it_with_that_step(name: str) -> None:
    for seen in run_ranks(follow, 2, name, {}, 1, [1.0] * 16):
        assert_it_ends_with(FREEZE, seen)


@pytest.mark.parametrize("name", SWITCHING)
def test_auto_ends_it_on_all_ranks_when_the_variance_has_settled(name: str) -> None:
    """Gradients shrink by 5 % a step up to step 20; v, which forgets 10 % a step, takes a while to follow."""
    sizes = [0.95 ** min(step, 20) for step in range(1, 76)]
    results = run_ranks(follow, 3, name, {"warmup_steps": "auto"}, 1, sizes)
    last = results[0]["ended_at"][-1]
    assert 20 + 16 < last < 75
    for seen in results:
        assert_it_ends_with(last, seen)
        np.testing.assert_array_equal(seen["values"], results[0]["values"])


@pytest.mark.parametrize("name", SWITCHING)
@pytest.mark.parametrize("rises_until", [1, 25])
def test_auto_waits_for_the_learning_rate(name: str, rises_until: int) -> None:
    """Noise of one size has settled after the 17 steps that it takes to see it, and the rate rises for longer: until a
    window of 10 steps has seen no rise."""
    for seen in run_ranks(follow, 2, name, {"warmup_steps": "auto"}, rises_until, [1.0] * 45):
        assert seen["ended_at"][-1] >= (rises_until + 10 if rises_until > 1 else 17)
        assert_it_ends_with(seen["ended_at"][-1], seen)


@pytest.mark.parametrize("name", SWITCHING)
def test_the_end_is_logged_once(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Nor is it logged again when the state is loaded, or after it."""
    caplog.set_level(logging.INFO, logger="thinwire")
    (p,) = parameters((70,))
    optimizer = make(name, [p])
    for step in range(1, 16):
        p.grad = noise((70,), step)
        optimizer.step()
        assert len(caplog.records) == (step >= FREEZE)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    p.grad = noise((70,), 16)
    optimizer.step()
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("thinwire", logging.INFO)
    assert f"step {FREEZE}" in record.getMessage()


@pytest.mark.parametrize("event", ["a parameter is absent", "a step is skipped"])
def test_auto_is_the_oracle_when(event: str) -> None:
    """In step 17, the first with which the warm-up may end."""
    absent = event == "a parameter is absent"
    params = parameters((70,), (30,))
    optimizer = make("OneBitAdam", params, warmup_steps="auto")
    oracle = OneBitAdamOracle(
        [Group([p.detach().numpy().copy() for p in params], 0.01, 0.01)],
        1,
        bucket_elements=1 << 20,
        warmup_steps="auto",
        betas=(0.9, 0.9),
    )
    ended_at = oracle_ended_at = 0
    for step in range(1, 50):
        # The parameter with the larger gradients, which are still shrinking when it is absent.
        second = (0.97 if absent else 1.0) ** step * torch.ones(30)
        if step == 17:
            second = None if absent else torch.full((30,), float("nan"))
        params[0].grad, params[1].grad = 0.1 * torch.ones(70), second
        oracle.step([[None if p.grad is None else p.grad.numpy().copy() for p in params]])
        optimizer.step()
        ended_at = int(optimizer.state[params[0]]["warmup"][0])
        oracle_ended_at = oracle_ended_at or step * oracle.frozen
    assert ended_at == oracle_ended_at


# What the switch leaves alone ----------------------------------------------------------------------------------------


def hooks_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, list[int]]:
    """The numbers of all hooks: torch gives every hook that is registered a new one."""
    holders = [("optimizer", optimizer), *model.named_modules(), *model.named_parameters()]
    return {
        f"{name}.{key}": list(value)
        for name, holder in holders
        for key in dir(holder)
        if key.endswith("hooks") and isinstance(value := getattr(holder, key), dict)
    }


def bytes_held(root: Any) -> int:
    """The storages of all tensors that can be reached from thinwire's objects, but for the tables of joined calls: a
    channel has its own, of a kilobyte per small parameter at most, made when it is first used."""
    storages: dict[int, int] = {}
    seen: set[int] = set()
    rest = [root]
    while rest:
        thing = rest.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, JointCalls):
            continue
        if isinstance(thing, torch.Tensor):
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        elif isinstance(thing, (dict, weakref.WeakKeyDictionary)):
            rest += thing.values()
        elif isinstance(thing, (list, tuple)):
            rest += thing
        elif type(thing).__module__.startswith("thinwire."):
            rest.append(getattr(thing, "__dict__", {}))  # a stopwatch has none
    return sum(storages.values())


def switch(rank: int, world_size: int, name: str) -> dict[str, Any]:
    net = small_net()
    model = DistributedDataParallel(net)
    optimizer = make(name, net.parameters())
    held = [bytes_held(optimizer)]
    dense_packets = bytes_held(optimizer._session.channels["dense"].buffers)
    thinwire.attach(model, optimizer)
    hooks = [hooks_of(model, optimizer)]
    for step in range(1, 26):
        loss_of(model, *batch(rank, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        held.append(bytes_held(optimizer))
        hooks.append(hooks_of(model, optimizer))
    gc.collect()
    joined = len(optimizer._joint_calls._known)
    return {"held": held, "dense packets": dense_packets, "hooks": hooks, "channels with joined calls": joined}


@pytest.mark.parametrize(("nodes", "ranks"), [(2, 1), (2, 2)])
@pytest.mark.parametrize("name", [name for name in STAGES if name != "Lamb"])
def test_the_switch_registers_no_hook_and_allocates_nothing(name: str, nodes: int, ranks: int) -> None:
    for seen in run_nodes(switch, nodes, ranks, name):
        first, *others = seen["hooks"]
        assert sum(map(len, first.values())) > 5
        assert all(other == first for other in others)
        assert seen["channels with joined calls"] <= 1  # none that keeps released packets alive
        made, before, after = seen["held"][0], seen["held"][1], seen["held"][FREEZE]
        # The commit round of a channel, two headers per worker, and the memory in which the gradients of a node are
        # staged are allocated at the first exchange.
        commit_rounds = 64 * nodes * len(("dense", "signs", "local"))
        assert before <= made + commit_rounds or ranks > 1
        assert all(before <= held <= before + commit_rounds for held in seen["held"][1:FREEZE])
        assert after <= before - seen["dense packets"] + 100 + commit_rounds
        assert all(after <= held <= after + commit_rounds for held in seen["held"][FREEZE:])


def go_back(
    rank: int, world_size: int, name: str, attach: bool, options: dict[str, Any]
) -> tuple[list[str], list[str]]:
    """Train past the switch, load a checkpoint from before it into the same optimizer, and train on."""
    net = small_net()
    optimizer = make(name, net.parameters(), **options)
    model: nn.Module = net
    if attach:
        model = DistributedDataParallel(net)
        thinwire.attach(model, optimizer)

    def run(steps: range) -> list[str]:
        digests = []
        for step in steps:
            loss_of(model, *batch(rank, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
            state = [value for p in net.parameters() for _, value in sorted(optimizer.state[p].items())]
            digests.append(digest([*net.parameters(), *state]))
        return digests

    run(range(1, 8))
    saved = copy.deepcopy((net.state_dict(), optimizer.state_dict()))
    first = run(range(8, 22))
    loss_of(model, *batch(rank, 22)).backward()  # thrown away; attached, it has begun an exchange
    optimizer.zero_grad()
    net.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    return first, run(range(8, 22))


@pytest.mark.parametrize("attach", [False, True], ids=["", "attach"])
@pytest.mark.parametrize(("name", "options"), [*((name, {}) for name in STAGES), *((name, INT4) for name in SWITCHING)])
def test_a_checkpoint_from_before_the_switch_can_be_loaded_after_it(
    name: str, options: dict[str, Any], attach: bool
) -> None:
    for first, again in run_ranks(go_back, 2, name, attach, options):
        assert again == first
        assert len(set(first)) == len(first)
