"""Private names of torch are used in src/thinwire/_torch_compat.py only, and this torch has all of them."""

from __future__ import annotations

import ast
import copy
import functools
import importlib.util
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import thinwire
from thinwire import _torch_compat

SOURCES = Path(thinwire.__file__).parent
COMPAT = Path(_torch_compat.__file__)
UNDOCUMENTED = {
    "alltoall_base",
    "fsdp_params",
    "found_inf",
    "grad_scale",
    "mesh_info",
    "replicate_process_group",
    "require_backward_grad_sync",
    "require_forward_param_sync",
    "shard_process_group",
    "sharded_param",
}
"""Names of torch without an underscore that belong into the module as well."""
OF_PYTHON = {"_exit"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def attribute_names(node: ast.AST) -> Iterator[str]:
    """The attributes that one node of a syntax tree uses, by name."""
    if isinstance(node, ast.Attribute):
        yield node.attr
    elif isinstance(node, ast.ImportFrom) and node.module is not None and node.module.split(".")[0] == "torch":
        yield from node.module.split(".")
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.Import):
        yield from (part for alias in node.names for part in alias.name.split("."))
    elif (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in ("getattr", "setattr", "hasattr", "delattr")
        and isinstance(node.args[1], ast.Constant)
    ):
        yield str(node.args[1].value)


def definitions(tree: ast.AST) -> Iterator[str]:
    """The names that a module defines: functions, classes, variables, and attributes of `self` and `cls`."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and isinstance(node.value, ast.Name)
            and node.value.id in ("self", "cls")
        ):
            yield node.attr


def violations(sources: dict[str, str], compat: str) -> list[str]:
    """Uses of private names that these modules do not define themselves, and of those that `compat` is for."""
    trees = {name: ast.parse(source) for name, source in sources.items()}
    defined = {name for tree in trees.values() for name in definitions(tree)} | OF_PYTHON
    reserved = {
        name for node in ast.walk(ast.parse(compat)) for name in attribute_names(node) if is_private(name)
    } | UNDOCUMENTED
    found = []
    for file, tree in trees.items():
        for node in ast.walk(tree):
            own = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
            for name in attribute_names(node):
                foreign = is_private(name) and name not in defined
                if foreign or (name in reserved and not (own and name in defined)):
                    found.append(f"{file}:{getattr(node, 'lineno', 0)}: {name}")
    return found


def test_no_other_module_uses_a_private_name_of_torch() -> None:
    sources = {
        str(path.relative_to(SOURCES)): path.read_text(encoding="utf-8")
        for path in sorted(SOURCES.rglob("*.py"))
        if path != COMPAT
    }
    assert len(sources) > 50
    assert violations(sources, COMPAT.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "source",
    [
        "model._comm_hooks",
        "model._static_graph_delay_allreduce_enqueued = True",
        "model.require_backward_grad_sync = False",
        "scaler._some_name_of_the_future()",
        "class A:\n    def f(self):\n        return self._step_count_of_torch",
        "class A:\n    def f(self, scaler):\n        self._scale = scaler._scale",
        "from torch.distributed.distributed_c10d import _get_default_store",
        "import torch._dynamo",
        "getattr(module, '_orig_mod', None)",
    ],
)
def test_the_check_finds(source: str) -> None:
    assert len(violations({"module.py": source}, COMPAT.read_text(encoding="utf-8"))) >= 1


def test_the_check_accepts_own_names() -> None:
    source = (
        "class A:\n    def __init__(self, other):\n        self._own = 1\n        other._own = 2\n        self._own"
    )
    assert violations({"module.py": source}, "") == []


# Each function, with this torch ---------------------------------------------------------------------------------------


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=17))
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture
def model(group: dist.ProcessGroup) -> DistributedDataParallel:
    return DistributedDataParallel(nn.Linear(3, 2))


def test_communication_hooks(model: DistributedDataParallel) -> None:
    assert _torch_compat.communication_hooks(model) == []

    def own_hook(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        raise AssertionError

    own_hook.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[torch.Tensor]}
    model.register_comm_hook(None, own_hook)
    assert _torch_compat.communication_hooks(model) == [("own_hook", None)]
    copied = copy.deepcopy(model)  # lists the hook, but DDP does not call it
    assert _torch_compat.communication_hooks(copied) == [("own_hook", None)]
    copied(torch.ones(1, 3)).sum().backward()
    _torch_compat.forget_communication_hooks(copied)
    assert _torch_compat.communication_hooks(copied) == []
    copied.register_comm_hook(None, own_hook)


def test_disable_static_graph_all_reduce(group: dist.ProcessGroup) -> None:
    def backward(model: DistributedDataParallel) -> None:
        _torch_compat.set_gradient_synchronization(model, enabled=False)
        model(torch.ones(1, 3)).sum().backward()

    with pytest.raises(RuntimeError, match="INTERNAL ASSERT"):  # of DDP, which is not prepared for this exchange
        backward(DistributedDataParallel(nn.Linear(3, 2), static_graph=True))
    model = DistributedDataParallel(nn.Linear(3, 2), static_graph=True)
    _torch_compat.disable_static_graph_all_reduce(model)
    backward(model)


def test_gradient_synchronization(model: DistributedDataParallel) -> None:
    assert _torch_compat.synchronizes_gradients(model)
    with model.no_sync():
        assert not _torch_compat.synchronizes_gradients(model)
    _torch_compat.set_gradient_synchronization(model, enabled=False)
    assert not _torch_compat.synchronizes_gradients(model)
    assert _torch_compat.synchronized_last(model)
    model(torch.ones(1, 3))
    assert not _torch_compat.synchronized_last(model)  # DDP has noticed
    _torch_compat.set_buffer_synchronization(model, enabled=True)
    assert model.require_forward_param_sync


class Recorder(torch.optim.SGD):
    """Records what GradScaler passes to step()."""

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        self.calls = [*getattr(self, "calls", []), _torch_compat.scale_passed_to_step(self)]
        self.by_scaler = _torch_compat.is_called_by_scaler(self)


@pytest.mark.parametrize("supported", [True, False])
def test_a_grad_scaler_calls_step_in_every_case(supported: bool) -> None:
    kind = _torch_compat.unscales_in_step(type("Kind", (Recorder,), {})) if supported else Recorder
    parameter = nn.Parameter(torch.ones(2))
    optimizer, scaler = kind([parameter], lr=0.1), torch.amp.GradScaler("cpu", init_scale=4.0)
    assert not _torch_compat.is_called_by_scaler(optimizer)
    assert _torch_compat.current_scale(scaler) is None
    scaler.scale((parameter * float("inf")).sum()).backward()
    scale = _torch_compat.current_scale(scaler)
    assert scale is not None
    assert float(scale) == 4.0
    scaler.step(optimizer)
    if not supported:
        assert not hasattr(optimizer, "calls")  # the overflow was found before step()
        return
    (passed,) = optimizer.calls
    assert passed is not None
    assert float(passed) == 4.0
    assert optimizer.by_scaler
    assert _torch_compat.scale_passed_to_step(optimizer) is None


@pytest.mark.parametrize("overflow", [0.0, 1.0])
def test_overflow_flags_lower_the_scale(overflow: float) -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer, scaler = torch.optim.SGD([parameter], lr=0.1), torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(parameter.sum()).backward()
    scaler.step(optimizer)
    (flag,) = _torch_compat.overflow_flags(scaler, optimizer)
    flag.fill_(overflow)
    scaler.update()
    assert scaler.get_scale() == (2.0 if overflow else 4.0)


def test_backends_and_timeout(group: dist.ProcessGroup) -> None:
    assert _torch_compat.backends(group)["cpu"].name() == "gloo"
    assert _torch_compat.group_timeout(group) == timedelta(seconds=17)


def test_a_group_of_its_own(group: dist.ProcessGroup) -> None:
    cpu = torch.device("cpu")
    own = _torch_compat.connect_group("test/", [0], 0, "gloo", cpu, timedelta(seconds=5), "described")
    assert (own.rank(), own.size(), own.group_desc) == (0, 1, "described")
    assert _torch_compat.group_timeout(own) == timedelta(seconds=5)
    gathered, received, sent = torch.zeros(2), torch.zeros(2), torch.tensor([1.0, 2.0])
    for work in (_torch_compat.all_gather(own, gathered, sent), _torch_compat.all_to_all(own, received, sent)):
        assert work is not None
        work.wait()
    assert torch.equal(gathered, sent)
    assert torch.equal(received, sent)
    assert _torch_compat.ALL_GATHER_METHOD in vars(dist.ProcessGroup)


def test_a_process_group_in_python() -> None:
    own = _torch_compat.PythonProcessGroup(1, 3)
    assert (own.rank(), own.size()) == (1, 3)
    assert _torch_compat.backends(own) == {"cpu": own}


@pytest.fixture
def sharded(group: dist.ProcessGroup) -> nn.Sequential:
    """Two groups on a mesh of one replica and one shard."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def test_fsdp_groups(sharded: nn.Sequential) -> None:
    assert _torch_compat.is_fully_sharded(sharded)
    assert not _torch_compat.is_fully_sharded(nn.Linear(2, 2))
    root, first = _torch_compat.FsdpGroup.all_of(sharded)
    assert [id(p) for p in root.parameters] == [id(p) for p in sharded[1].parameters()]
    assert [id(p) for p in first.parameters] == [id(p) for p in sharded[0].parameters()]
    mesh = root.parameters[0].device_mesh  # type: ignore[attr-defined]
    assert root.replicate_group is mesh.get_group("replicate")
    assert root.shard_group is mesh.get_group("shard")
    assert root.all_reduce_hook is None
    hook = print
    sharded.set_all_reduce_hook(hook)  # type: ignore[operator]
    assert root.all_reduce_hook is hook
    assert first.all_reduce_hook is None


def test_a_mesh_without_replicas(group: dist.ProcessGroup) -> None:
    model = nn.Linear(3, 4)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    (only,) = _torch_compat.FsdpGroup.all_of(model)
    assert only.replicate_group is None
    assert only.shard_group is not None


@pytest.mark.parametrize("sums", [False, True])
def test_fully_shard_calls_the_group_that_replaces_its_own(sharded: nn.Sequential, sums: bool) -> None:
    x, calls = torch.randn(5, 3, requires_grad=True), []
    sharded(x).square().sum().backward()
    expected = [p.grad.to_local().clone() for p in sharded.parameters()]  # type: ignore[union-attr]
    sharded.zero_grad()
    sharded.set_force_sum_reduction_for_comms(sums)  # type: ignore[operator]
    for number, each in enumerate(_torch_compat.FsdpGroup.all_of(sharded)):
        replaced = _torch_compat.PythonProcessGroup(1, 4)
        replacement = _torch_compat.LocalAllReduce(replaced, "compress", functools.partial(calls.append, number))
        assert (replacement.rank(), replacement.size(), replacement.replaced) == (1, 4, replaced)
        each.replicate_group = replacement
    sharded(x).square().sum().backward()
    assert calls == [1, 0]  # once per group; the root is the last
    for p, grad in zip(sharded.parameters(), expected, strict=True):
        assert p.grad is not None
        assert torch.equal(p.grad.to_local(), grad)  # type: ignore[attr-defined]


def test_a_group_that_sums() -> None:
    group = _torch_compat.LocalAllReduce(_torch_compat.PythonProcessGroup(1, 4), "attach", lambda: None)
    tensor = torch.ones(3)
    dist.all_reduce(tensor, dist.ReduceOp.AVG, group)
    assert torch.equal(tensor, torch.ones(3))
    dist.all_reduce(tensor, dist.ReduceOp.SUM, group)  # the mean of four such values is the sum of four ones
    assert torch.equal(tensor, torch.full((3,), 4.0))
    with pytest.raises(NotImplementedError, match="expected SUM or AVG"):
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group)


def test_end_of_backward() -> None:
    parameter, calls = nn.Parameter(torch.ones(2)), []
    assert _torch_compat.post_accumulate_hooks(parameter) == []

    def accumulated(p: torch.Tensor) -> None:
        _torch_compat.at_end_of_backward(lambda: calls.append("end"))
        calls.append("accumulated")

    parameter.register_post_accumulate_grad_hook(accumulated)
    assert _torch_compat.post_accumulate_hooks(parameter) == [accumulated]
    parameter.sum().backward()
    assert calls == ["accumulated", "end"]


def test_tensors() -> None:
    tensor = torch.zeros(3)
    before = _torch_compat.write_count(tensor)
    tensor.add_(1)
    assert _torch_compat.write_count(tensor) == before + 1
    assert _torch_compat.is_zero_without_memory(torch._efficientzerotensor((3,)))
    assert not _torch_compat.is_zero_without_memory(tensor)


def test_modules() -> None:
    module = nn.BatchNorm1d(3, affine=False)
    compiled = torch.compile(module, backend="eager")
    assert isinstance(compiled, nn.Module)
    assert _torch_compat.uncompiled(compiled) is module
    assert _torch_compat.uncompiled(module) is module
    parameters, buffers = _torch_compat.own_tensors(module)
    assert parameters == {"weight": None, "bias": None}
    assert buffers.keys() == {"running_mean", "running_var", "num_batches_tracked"}
    buffers["running_mean"] = torch.full((3,), 5.0)
    assert torch.equal(module.running_mean, torch.full((3,), 5.0))  # type: ignore[arg-type]


def test_loads_state_by_default() -> None:
    class OwnLoading(nn.Linear):
        def _load_from_state_dict(self, *_: object) -> None: ...  # type: ignore[override]

    class OwnStateDict(nn.Linear):
        def load_state_dict(self, *_: object) -> None: ...  # type: ignore[override]

    assert _torch_compat.loads_state_by_default(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    assert not _torch_compat.loads_state_by_default(nn.Sequential(OwnLoading(2, 2)))
    assert not _torch_compat.loads_state_by_default(OwnStateDict(2, 2))
    for register in ("register_load_state_dict_pre_hook", "register_load_state_dict_post_hook"):
        hooked = nn.Sequential(nn.Linear(2, 2))
        getattr(hooked[0], register)(lambda *_: None)
        assert not _torch_compat.loads_state_by_default(hooked)


def test_the_module_that_optimizers_import_exists() -> None:
    assert importlib.util.find_spec(_torch_compat.IMPORTED_BY_OPTIMIZERS) is not None
