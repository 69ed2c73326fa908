"""Checkpoints: saved by all ranks together, whole or not at all, and known by their digests.

    opt = thinwire.Birder(model.parameters(), lr=1e-3)
    found = checkpoint.load("checkpoints", model, opt)               # None at the very first start
    start = found.step if found is not None else 0
    for step in range(start, steps):
        ...
        if (step + 1) % 500 == 0:
            checkpoint.save("checkpoints", model, opt, step + 1, extra={"schedule": schedule.state_dict()})

`save` and `load` are called by all ranks of the optimizer's process group. With as many ranks as saved, a run that is
resumed goes on, to the bit, as if it had never stopped: it has the model, each rank's optimizer state, the random
states of torch (CPU, and the CUDA devices of the model) and of Python's `random`, and what you put into `extra`: the
scheduler's state, the sampler's, a GradScaler's, NumPy's random state as numbers. Wrap the model in DDP before you
load: DDP gives every rank the model of rank 0.

That is all a worker needs under `torchrun --max-restarts`, see `examples/resume.py`. Set
TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun: its store keeps the addresses of workers that have died, and those
that are started after them may try to reach them (pytorch/pytorch#135712).

What is on the disk::

    checkpoints/
      000016-step-1000/
      000017-step-1200/        a number that orders them, then the step
        manifest.json          what was saved by whom; size and SHA-256 of every file, and of itself
        model.pt               the state dict of the model, for anybody to use
        rank-00000.pt …        one per rank: its optimizer's state, its buffers, its random states, its `extra`
      .lock                    held by the run that writes to the directory; says which process that is

Between two synchronisations of 0/1 Adam, when replicas differ, rank files hold each rank's model as well, and model.pt
is that of one rank: call `opt.synchronize()` before you save one that is to be used.

The directory may be on a file system that all machines share, or on a local disk of each: a machine keeps the files of
its own ranks then.

One run at a time writes to a directory. From its first `save` on a run holds an OS lock (flock) on `.lock`, until its
optimizer is closed or collected, or its processes end. A second run that saves to the same directory gets a
BlockingIOError on all its ranks before it has written anything. The lock ends with the process that holds it, be it
killed: nothing has to be removed before a restart, and a `.lock` that is left behind locks nothing. Ranks of one run
share the lock, and so do optimizers of one process. `load` needs no lock: a checkpoint can be evaluated while its run
goes on. On file systems without locks `save` says so in a RuntimeWarning and goes on without one; on NFS the lock holds
between machines.

A checkpoint is written under a temporary name, brought to the disk (fsync), and then renamed. A crash at any moment
leaves those before it whole; what it leaves half-written the next `save` removes. If machines crash between their
renames, `load` takes the newest that all of them have.

A file that is missing, truncated or altered is recognised before anything is loaded, and raises
`thinwire.errors.CorruptCheckpoint` on every rank, naming it. Everything is read by `torch.load(weights_only=True)`: a
forged checkpoint cannot run code, however well its digests match. Digests tell damage; they are no signature, and say
nothing of who wrote a file.

Why not torch.distributed.checkpoint: its `.metadata` is unpickled, which runs whatever code is in it; it expects a file
system that all ranks share; and of tensors that have the same name on all ranks, as optimizer states do, it keeps one.

Code that calls `opt.state_dict()` itself works as well. Each rank has a state of its own, so let every rank save and
load its own: to a file with its rank in the name, or with torch.distributed.checkpoint under a key with its rank in it.
Where only rank 0's is saved (torch.distributed.checkpoint without such keys, most trainers), all ranks load rank 0's.
With Birder, Lamb and SketchedAMSGrad this is a RuntimeWarning: replicas stay equal, but what the other ranks had is
lost, averages of their own gradients, which come back within some 1/(1-β) steps, and errors that they still owed, in
whose place rank 0's count once for every rank. The other optimizers keep something for the part of the model that a
rank answers for, which rank 0 has for its own part only: do not do it with them.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from torch import nn

from thinwire.checkpoint._load import Checkpoint, Loading, OnMismatch
from thinwire.checkpoint._save import Saving
from thinwire.optimizers.optimizer import WireOptimizer

__all__ = ["Checkpoint", "load", "save"]


def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: WireOptimizer,
    step: int,
    *,
    extra: dict[str, Any] | None = None,
    keep: int | None = 3,
) -> Path:
    """Save a checkpoint. To be called by all ranks, after `optimizer.step()`.

    Args:
        path: the directory of checkpoints; made if it does not exist.
        model: a module; what DistributedDataParallel and torch.compile wrap around one is not saved.
        optimizer: of thinwire.
        step: how many steps have been taken, by your own count; the same on all ranks.
        extra: what this rank wants back from `load`: tensors, numbers, strings, and lists, tuples and dicts of them.
        keep: how many checkpoints stay, this one included; None for all of them.

    Returns:
        The directory of the checkpoint.

    Raises:
        TypeError, ValueError: on every rank, for arguments that are wrong on any.
        BlockingIOError: on every rank, when another run saves to this directory, or to that of any rank.
        OSError: on every rank, when any cannot write its part; with the errno, and of the class, of the first that
            cannot, and the ranks in its text.
        RuntimeError: on every rank, when any is between backward and `step()`.
    """
    return Saving(path, model, _wire(optimizer), step, extra, keep).run()


def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: WireOptimizer,
    *,
    on_mismatch: OnMismatch = "error",
    fallback: bool = False,
) -> Checkpoint | None:
    """Load the newest checkpoint that all ranks have. To be called by all ranks, before or after `thinwire.attach`.

    All ranks load it or none does. Everything is read, and checked against the model and the optimizer, on all ranks
    before anything is changed. When loading fails all the same, in a hook of a module for example, all ranks go back to
    what they had: parameters, buffers, extra state of modules, the optimizer's state and random states. For that a copy
    of all of these is kept in host memory until the checkpoint is loaded: as much again as the model and its optimizer
    take, besides what is read from the files.

    Args:
        path: the directory of checkpoints.
        model: as it was given to `save`: the same parameters and buffers.
        optimizer: of the same class, with the same parameter groups.
        on_mismatch: what to do when other ranks have saved: more or fewer of them, or other nodes; or, where states
            depend on it, with another `bucket_mb`. "error" refuses; "average" makes one state of those of all ranks;
            "reset" begins with a new one. Each machine needs the files of all ranks for the latter two.
        fallback: whether to take the checkpoint before, with a RuntimeWarning, when one is damaged.

    Returns:
        What was loaded, or None if there is no checkpoint at all.

    Raises:
        CorruptCheckpoint: on every rank, when a file that any of them needs is damaged, or when ranks have checkpoints,
            but none in common.
        ValueError: on every rank, when the checkpoint is of another class, or of other ranks with
            `on_mismatch="error"`, or does not fit.
        RuntimeError: on every rank, when the model is another one: other entries, shapes or dtypes.
    """
    return Loading(path, model, _wire(optimizer), on_mismatch, fallback).run()


def _wire(optimizer: object) -> WireOptimizer:
    # It brings the peers who would have to hear of anything wrong with it.
    if not isinstance(optimizer, WireOptimizer):
        raise TypeError(
            f"optimizer is {type(optimizer).__module__}.{type(optimizer).__name__}, expected one of thinwire's, for "
            "example thinwire.Birder"
        )
    optimizer._peers.check_initialized_first()
    return optimizer
