"""`thinwire.compress`: compressed averaging of gradients, for any optimizer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from thinwire import _torch_compat
from thinwire._unwrap import distributed_model, refuse_fsdp1
from thinwire.averaging.averager import GradientAverager
from thinwire.averaging.catalogue import rule_of
from thinwire.averaging.ddp import average_ddp
from thinwire.averaging.fsdp import average_replicas
from thinwire.averaging.handle import Compression
from thinwire.transport.topology import Choice


def compress(
    model: nn.Module,
    compressor: str = "int4",
    *,
    grad_scaler: torch.amp.GradScaler | None = None,
    residual_decay: float = 1.0,
    topology: Choice = "auto",
    mesh: DeviceMesh | None = None,
    node_dtype: torch.dtype = torch.float32,
    bucket_mb: float | None = None,
    max_consecutive_skips: int | None = 100,
    check_replicas_every: int = 100,
    clip_norm: float | None = None,
    clip_value: float | None = None,
    delay: int = 0,
    **options: Any,
) -> Compression:
    """Average the gradients of a DistributedDataParallel or FSDP2 model in compressed form. All ranks call it.

    Everything else stays as it is: after backward `.grad` holds the averaged gradient, equal to the bit on all ranks,
    for any optimizer, `clip_grad_norm_`, a GradScaler, or your own code. The exchange runs while backward computes.
    `no_sync()`, unused parameters, static graphs, bucket views and torch.compile work as in DDP.

    Example::

        model = DDP(net)
        thinwire.compress(model, "int4")
        opt = torch.optim.AdamW(model.parameters(), lr=1e-3)

    With FSDP2 (`fully_shard`) on a two-dimensional mesh of replicas and shards, what crosses the replicate dimension is
    compressed, and shards stay torch's business. `.grad` is then equal on all replicas. Call it after all
    `fully_shard`, on the root module. Gradient accumulation (`set_requires_gradient_sync`, `set_requires_all_reduce`),
    mixed precision, frozen parameters, activation checkpointing and torch.compile work as in FSDP2. Example::

        mesh = init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replicate", "shard"))
        for block in net.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(net, mesh=mesh)
        thinwire.compress(net, "int4")

    What compression leaves out of a gradient stays in a residual, which is added to the next gradient. The residuals
    are state of the run: save them with `thinwire.checkpoint`, or with `state_dict()` on every rank.

    If a gradient on any rank is not finite, all gradients become NaN on all ranks, so that all of them skip the step,
    or all fail. With FSDP2 these are all ranks with the same shard. The residuals stay finite.

    Args:
        model: a DistributedDataParallel model, or the root module of a model after `fully_shard`; also inside the
            wrapper of a framework or of torch.compile.
        compressor: the name of the compressor: "int4", "int8", "int3", "int2", "int1", "powersgd", "topk", "gtopk",
            "chunked_topk", "dct_topk", "randomk", "count_sketch", "laq", "sign", "onebit_sgd", "signsgd", "qsgd",
            "terngrad", "natural", or "none" to send floats. docs/compress.md compares them.
        grad_scaler: the torch.amp.GradScaler in use, if any. When its scale changes, the residuals change with it.
        residual_decay: what residuals are multiplied by before each exchange, in [0, 1]. Below 1, old errors are
            forgotten, as in error-compensated SGD (Wu et al., "Error Compensated Quantized SGD and its Applications to
            Large-scale Distributed Optimization", ICML 2018). It costs a pass over the residuals.
        topology: "flat", "hierarchical" or "auto", as in `thinwire.Birder`: dense inside a node, compressed between
            nodes.
        mesh: a two-dimensional DeviceMesh of the ranks that average, one row per node, if LOCAL_WORLD_SIZE is not set.
        node_dtype: the dtype of gradients on the link inside a node: torch.float32, or torch.bfloat16 for half the
            bytes.
        bucket_mb: the size of a bucket, in megabytes of fp32 gradient. None: an eighth of the model, but at least 2 and
            at most 32.
        max_consecutive_skips: raise TooManySkips after this many exchanges in a row in which a gradient was not finite.
            None: never.
        check_replicas_every: compare a hash of the parameters across all ranks every this many exchanges; 0 for never.
        clip_norm: clip each rank's own gradient to this norm before it is averaged, as in `thinwire.Birder`. It limits
            what a spike on one rank adds to the average. `clip_grad_norm_` after backward still clips the average. Not
            with FSDP2, where a rank has a part of each gradient only.
        clip_value: clip each element of it to [-clip_value, clip_value]. Not with FSDP2.
        delay: 1 to average with one step of delay, as in Pipe-SGD (Li et al., NeurIPS 2018), on CPUs: after backward
            t+1, `.grad` holds the average of the gradients of backward t, and after the first backward zeros. The
            exchange then has a whole step to itself, forward included, and a link may be as slow as one step before
            anybody waits. `synchronize()` of the returned object gives the last average. Not with "powersgd".
            docs/compress.md has the details. 0: no delay.
        **options: options of the compressor, such as `block=32` of "int4"; see the API reference.

    Returns:
        An object with `metrics()`, `state_dict()`, `load_state_dict()` and `synchronize()`.

    Raises:
        TypeError: if the model is neither DistributedDataParallel nor sharded, or if it is FSDP1; on every rank, for an
            unknown option, a complex parameter, or a module with sparse gradients.
        ValueError: on every rank, for an unknown compressor, an invalid option on any rank, or a mesh without replicas.
        RuntimeError: on every rank, if the model has a communication hook already, or if ranks disagree on the
            compressor, its options, or the model.
    """

    inner = distributed_model(model)
    if isinstance(inner, nn.Module):
        refuse_fsdp1(inner, "compress")

    def make(params: dict[Tensor, str], process_group: ProcessGroup | None) -> GradientAverager:
        rule = rule_of(compressor, options, residual_decay)
        _refuse_sparse(inner.module if isinstance(inner, DistributedDataParallel) else inner)
        return GradientAverager(
            params,
            rule,
            process_group=process_group,
            topology=topology,
            mesh=mesh,
            node_dtype=node_dtype,
            bucket_mb=bucket_mb,
            max_consecutive_skips=max_consecutive_skips,
            check_replicas_every=check_replicas_every,
            clip_norm=clip_norm,
            clip_value=clip_value,
            delay=delay,
        )

    if isinstance(inner, DistributedDataParallel):
        return Compression(average_ddp(inner, make, grad_scaler))
    if _torch_compat.is_fully_sharded(inner):
        if clip_norm is not None or clip_value is not None:
            raise ValueError(
                f"compress: clip_norm={clip_norm!r}, clip_value={clip_value!r} with a sharded model: a rank has a part "
                "of each gradient only. Expected None. Use torch.nn.utils.clip_grad_norm_ after backward"
            )
        return Compression(average_replicas(inner, make, grad_scaler))
    raise TypeError(
        f"compress: model is {type(inner).__name__}, expected torch.nn.parallel.DistributedDataParallel, or a module "
        "after torch.distributed.fsdp.fully_shard. Wrap or shard the module first"
    )


def _refuse_sparse(module: nn.Module) -> None:
    for name, part in module.named_modules():
        if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.sparse:
            raise TypeError(
                f"compress: {name or 'the model'!r} is {type(part).__name__}(sparse=True), whose gradients are sparse: "
                "thinwire needs dense gradients. Use sparse=False"
            )
