"""Writing a checkpoint in stages. All ranks complete a stage before any of them begins the next."""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from thinwire._callers import warn_user
from thinwire._checks import INT64_MAX, is_integer
from thinwire._unwrap import unwrapped_model
from thinwire._version import __version__
from thinwire.checkpoint._directory import CheckpointDirectory, CheckpointName, random_token
from thinwire.checkpoint._files import make_directories, sync_directory, write_bytes, write_tensors
from thinwire.checkpoint._lock import DirectoryLock, release
from thinwire.checkpoint._manifest import MANIFEST, MODEL, Entry, Manifest, rank_file
from thinwire.checkpoint._model import check_model
from thinwire.checkpoint._optimizers import Optimizers
from thinwire.checkpoint._rank_contents import rank_contents
from thinwire.errors import name_ranks
from thinwire.optimizers.agreement import require_same
from thinwire.transport.failures import on_all_ranks


@dataclass(frozen=True)
class _Proposal:
    """What each rank sends to the others before anything is written."""

    step: int
    optimizer: str
    synchronized: bool
    token: str


class SaveOperation:
    """One call of `save` on one rank.

    Args:
        path: the directory of checkpoints.
        model: the model, with or without wrappers.
        optimizers: the optimizer, and the compression of its gradients, if any.
        step: the number of steps taken, as the user counts them.
        extra: further data that this rank saves.
        keep: how many checkpoints to keep; None for all.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        model: nn.Module,
        optimizers: Optimizers,
        step: int,
        extra: dict[str, Any] | None,
        keep: int | None,
    ) -> None:
        self._path, self._model, self._optimizers = path, model, optimizers
        self._step, self._extra, self._keep = step, extra, keep

    def run(self) -> Path:
        """Run all stages.

        Raises:
            Exception: on every rank, if a stage fails on any. The temporary directory is removed.
        """
        peers = self._optimizers.peers
        self._agree(peers.gather(on_all_ranks(peers, self._propose)))
        if peers.size > 1:
            self._optimizers.wire._make_replicas_equal()
        on_all_ranks(peers, self._collect)
        self._lock()
        try:
            entries = peers.gather(on_all_ranks(peers, self._write_own))
            on_all_ranks(peers, lambda: self._write_shared(entries))
            on_all_ranks(peers, self._publish)
        except Exception:
            # All ranks of a directory do this at the same time. The next save removes whatever is left.
            shutil.rmtree(self._temporary, ignore_errors=True)
            raise
        self._remove_old()
        return self._directory.final(self._name)

    def _propose(self) -> _Proposal:
        check_model(self._model)
        _check(self._step, self._extra, self._keep)
        self._optimizers.check()
        self._directory = CheckpointDirectory(Path(self._path))
        self._module = unwrapped_model(self._model)
        self._optimizers.check_saveable()
        synchronized = self._optimizers.wire._rule.is_synchronized
        return _Proposal(self._step, self._optimizers.name, synchronized, random_token())

    def _agree(self, proposals: list[_Proposal]) -> None:
        _require_same("step", [proposal.step for proposal in proposals])
        _require_same("optimizer", [proposal.optimizer for proposal in proposals])
        synchronized = [repr(proposal.synchronized) for proposal in proposals]
        require_same("whether local steps were taken since they were synchronized", synchronized)
        self._token = proposals[0].token
        self._temporary = self._directory.temporary(self._token)

    def _collect(self) -> None:
        self._contents = rank_contents(self._module, self._optimizers, self._extra or {})
        make_directories(self._directory.path)

    def _lock(self) -> None:
        """Lock the directory against other runs, and choose the name of the checkpoint."""
        peers, owner = self._optimizers.peers, self._optimizers.wire
        lock = DirectoryLock(self._directory.path, self._token, owner)
        try:
            on_all_ranks(peers, lock.try_acquire)
            on_all_ranks(peers, lock.verify)
        except BaseException:
            lock.undo()
            raise
        if not owner._at_close:
            owner._at_close.append(functools.partial(release, id(owner)))
        # List the names only now: no other run can add one any more.
        seen: list[list[CheckpointName]] = peers.gather(on_all_ranks(peers, self._directory.names))
        newest = max((name.sequence for names in seen for name in names), default=0)
        self._name = CheckpointName(newest + 1, self._step)
        self._everywhere = set.intersection(*map(set, seen)) | {self._name}

    def _write_own(self) -> Entry:
        # Free the space before writing. Several ranks may sweep at the same time and find files that are gone already;
        # _remove_old() reports what is left.
        self._directory.sweep(exclude=self._token, ignore_errors=True)
        self._temporary.mkdir(exist_ok=True)
        file = self._temporary / rank_file(self._optimizers.peers.rank)
        return write_tensors(file, self._contents, "`extra`, the optimizer's state and the model's buffers")

    def _write_shared(self, entries: list[Entry]) -> None:
        self._writes_shared = self._directory.is_lowest_rank(self._token, self._optimizers.peers.rank)
        if not self._writes_shared:
            return
        state = self._module.state_dict()
        files = {MODEL: write_tensors(self._temporary / MODEL, state, "the model's state dict")}
        files |= {rank_file(rank): entry for rank, entry in enumerate(entries)}
        wire = self._optimizers.wire
        manifest = Manifest(
            thinwire=__version__,
            step=self._step,
            optimizer=self._optimizers.name,
            world_size=self._optimizers.peers.size,
            nodes=wire._topology.nodes,
            bucket_mb=wire._bucket_mb,
            files=files,
        )
        write_bytes(self._temporary / MANIFEST, manifest.encode())
        sync_directory(self._temporary)

    def _publish(self) -> None:
        if self._writes_shared:
            self._directory.publish(self._token, self._name)

    def _remove_old(self) -> None:
        if not self._writes_shared:
            return
        try:
            if self._keep is not None:
                # After a crash a machine may have checkpoints that others lack. Keep enough of those that all have.
                names, everywhere = self._directory.names(), sorted(self._everywhere)
                kept = {*names[-self._keep :], *everywhere[-self._keep :]}
                self._directory.discard([name for name in names if name not in kept])
            self._directory.sweep()
        except OSError as error:
            # A file may be in use or belong to another user. The new checkpoint is safe, so the run continues.
            warn_user(
                f"{self._directory.final(self._name)} is saved, but an old checkpoint could not be removed: {error}. "
                "The next save tries again"
            )


def _require_same(name: str, values: Sequence[int | str]) -> None:
    if len(set(values)) > 1:
        listed = [
            f"{name}={value} on {name_ranks([rank for rank, other in enumerate(values) if other == value])}"
            for value in sorted(set(values))
        ]
        raise ValueError(f"ranks save different {name}s: {', '.join(listed)}. All ranks must save the same {name}")


def _check(step: object, extra: object, keep: object) -> None:
    if not is_integer(step, 0, INT64_MAX):
        raise ValueError(f"step={step!r}: expected the number of steps taken, an integer")
    if extra is not None and not isinstance(extra, dict):
        raise TypeError(f"extra is {type(extra).__name__}, expected a dict")
    if keep is not None and not is_integer(keep, 1, INT64_MAX):
        raise ValueError(f"keep={keep!r}: expected the number of checkpoints to keep, at least 1, or None for all")
