"""Loading a checkpoint in stages. All ranks complete a stage before any of them begins the next.

All ranks load the same checkpoint. They read it and check it against their models and optimizers before any of them
changes anything. If a change fails on one rank, all ranks undo it.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from thinwire._callers import warn_user
from thinwire._checks import INT64_MAX, is_integer
from thinwire._unwrap import unwrapped_model
from thinwire.checkpoint._directory import CheckpointDirectory, CheckpointName
from thinwire.checkpoint._files import damaged, read_bytes, read_tensors
from thinwire.checkpoint._manifest import MANIFEST, MODEL, Manifest, decode, rank_file
from thinwire.checkpoint._mismatch import OnMismatch, check_policy, differences_from
from thinwire.checkpoint._model import check_model, check_model_state, checked_model
from thinwire.checkpoint._optimizers import Optimizers
from thinwire.checkpoint._random_states import check_random_states, restore_random_states
from thinwire.checkpoint._rank_contents import checked_rank
from thinwire.checkpoint._snapshot import Snapshot
from thinwire.errors import CorruptCheckpoint, PeerLost, name_ranks
from thinwire.optimizers import reshard
from thinwire.optimizers.agreement import require_same
from thinwire.optimizers.reshard import Policy, SavedRun
from thinwire.transport.failures import on_all_ranks

T = TypeVar("T")

Contents = dict[str, Any]

_MOST_LISTED = 8
"""How many missing files an error lists; it counts the others."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that `load` has loaded."""

    path: Path
    """Its directory."""
    step: int
    """The step that was given to `save`."""
    extra: dict[str, Any]
    """What this rank gave to `save`. If not `exact`, what rank 0 gave, on all ranks."""
    exact: bool
    """Whether every rank has exactly the state that it saved, random states included."""


class LoadOperation:
    """One call of `load` on one rank.

    Args:
        path: the directory of checkpoints.
        model: the model, with or without wrappers.
        optimizers: the optimizer, and the compression of its gradients, if any.
        on_mismatch: what to do with the state of another number or order of ranks.
        fallback: whether to load an older checkpoint if one is damaged.
        step: the step of the checkpoint to load; None for the newest.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        model: nn.Module,
        optimizers: Optimizers,
        on_mismatch: OnMismatch,
        fallback: bool,
        step: int | None,
    ) -> None:
        self._path, self._model, self._optimizers = path, model, optimizers
        self._on_mismatch: OnMismatch = on_mismatch
        self._fallback = fallback
        self._step = step
        self._peers = optimizers.peers

    def run(self) -> Checkpoint | None:
        """Load the newest checkpoint that all ranks have, or the newest of the given step; None if no rank has any.

        Raises:
            Exception: on every rank, if any rank cannot load it.
        """
        found = self._peers.gather((on_all_ranks(self._peers, self._find), self._step))
        require_same("the step to load", [repr(step) for _, step in found])
        seen: list[list[CheckpointName]] = [names for names, _ in found]
        if not any(seen) and self._step is None:
            return None
        names = sorted(set.intersection(*map(set, seen)))
        if not names and any(seen):
            raise CorruptCheckpoint(_nothing_in_common(seen))
        if self._step is not None:
            names = self._of_step(names, self._step)
        while True:
            name = names.pop()
            try:
                return self._load(name)
            except CorruptCheckpoint as damage:
                if not self._fallback:
                    raise
                if not names:
                    raise CorruptCheckpoint(f"{damage}. There is no older checkpoint to fall back to") from damage
                warn_user(
                    f"{damage}. Because of fallback=True the checkpoint before it, {names[-1]}, is tried. Steps "
                    "after it are lost"
                )

    def _of_step(self, names: list[CheckpointName], step: int) -> list[CheckpointName]:
        """The checkpoints of a step. A run that went back to an earlier step may have saved it twice."""
        chosen = [name for name in names if name.step == step]
        if not chosen:
            steps = ", ".join(map(str, sorted({name.step for name in names}))) or "none"
            raise ValueError(f"step={step}: {self._directory.path} has no checkpoint of this step; it has {steps}")
        return chosen

    def _find(self) -> list[CheckpointName]:
        check_model(self._model)
        check_policy(self._on_mismatch)
        if self._step is not None and not is_integer(self._step, 0, INT64_MAX):
            raise ValueError(f"step={self._step!r}: expected the step of a checkpoint, or None for the newest")
        self._optimizers.check()
        self._optimizers.check_loadable()
        self._directory = CheckpointDirectory(Path(self._path))
        self._module = unwrapped_model(self._model)
        return self._directory.names()

    def _load(self, name: CheckpointName) -> Checkpoint:
        directory = self._directory.final(name)
        manifest = self._agreed_manifest(directory, name)
        on_all_ranks(self._peers, lambda: self._check_class(manifest, name))
        differences = differences_from(self._optimizers.wire, manifest.nodes, manifest.bucket_mb)
        if not differences:
            extra = self._restore(directory, manifest)
        elif not self._optimizers.reshards:
            raise ValueError(
                f"{name} was saved by {' and '.join(differences)}: each rank of {self._optimizers.name} has its own "
                "parameters and inner state, so resume on the ranks that saved. To go on with other ranks, call "
                "synchronize() before you save, and load the model into a new run"
            )
        elif self._on_mismatch == "error":
            raise ValueError(
                f"{name} was saved by {' and '.join(differences)}: the state of a rank does not fit. Resume with the "
                "saved configuration; or choose on_mismatch='average', which combines the states of all ranks, or "
                "'reset', which starts with a new state"
            )
        else:
            extra = self._reshard(directory, manifest, self._on_mismatch)
        return Checkpoint(directory, manifest.step, extra, exact=not differences)

    # Does the checkpoint fit this run? -------------------------------------------------------------------------------

    def _agreed_manifest(self, directory: Path, name: CheckpointName) -> Manifest:
        manifest = on_all_ranks(self._peers, lambda: _read_manifest(directory, name))
        described = self._peers.gather(manifest.common())
        differing = [rank for rank, other in enumerate(described) if other != described[0]]
        if differing:
            raise CorruptCheckpoint(
                f"{name} is not the same checkpoint on all machines: {MANIFEST} of {name_ranks(differing)} differs "
                "from that of rank 0"
            )
        return manifest

    def _check_class(self, manifest: Manifest, name: CheckpointName) -> None:
        own = self._optimizers.name
        if manifest.optimizer != own:
            raise ValueError(f"{name} is a checkpoint of {manifest.optimizer}, this optimizer is {own}")

    # Restore it ------------------------------------------------------------------------------------------------------

    def _restore(self, directory: Path, manifest: Manifest) -> dict[str, Any]:
        """Restore the state that each rank saved."""
        model_state, own = self._on_all_ranks(directory, lambda: self._read(directory, manifest, self._peers.rank))

        def check() -> None:
            check_model_state(self._module, model_state)
            with warnings.catch_warnings(record=True):  # load_state_dict() gives the same warnings again
                self._optimizers.check_contents(own)
            check_random_states(self._module, own["random"])

        self._on_all_ranks(directory, check)

        def apply() -> None:
            self._optimizers.load(own)
            restore_random_states(self._module, own["random"])

        self._change(directory, model_state, apply)
        return own["extra"]

    def _reshard(self, directory: Path, manifest: Manifest, how: Policy) -> dict[str, Any]:
        """Make states for these ranks from the states of the saved run."""

        def read() -> tuple[Contents, Contents, reshard.JoinedState]:
            _require_all_files(directory, manifest)
            model_state, first = self._read(directory, manifest, 0)
            check_model_state(self._module, model_state)
            self._optimizers.check_plain(first)

            def state_of(rank: int) -> dict[str, Any]:
                # One at a time: memory may be too small for all of them.
                contents = first if rank == 0 else self._read_rank(directory, manifest, rank)
                return self._optimizers.wire_state(contents)

            run = SavedRun(manifest.nodes, manifest.bucket_mb, state_of)
            return model_state, first, reshard.read(self._optimizers.wire, run, how)

        model_state, first, joined = self._on_all_ranks(directory, read)

        def apply() -> None:
            reshard.load(self._optimizers.wire, joined)
            self._optimizers.load_plain(first)

        self._change(directory, model_state, apply)
        return first["extra"]

    def _read(self, directory: Path, manifest: Manifest, rank: int) -> tuple[Contents, Contents]:
        """The state of the model on a rank, and the contents of that rank's file."""
        path = directory / MODEL
        model_state = checked_model(path, read_tensors(path, manifest.files[MODEL]))
        own = self._read_rank(directory, manifest, rank)
        model_state.update(own["model"])  # in place: an attribute of the state dict holds the versions of modules
        return model_state, own

    def _read_rank(self, directory: Path, manifest: Manifest, rank: int) -> Contents:
        path = directory / rank_file(rank)
        return checked_rank(path, read_tensors(path, manifest.files[rank_file(rank)]), self._optimizers)

    def _change(self, directory: Path, model_state: Contents, apply: Callable[[], None]) -> None:
        """Load the model, then call `apply`, on all ranks or on none."""
        snapshot = on_all_ranks(self._peers, lambda: Snapshot(self._module, self._optimizers))
        models_loaded = False
        try:
            self._on_all_ranks(directory, lambda: self._module.load_state_dict(model_state, strict=True))
            # Set it only after all models are loaded: restoring the optimizer completes an exchange that backward has
            # begun, which all ranks must do together.
            models_loaded = True
            self._on_all_ranks(directory, apply)
        except BaseException:
            snapshot.restore(optimizers=models_loaded)
            raise

    def _on_all_ranks(self, directory: Path, action: Callable[[], T]) -> T:
        """Run `action` on all ranks, and raise only errors that `load` documents."""

        def with_documented_errors() -> T:
            with _documented_errors(directory):
                return action()

        return on_all_ranks(self._peers, with_documented_errors)


def _read_manifest(directory: Path, name: CheckpointName) -> Manifest:
    path = directory / MANIFEST
    try:
        manifest = decode(read_bytes(path))
    except ValueError as error:
        raise damaged(path, str(error)) from error
    except RecursionError as error:
        raise damaged(path, "is nested too deeply") from error
    if manifest.step != name.step:
        raise damaged(path, f"is of step {manifest.step}, but the name of its directory says step {name.step}")
    return manifest


@contextmanager
def _documented_errors(directory: Path) -> Iterator[None]:
    """Convert any exception that forged or unsuitable data may cause into one that `load` documents."""
    try:
        yield
    except Exception as error:
        if isinstance(error, (CorruptCheckpoint, PeerLost, Warning)) or type(error) in (ValueError, RuntimeError):
            raise
        raise ValueError(f"{directory} cannot be loaded: {type(error).__name__}: {error}") from error


def _require_all_files(directory: Path, manifest: Manifest) -> None:
    missing = [file for file in manifest.files if not (directory / file).exists()]
    if missing:
        more = len(missing) - _MOST_LISTED
        listed = ", ".join(missing[:_MOST_LISTED]) + (f" and {more} more" if more > 0 else "")
        raise CorruptCheckpoint(
            f"{directory} lacks {listed}. To resume with other ranks, each rank needs the files of all saved ranks. If "
            f"every machine has its own directory, copy all rank-….pt files into each of them, beside its own {MODEL} "
            f"and {MANIFEST}"
        )


def _nothing_in_common(seen: list[list[CheckpointName]]) -> str:
    newest: dict[str, list[int]] = {}
    for rank, names in enumerate(seen):
        newest.setdefault(str(names[-1]) if names else "none", []).append(rank)
    listed = ", ".join(f"{name} on {name_ranks(ranks)}" for name, ranks in newest.items())
    return (
        f"no checkpoint is visible to all ranks; the newest are: {listed}. Check `path` on every machine, and whether "
        "one has lost its files. To start from the beginning, remove all checkpoints"
    )
