"""Writing a checkpoint, one stage after the other; all ranks end a stage before any begins the next."""

from __future__ import annotations

import functools
import os
import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from thinwire._checks import MANY, is_integer
from thinwire._version import __version__
from thinwire.checkpoint import _contents
from thinwire.checkpoint._files import make_directories, sync_directory, write_bytes, write_tensors
from thinwire.checkpoint._lock import Claim, release
from thinwire.checkpoint._manifest import MANIFEST, MODEL, Entry, Manifest, rank_file
from thinwire.checkpoint._store import Name, Store, draw_token
from thinwire.checkpoint._together import together
from thinwire.errors import name_ranks
from thinwire.optimizers.optimizer import WireOptimizer


@dataclass(frozen=True)
class _Proposal:
    """What a rank says before anything is written."""

    step: int
    token: str


class Saving:
    """One checkpoint on its way to the disk, as one rank sees it.

    Args:
        path: the directory of checkpoints.
        model: whatever is wrapped around it.
        optimizer: of thinwire.
        step: by the user's count.
        extra: what else this rank saves.
        keep: how many checkpoints to keep, None for all.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        model: nn.Module,
        optimizer: WireOptimizer,
        step: int,
        extra: dict[str, Any] | None,
        keep: int | None,
    ) -> None:
        self._path, self._model, self._optimizer = path, model, optimizer
        self._step, self._extra, self._keep = step, extra, keep

    def run(self) -> Path:
        """All stages.

        Raises:
            Exception: on every rank, when a stage fails on any; the temporary directory is gone then.
        """
        peers = self._optimizer._peers
        self._agree(peers.gather(together(peers, self._propose)))
        self._lock()
        try:
            entries = peers.gather(together(peers, self._write_own))
            together(peers, lambda: self._write_shared(entries))
            together(peers, self._publish)
        except Exception:
            # All ranks of a directory do this at once. What they leave the next one to save removes.
            shutil.rmtree(self._temporary, ignore_errors=True)
            raise
        self._remove_old()
        return self._store.final(self._name)

    def _propose(self) -> _Proposal:
        _check(self._model, self._step, self._extra, self._keep)
        self._store = Store(Path(self._path))
        self._module = _contents.bare(self._model)
        self._contents = _contents.of_rank(self._module, self._optimizer, self._extra or {})
        make_directories(self._store.path)
        return _Proposal(self._step, draw_token())

    def _agree(self, proposals: list[_Proposal]) -> None:
        steps = [proposal.step for proposal in proposals]
        if len(set(steps)) > 1:
            told = [
                f"step={step} on {name_ranks([rank for rank, other in enumerate(steps) if other == step])}"
                for step in sorted(set(steps))
            ]
            raise ValueError(f"ranks save different steps: {', '.join(told)}. A checkpoint is of one step on all ranks")
        self._token = proposals[0].token
        self._temporary = self._store.temporary(self._token)

    def _lock(self) -> None:
        """Keep other runs out of the directory, and choose the name of the checkpoint."""
        peers, claim = self._optimizer._peers, Claim(self._store.path, self._token, self._optimizer)
        try:
            together(peers, claim.stake)
            together(peers, claim.confirm)
        except BaseException:
            claim.withdraw()
            raise
        if not self._optimizer._at_close:
            self._optimizer._at_close.append(functools.partial(release, id(self._optimizer)))
        # Only now is nobody else at it.
        seen: list[list[Name]] = peers.gather(together(peers, self._store.names))
        newest = max((name.sequence for names in seen for name in names), default=0)
        self._name = Name(newest + 1, self._step)
        self._everywhere = set.intersection(*map(set, seen)) | {self._name}

    def _write_own(self) -> Entry:
        # Before anything is written, because the room may be needed. Several ranks may be at it at the same time, so
        # that each finds some of it gone; whatever stays is told at the end.
        self._store.sweep(besides=self._token, ignore_errors=True)
        self._temporary.mkdir(exist_ok=True)
        file = self._temporary / rank_file(self._optimizer._peers.rank)
        return write_tensors(file, self._contents, "`extra`, parameter groups and the model's buffers")

    def _write_shared(self, entries: list[Entry]) -> None:
        self._leads = self._store.leads(self._token, self._optimizer._peers.rank)
        if not self._leads:
            return
        state = self._module.state_dict()
        files = {MODEL: write_tensors(self._temporary / MODEL, state, "the model's state dict")}
        files |= {rank_file(rank): entry for rank, entry in enumerate(entries)}
        manifest = Manifest(
            thinwire=__version__,
            step=self._step,
            optimizer=type(self._optimizer).__name__,
            world_size=self._optimizer._peers.size,
            nodes=self._optimizer._topology.nodes,
            bucket_mb=self._optimizer._bucket_mb,
            files=files,
        )
        write_bytes(self._temporary / MANIFEST, manifest.encode())
        sync_directory(self._temporary)

    def _publish(self) -> None:
        if self._leads:
            self._store.publish(self._token, self._name)

    def _remove_old(self) -> None:
        if not self._leads:
            return
        try:
            if self._keep is not None:
                # A machine may have one that others lack, because of a crash: that one does not count for them.
                names, everywhere = self._store.names(), sorted(self._everywhere)
                kept = {*names[-self._keep :], *everywhere[-self._keep :]}
                self._store.discard([name for name in names if name not in kept])
            self._store.sweep()
        except OSError as error:
            # It may be in use, or have become somebody else's. That is no reason to stop a run whose state is safe.
            warnings.warn(
                f"{self._store.final(self._name)} is saved, but something old could not be removed: {error}. The next "
                "save tries again",
                RuntimeWarning,
                stacklevel=4,
            )


def _check(model: object, step: object, extra: object, keep: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is {type(model).__name__}, expected a torch.nn.Module")
    if not is_integer(step, 0, MANY):
        raise ValueError(f"step={step!r}: expected how many steps have been taken, an integer")
    if extra is not None and not isinstance(extra, dict):
        raise TypeError(f"extra is {type(extra).__name__}, expected a dict")
    if keep is not None and not is_integer(keep, 1, MANY):
        raise ValueError(f"keep={keep!r}: expected how many checkpoints to keep, at least 1, or None for all")
