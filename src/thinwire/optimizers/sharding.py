"""Parameters of which each rank holds a shard: those of FSDP2 (`fully_shard`) on a mesh of replicas and shards.

Such parameters, their gradients and their saved states are DTensors. Kernels read and write the memory of the shard of
this rank. Packets go to the ranks that hold the same shard of the other replicas. The mesh has two dimensions: replicas
first, then shards.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from thinwire.optimizers.rank_states import States

_COMPRESS = (
    'Or keep your torch.optim optimizer, and call thinwire.compress(model, "int4") to average gradients between '
    "replicas in compressed form"
)
_MESH = "mesh = init_device_mesh(device, (replicas, shards), mesh_dim_names=('replicate', 'shard'))"
_REPLICA = "replica"
"""The key of a replica in a state dict, before its number."""


def is_sharded(tensor: object) -> bool:
    """Whether a tensor is a DTensor. Only a program that has imported torch.distributed.tensor has any."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


@torch.no_grad()
def local(tensor: Tensor) -> Tensor:
    """The memory of this rank: the shard of a DTensor, or the tensor itself."""
    return tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def with_lists(params: Any) -> Any:
    """The argument `params` of an optimizer, with lists instead of iterators, which can be read once only."""
    if isinstance(params, Tensor):
        return params  # which torch rejects
    return [_with_list(each) if isinstance(each, dict) else each for each in params]


def _with_list(group: dict[str, Any]) -> dict[str, Any]:
    params = group.get("params")
    return group if isinstance(params, (Tensor, set, type(None))) else {**group, "params": list(params)}


def _tensors(params: Any) -> Iterable[object]:
    for each in [params] if isinstance(params, Tensor) else params:
        held = each.get("params", ()) if isinstance(each, dict) else [each]
        for p in [held] if isinstance(held, Tensor) else held:
            yield p[1] if isinstance(p, tuple) and len(p) == 2 else p  # with its name


@dataclass(frozen=True)
class Sharding:
    """How the parameters of an optimizer are sharded."""

    mesh: DeviceMesh

    @classmethod
    def find(cls, params: Any, mesh: DeviceMesh | None, process_group: ProcessGroup | None) -> Sharding | None:
        """The sharding of parameters; None if they are ordinary tensors.

        Args:
            params: the argument of the optimizer, without iterators.
            mesh, process_group: the arguments of the optimizer.

        Raises:
            TypeError: for DTensors without a mesh.
            ValueError: if the mesh has no replicas, or if a process group is given.
        """
        first: Any = next((p for p in _tensors(params) if is_sharded(p)), None)
        if first is None:
            return None
        if mesh is None:
            raise TypeError(
                "a parameter of class DTensor: this rank has a shard of it, as after fully_shard (FSDP2). Give the "
                "two-dimensional mesh of replicas and shards that fully_shard was given, as in "
                "thinwire.Birder(model.parameters(), mesh=mesh), and call thinwire.attach(model, optimizer). "
                + _COMPRESS
            )
        if process_group is not None:
            raise ValueError(
                f"process_group={process_group!r} with parameters of class DTensor: expected None. Packets go to the "
                "replicas, which mesh= tells"
            )
        if mesh.ndim != 2 or mesh.size(0) == 1:
            raise ValueError(
                f"mesh={mesh!r} with parameters of class DTensor: there are no other replicas to exchange packets "
                f"with. Expected two dimensions, at least two replicas first, then shards: {_MESH}"
            )
        return cls(mesh)

    def check(self, p: Any) -> None:
        """Check that a parameter is sharded like all others.

        Raises:
            TypeError: if it is not sharded, or not like this.
            ValueError: if it is on another mesh, or on the meta device.
        """
        if not is_sharded(p):
            raise TypeError(
                f"a parameter of class {type(p).__name__} beside others of class DTensor: expected all of them to be "
                "sharded on one mesh. Call fully_shard on the root module, then give the optimizer model.parameters()"
            )
        if p.device_mesh != self.mesh:
            raise ValueError(
                f"mesh={self.mesh!r}, but a parameter of shape {tuple(p.shape)} is on {p.device_mesh!r}: expected the "
                "mesh that fully_shard was given, with replicas first, then shards"
            )
        replicated, sharded = p.placements
        if not replicated.is_replicate() or not sharded.is_shard():
            raise TypeError(
                f"a parameter of shape {tuple(p.shape)} with placements {p.placements}: expected (Replicate, Shard), "
                "as fully_shard makes them on a mesh of replicas and shards"
            )
        if p.is_meta:
            raise ValueError(
                f"a parameter of shape {tuple(p.shape)} is on the meta device: call to_empty() and initialize it first"
            )

    @property
    def replica(self) -> int:
        """The replica of this rank."""
        return self.mesh.get_local_rank(0)

    @property
    def shard(self) -> int:
        """The shard of this rank."""
        return self.mesh.get_local_rank(1)

    def __str__(self) -> str:
        rows = self.mesh.mesh.tolist()
        return f"{len(rows)} replicas of {len(rows[0])} shards, on ranks {rows}"

    def gradient_of(self, p: Any) -> Tensor | None:
        """The memory of the gradient of a parameter.

        Raises:
            TypeError: if it is not sharded like its parameter.
        """
        grad: Any = p.grad
        if grad is not None and (not is_sharded(grad) or grad.placements != p.placements):
            raise TypeError(
                f"a gradient of class {type(grad).__name__} for a parameter of class DTensor and shape "
                f"{tuple(p.shape)}: expected a DTensor with the placements {p.placements}, like its parameter"
            )
        return None if grad is None else local(grad)

    # States of optimizers --------------------------------------------------------------------------------------------

    def wrap(self, states: States, params: Sequence[Any], shaped: Iterable[str], private: Iterable[str]) -> States:
        """Make DTensors of the entries of a state dict that are as large as the shard of their parameter.

        torch.distributed.checkpoint then saves each of them as one tensor of the shape of the parameter. One that all
        replicas share is on the mesh of the parameter. Of the others, each replica has its own, under its own key.

        Args:
            states: by parameter, the entries of this rank, divided by rank or not.
            params: the parameters.
            shaped: the names of entries that are as large as the shard.
            private: those of entries that differ between replicas.
        """
        assert self.mesh.mesh_dim_names is not None, "fully_shard requires names"
        mesh_of_replica = self.mesh[self.mesh.mesh_dim_names[1]]
        private, shaped = frozenset(private), frozenset(shaped)

        def entry(name: str, value: Any, p: Any) -> Any:
            if name not in shaped:
                return value
            (tensor,) = value.values() if isinstance(value, dict) else [value]
            if name not in private:
                return _dtensor(tensor, self.mesh, p.placements, p)
            return {f"{_REPLICA}{self.replica}": _dtensor(tensor, mesh_of_replica, p.placements[1:], p)}

        return {
            index: {name: entry(name, value, params[index]) for name, value in entries.items()}
            for index, entries in states.items()
        }

    def unwrap(self, states: Any) -> Any:
        """The states of `wrap` with the memory of this rank instead of DTensors.

        Raises:
            ValueError: if the state of this replica is missing.
        """

        def entry(name: str, value: Any) -> Any:
            found: Any = value
            if isinstance(value, dict) and value and all(str(key).startswith(_REPLICA) for key in value):
                key = f"{_REPLICA}{self.replica}"
                found = value.get(key)
                if found is None:
                    raise ValueError(
                        f"{name!r} in the state dict is of {', '.join(map(str, value))}, not of {key}, which this rank "
                        "belongs to: load it with torch.distributed.checkpoint on the mesh that was saved"
                    )
            return local(found) if is_sharded(found) else found

        return {
            index: {name: entry(name, value) for name, value in entries.items()}
            if isinstance(entries, dict)
            else entries
            for index, entries in states.items()
        }


def _dtensor(tensor: Tensor, mesh: DeviceMesh, placements: Sequence[Any], p: Tensor) -> Tensor:
    from torch.distributed.tensor import DTensor  # already imported, because `p` is one

    return DTensor.from_local(tensor, mesh, placements, run_check=False, shape=p.shape, stride=p.stride())
