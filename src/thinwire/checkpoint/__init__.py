"""Checkpoints that all ranks save together, atomically, with a digest for every file.

    opt = thinwire.Birder(model.parameters(), lr=1e-3)
    found = checkpoint.load("checkpoints", model, opt)               # None if there is no checkpoint yet
    start = found.step if found is not None else 0
    for step in range(start, steps):
        ...
        if (step + 1) % 500 == 0:
            checkpoint.save("checkpoints", model, opt, step + 1, extra={"schedule": schedule.state_dict()})

With `thinwire.compress` the optimizer is any of torch.optim, or your own. Give the object that `compress` returned::

    compression = thinwire.compress(model, "int4")
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    found = checkpoint.load("checkpoints", model, opt, compression=compression)
    checkpoint.save("checkpoints", model, opt, step, compression=compression)

The residuals of a compression belong to the state of a run, as the moments of AdamW do. They differ between ranks.

All ranks of the optimizer's process group call `save` and `load`. A run that resumes with the number of ranks that
saved continues, to the bit, as if it had not stopped. The checkpoint contains the model, each rank's optimizer state
and residuals, the random states of torch (CPU, and the CUDA devices of the model) and of Python's `random`, and your
own data in `extra`, such as the states of a scheduler, a sampler, a GradScaler, or NumPy's random state as numbers.
Wrap the model in DDP before you call `load`, because DDP copies the model of rank 0 to all ranks. Model and optimizer
may be wrapped by Accelerate, Lightning, Fabric or torch.compile.

Workers under `torchrun --max-restarts` need nothing else, see `examples/resume.py`. Set
TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun. Otherwise its store keeps the addresses of dead workers, and new
workers may try to connect to them (pytorch/pytorch#135712).

Files::

    checkpoints/
      000016-step-1000/
      000017-step-1200/        a sequence number, then the step
        manifest.json          the run that saved it; size and SHA-256 of every file, and of the manifest itself
        model.pt               the state dict of the model, for use without thinwire
        rank-00000.pt …        one per rank: optimizer state, residuals, buffers, random states, `extra`
      .lock                    locked by the run that writes to the directory; names the process

Between two synchronizations of 0/1 Adam replicas differ. `save` then calls `opt.synchronize()` first, so model.pt is
the model of all ranks.

The directory may be on a file system that all machines share, or on a local disk of each machine, which then has the
files of its own ranks.

One run at a time writes to a directory. From its first `save` on a run holds an OS lock (flock) on `.lock`, until its
optimizer or compression is closed or collected, or its processes end. If a second run saves to the same directory, all
its ranks raise BlockingIOError before they write anything. The OS releases the lock when the process ends, even if it
is killed, so a restart needs no cleanup; a `.lock` file without a process locks nothing. Ranks of one run share the
lock, and so do optimizers of one process. `load` needs no lock: you can evaluate a checkpoint while its run continues.
If the file system has no locks, `save` gives a RuntimeWarning and continues without one. On NFS the lock works between
machines.

A checkpoint is written under a temporary name, flushed to the disk (fsync), and then renamed. A crash at any moment
leaves earlier checkpoints intact; the next `save` removes incomplete ones. If machines crash between their renames,
`load` chooses the newest checkpoint that all of them have.

`load` detects a missing, truncated or altered file before it changes anything. Every rank then raises
`thinwire.errors.CorruptCheckpoint` with the name of the file. All files are read with `torch.load(weights_only=True)`:
a forged checkpoint cannot run code, even with correct digests. Digests detect damage. They are not signatures and do
not prove who wrote a file.

torch.distributed.checkpoint is not used here for two reasons. It unpickles its `.metadata` file, which can run code. It
needs a file system that all ranks share.

You can also save in another way. Each rank has its own state, so the states of all ranks must be saved. All of these
resume exactly on the same number of ranks:

* **torch.distributed.checkpoint**: `get_state_dict` and `set_state_dict` with the usual keys. Tensors of a rank have
  the rank in their keys. The object that `thinwire.compress` returned can be put among the states, as a `Stateful`.
* **One file that rank 0 writes**: call `opt.consolidate_state_dict()` on all ranks, then `opt.state_dict()` on rank 0.
  Every rank loads this file with `opt.load_state_dict`. Lightning does both. With Accelerate, add one line:
  `accelerator.register_save_state_pre_hook(lambda *_: opt.consolidate_state_dict())`. On another number of ranks, load
  it with `thinwire.checkpoint.load_state_dict`.
* **One file per rank**, with the `state_dict()` of that rank.

If rank 0 saves without consolidation, it gets a RuntimeWarning: at once in code that is known to save one rank only
(Accelerate, Trainer), otherwise when ranks compare their replicas (`check_replicas_every`). Other ranks that load such
a state raise ValueError, because each rank keeps state for the shards that it owns. Birder, DistributedLion and
SketchedAMSGrad keep none, and give a RuntimeWarning instead. Replicas then stay equal, but the states of the other
ranks are lost: the averages of their own gradients, which recover within about 1/(1-β) steps, and their residuals, in
whose place the residual of rank 0 is applied once per rank.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from thinwire.averaging.handle import Compression
from thinwire.checkpoint._consolidated import load_consolidated
from thinwire.checkpoint._load import Checkpoint, LoadOperation
from thinwire.checkpoint._local_run import optimizers_of
from thinwire.checkpoint._mismatch import OnMismatch
from thinwire.checkpoint._save import SaveOperation

__all__ = ["Checkpoint", "load", "load_state_dict", "save"]


def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer,
    step: int,
    *,
    extra: dict[str, Any] | None = None,
    keep: int | None = 3,
    compression: Compression | None = None,
) -> Path:
    """Save a checkpoint. All ranks call it, after `optimizer.step()`.

    Args:
        path: the directory of checkpoints; created if it does not exist.
        model: a module. DistributedDataParallel and torch.compile around it are not saved.
        optimizer: a thinwire optimizer or `thinwire.LocalSteps`; with `compression`, any torch.optim.Optimizer. The
            state of a second one, such as AdamW beside Muon, may go to `extra`: it is the same on all ranks.
        step: the number of steps taken, as you count them; the same on all ranks.
        extra: what `load` returns to this rank: tensors, numbers, strings, and lists, tuples and dicts of these.
        keep: how many checkpoints to keep, this one included; None for all.
        compression: what `thinwire.compress` returned for this model; None with a thinwire optimizer.

    Returns:
        The directory of the checkpoint.

    Raises:
        TypeError, ValueError: on every rank, if the arguments of any rank are wrong. On this rank alone, if neither
            `optimizer` nor `compression` is thinwire's: they connect the ranks.
        BlockingIOError: on every rank, if another run saves to the directory of any rank.
        OSError: on every rank, if any rank cannot write its files; with the class and errno of the lowest such rank.
            The message lists the ranks.
        RuntimeError: on every rank, if any rank is between backward and `step()`.
    """
    return SaveOperation(path, model, optimizers_of(optimizer, compression), step, extra, keep).run()


def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer,
    *,
    on_mismatch: OnMismatch = "error",
    fallback: bool = False,
    compression: Compression | None = None,
    step: int | None = None,
) -> Checkpoint | None:
    """Load the newest checkpoint that all ranks have, or the one of a given step. All ranks call it, before or after
    `thinwire.attach`, or after `thinwire.compress`.

    All ranks load it or none does. They read all files and check them against the model and the optimizer before they
    change anything. If loading fails nevertheless, for example in a hook of a module, all ranks restore what they had:
    parameters, buffers, extra state of modules, optimizer state, residuals and random states. Until the checkpoint is
    loaded, a copy of these is kept in host memory. It is as large as the model and its optimizer, in addition to the
    files.

    Args:
        path: the directory of checkpoints.
        model: with the same parameters and buffers as the saved model.
        optimizer: of the same class, with the same parameter groups.
        on_mismatch: what to do if the checkpoint was saved by another number of ranks, by other nodes, or, if the state
            depends on it, with another `bucket_mb`. "error" raises ValueError; "average" combines the states of all
            ranks; "reset" starts with a new state. For the latter two each machine needs the files of all ranks. With
            `compression` both are about residuals. The state of `optimizer` is the same on all ranks and continues.
        fallback: whether to load an older checkpoint, with a RuntimeWarning, if one is damaged.
        compression: what `thinwire.compress` returned for this model; None with a thinwire optimizer.
        step: load the newest checkpoint that was saved with this `step`; None for the newest of all. `save` keeps the
            last three checkpoints unless `keep` says otherwise.

    Returns:
        What was loaded, or None if there is no checkpoint and `step` is None.

    Raises:
        CorruptCheckpoint: on every rank, if a file that any rank needs is damaged, or if ranks have checkpoints, but
            none in common.
        TypeError: as in `save`.
        ValueError: on every rank, if the checkpoint is of another class, with or without compression, or of other
            ranks with `on_mismatch="error"`, or does not fit; also if there is no checkpoint of the given step.
        RuntimeError: on every rank, if the model has other entries, shapes or dtypes, or if ranks give different steps.
    """
    return LoadOperation(path, model, optimizers_of(optimizer, compression), on_mismatch, fallback, step).run()


def load_state_dict(
    optimizer: Optimizer | Compression, state_dict: dict[str, Any], *, on_mismatch: OnMismatch = "error"
) -> bool:
    """Load a state dict that has the states of all ranks, on any number of ranks. All ranks call it.

    `optimizer.load_state_dict` does the same for the ranks that saved. Use this function if a trainer saved the state
    dict, after `consolidate_state_dict()`, and you resume with other ranks. Load the model first.

    Args:
        optimizer: a thinwire optimizer, also one that a framework has wrapped, or what `thinwire.compress` returned.
        state_dict: the same on all ranks.
        on_mismatch: as in `load`.

    Returns:
        Whether every rank has exactly the state that it saved.

    Raises:
        TypeError: on this rank alone, if the optimizer is not thinwire's; on every rank, if `state_dict` is not a dict.
        ValueError: on every rank, if the state dict does not fit, or lacks ranks.
    """
    return load_consolidated(optimizer, state_dict, on_mismatch)
