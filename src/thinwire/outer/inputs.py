"""Checks of what `thinwire.LocalSteps` is given: the inner optimizer, its gradients, and who else exchanges them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from thinwire._ddp import averaging_models
from thinwire._torch_compat import synchronized_last
from thinwire.errors import name_ranks
from thinwire.optimizers.agreement import group_fields
from thinwire.optimizers.inputs import check_not_averaged, check_parameters
from thinwire.optimizers.optimizer import WireOptimizer
from thinwire.optimizers.sharding import is_sharded
from thinwire.transport.peers import Peers
from thinwire.transport.topology import Topology


def check_inner(inner: object) -> None:
    """Reject an inner optimizer that cannot take local steps.

    Raises:
        TypeError: naming its class; or for a parameter that kernels cannot process, such as a complex one.
    """
    if isinstance(inner, WireOptimizer):
        raise TypeError(
            f"inner is thinwire.{type(inner).__name__}, which exchanges gradients in every step: expected an optimizer "
            "that steps alone, such as torch.optim.AdamW. Or use it without LocalSteps"
        )
    if not isinstance(inner, Optimizer):
        kind = f"{type(inner).__module__}.{type(inner).__name__}"
        raise TypeError(f"inner is {kind}, expected a torch.optim.Optimizer, such as torch.optim.AdamW")
    params = [p for group in inner.param_groups for p in group["params"]]
    if any(map(is_sharded, params)):
        raise TypeError(
            "a parameter of class DTensor: this rank has a shard of it, as after fully_shard (FSDP2). LocalSteps needs "
            'whole parameters. thinwire.compress(model, "int4") and thinwire.attach train FSDP2 models'
        )
    check_parameters(params)


def check_alone(params: Sequence[Tensor], peers: Peers, topology: Topology) -> None:
    """Reject parameters whose gradients something else averages between workers in every step.

    Inside of a worker, which may have several ranks, gradients may be averaged.

    Raises:
        RuntimeError: naming what averages them, and what to do.
    """
    check_not_averaged(params)
    if dist.is_available() and dist.is_initialized():
        worker = {peers.ranks()[rank] for rank in topology.node_ranks()}
        for model in averaging_models(params):
            if not isinstance(model, DistributedDataParallel):
                continue  # FSDP2's parameters were rejected before
            ranks = dist.get_process_group_ranks(model.process_group)
            if not worker.issuperset(ranks) and synchronized_last(model):
                raise RuntimeError(
                    f"{type(model).__name__} averages the gradients of {name_ranks(ranks)} in every backward, so local "
                    "steps would save nothing. Do not wrap the module: train it as it is, and LocalSteps keeps the "
                    f"replicas together. Or, with several ranks per site, let {type(model).__name__} average inside a "
                    "site (process_group= with its ranks), and give LocalSteps mesh= with one row per site"
                )


def check_intervals(of_each_rank: Sequence[int] | None, peers: Peers, topology: Topology) -> None:
    """Reject lengths of intervals that are not those of as many ranks, or that differ inside of a worker.

    Raises:
        ValueError: naming them.
    """
    if of_each_rank is None:
        return
    if len(of_each_rank) != peers.size:
        raise ValueError(f"every={list(of_each_rank)} for {peers.size} ranks: expected one number for each rank")
    within = [of_each_rank[rank] for rank in topology.node_ranks()]
    if len(set(within)) > 1:
        raise ValueError(
            f"every={list(of_each_rank)}: {name_ranks(topology.node_ranks())} form one worker, and need the same number"
        )


def inner_fields(inner: Optimizer) -> Iterator[tuple[str, Any]]:
    """The numbers of the inner optimizer's groups on which ranks must agree, with descriptions as keys."""
    plain = (int, float, str, bool, type(None))
    for name, value in group_fields(inner.param_groups):
        if isinstance(value, plain) or (
            isinstance(value, (tuple, list)) and all(isinstance(each, plain) for each in value)
        ):
            yield f"{name} of the inner optimizer", value


def all_finite(gradients: Sequence[Tensor]) -> bool:
    """Whether all elements are finite. It costs one pass over them, and no memory."""
    # A sum is finite only if all that is added is, and takes half of the time of the extremes.
    sums = [grad.sum(dtype=torch.float32) for grad in gradients]
    if not sums or bool(torch.stack(sums).isfinite().all()):
        return True
    # Finite numbers may have a sum that is not.
    extremes = [extreme for grad in gradients if grad.numel() for extreme in torch.aminmax(grad)]
    return bool(torch.stack([each.float() for each in extremes]).isfinite().all())


def check_gradient(p: Tensor) -> None:
    """Reject a gradient that is not dense.

    Raises:
        TypeError: naming the layout.
    """
    if p.grad is not None and p.grad.layout != torch.strided:
        raise TypeError(
            f"a gradient with layout {p.grad.layout} for a parameter of shape {tuple(p.shape)}: LocalSteps needs dense "
            "gradients. Use sparse=False in nn.Embedding"
        )
