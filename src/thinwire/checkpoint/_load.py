"""Loading a checkpoint, one stage after the other; all ranks end a stage before any begins the next.

All ranks take the same one. They read it, and check all of it against their models and optimizers, before any of them
changes anything. What fails on one rank when they do is undone on all.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from torch import nn

from thinwire.checkpoint import _contents
from thinwire.checkpoint._before import Before
from thinwire.checkpoint._contents import Contents, checked_model, checked_rank
from thinwire.checkpoint._files import damaged, read_bytes, read_tensors
from thinwire.checkpoint._manifest import MANIFEST, MODEL, Manifest, decode, rank_file
from thinwire.checkpoint._store import Name, Store
from thinwire.checkpoint._together import together
from thinwire.errors import CorruptCheckpoint, PeerLost, name_ranks
from thinwire.optimizers import reshard
from thinwire.optimizers import state_dict as state_dicts
from thinwire.optimizers.optimizer import WireOptimizer
from thinwire.optimizers.reshard import Policy, SavedRun

T = TypeVar("T")

OnMismatch = Literal["error", "average", "reset"]


@dataclass(frozen=True)
class Checkpoint:
    """What `load` has loaded."""

    path: Path
    """Its directory."""
    step: int
    """What `save` was told."""
    extra: dict[str, Any]
    """What this rank gave to `save`; rank 0's on all ranks if not `exact`."""
    exact: bool
    """Whether each rank has got its own state back, random numbers included."""


class Loading:
    """One call of `load`, as one rank sees it.

    Args:
        path: the directory of checkpoints.
        model: whatever is wrapped around it.
        optimizer: of thinwire.
        on_mismatch: what to do with the state of another number or order of ranks.
        fallback: whether to go back to an older checkpoint when one is damaged.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        model: nn.Module,
        optimizer: WireOptimizer,
        on_mismatch: OnMismatch,
        fallback: bool,
    ) -> None:
        self._path, self._model, self._optimizer = path, model, optimizer
        self._on_mismatch: OnMismatch = on_mismatch
        self._fallback = fallback
        self._peers = optimizer._peers

    def run(self) -> Checkpoint | None:
        """Load the newest checkpoint that all ranks have; None if no rank has any.

        Raises:
            Exception: on every rank, when it cannot be loaded on any.
        """
        seen: list[list[Name]] = self._peers.gather(together(self._peers, self._look))
        if not any(seen):
            return None
        names = sorted(set.intersection(*map(set, seen)))
        if not names:
            raise CorruptCheckpoint(_nothing_in_common(seen))
        while True:
            name = names.pop()
            try:
                return self._take(name)
            except CorruptCheckpoint as damage:
                if not self._fallback:
                    raise
                if not names:
                    raise CorruptCheckpoint(f"{damage}. No checkpoint before it is left to fall back to") from damage
                warnings.warn(
                    f"{damage}. With fallback=True the checkpoint before it, {names[-1]}, is tried: what came after "
                    "it is lost",
                    RuntimeWarning,
                    stacklevel=3,
                )

    def _look(self) -> list[Name]:
        if not isinstance(self._model, nn.Module):
            raise TypeError(f"model is {type(self._model).__name__}, expected a torch.nn.Module")
        if self._on_mismatch not in get_args(OnMismatch):
            raise ValueError(f"on_mismatch={self._on_mismatch!r}: expected 'error', 'average' or 'reset'")
        if any(self._optimizer._session.encoded):
            raise RuntimeError(
                "checkpoint.load() between backward and step(): gradients of this step have been sent already. Load "
                "before backward, or after step()"
            )
        self._store = Store(Path(self._path))
        self._module = _contents.bare(self._model)
        return self._store.names()

    def _take(self, name: Name) -> Checkpoint:
        directory = self._store.final(name)
        manifest = self._agreed_manifest(directory, name)
        self._refuse_other_class(manifest, name)
        differences = self._differences(manifest)
        if not differences:
            extra = self._restore(directory, manifest)
        elif self._on_mismatch == "error":
            raise ValueError(
                f"{name} was saved by {' and '.join(differences)}: what a rank keeps does not fit. Resume with what "
                "was saved; or choose on_mismatch='average', which makes one state of those of all ranks, or 'reset', "
                "which begins with a new one"
            )
        else:
            extra = self._adopt(directory, manifest, self._on_mismatch)
        return Checkpoint(directory, manifest.step, extra, exact=not differences)

    # Whose it is -----------------------------------------------------------------------------------------------------

    def _agreed_manifest(self, directory: Path, name: Name) -> Manifest:
        manifest = together(self._peers, lambda: _read_manifest(directory, name))
        described = self._peers.gather(manifest.common())
        strangers = [rank for rank, other in enumerate(described) if other != described[0]]
        if strangers:
            raise CorruptCheckpoint(
                f"{name} is not the same checkpoint everywhere: {MANIFEST} of {name_ranks(strangers)} differs from "
                "that of rank 0"
            )
        return manifest

    def _refuse_other_class(self, manifest: Manifest, name: Name) -> None:
        own = type(self._optimizer).__name__
        if manifest.optimizer != own:
            raise ValueError(f"{name} is a checkpoint of {manifest.optimizer}, this optimizer is {own}")

    def _differences(self, manifest: Manifest) -> list[str]:
        """What keeps ranks from taking up the states that were saved, for people to read."""
        optimizer, differences = self._optimizer, []
        if manifest.world_size != self._peers.size:
            differences.append(f"{manifest.world_size} ranks (now {self._peers.size})")
        elif manifest.nodes != optimizer._topology.nodes:
            differences.append(f"nodes {_in_brackets(manifest.nodes)} (now {_in_brackets(optimizer._topology.nodes)})")
        # States of equal nodes and class depend on buckets both or not at all.
        cut = optimizer.param_groups[0]["wire_buckets"] != "any"
        if cut and manifest.bucket_mb != optimizer._bucket_mb:
            differences.append(f"bucket_mb={manifest.bucket_mb} (now {optimizer._bucket_mb})")
        return differences

    # What becomes of it ----------------------------------------------------------------------------------------------

    def _restore(self, directory: Path, manifest: Manifest) -> dict[str, Any]:
        """Give every rank back what it had."""
        model_state, own = self._together(directory, lambda: _read(directory, manifest, self._peers.rank))

        def check() -> None:
            _contents.check_model_state(self._module, model_state)
            with warnings.catch_warnings(record=True):  # what is warned of comes again when it is loaded
                state_dicts.check(self._optimizer, own["optimizer"])
            _contents.check_random_states(self._module, own["random"])

        self._together(directory, check)

        def apply() -> None:
            self._optimizer.load_state_dict(own["optimizer"])
            _contents.restore_random_states(self._module, own["random"])

        self._change(directory, model_state, apply)
        return own["extra"]

    def _adopt(self, directory: Path, manifest: Manifest, how: Policy) -> dict[str, Any]:
        """Let ranks that are others than those that saved make a state of what there is."""

        def read() -> tuple[Contents, Contents, reshard.JoinedState]:
            _require_all(directory, manifest)
            model_state, first = _read(directory, manifest, 0)
            _contents.check_model_state(self._module, model_state)

            def state_of(rank: int) -> dict[str, Any]:
                # One after another: there may be no room for all at once.
                return (first if rank == 0 else _read_rank(directory, manifest, rank))["optimizer"]

            run = SavedRun(manifest.nodes, manifest.bucket_mb, state_of)
            return model_state, first, reshard.read(self._optimizer, run, how)

        model_state, first, joined = self._together(directory, read)
        self._change(directory, model_state, lambda: reshard.load(self._optimizer, joined))
        return first["extra"]

    def _change(self, directory: Path, model_state: Contents, apply: Callable[[], None]) -> None:
        """Load the model, then the rest, on all ranks or none."""
        before = together(self._peers, lambda: Before(self._module, self._optimizer))
        models_loaded = False
        try:
            self._together(directory, lambda: self._module.load_state_dict(model_state, strict=True))
            # Only when all have come so far: an exchange that backward has begun is ended here, by all together.
            models_loaded = True
            self._together(directory, apply)
        except BaseException:
            before.restore(optimizer=models_loaded)
            raise

    def _together(self, directory: Path, action: Callable[[], T]) -> T:
        """The same for all ranks, with errors as `load` documents them."""

        def documented() -> T:
            with _as_documented(directory):
                return action()

        return together(self._peers, documented)


def _read_manifest(directory: Path, name: Name) -> Manifest:
    path = directory / MANIFEST
    try:
        manifest = decode(read_bytes(path))
    except ValueError as error:
        raise damaged(path, str(error)) from error
    except RecursionError as error:
        raise damaged(path, "is nested too deeply") from error
    if manifest.step != name.step:
        raise damaged(path, f"is of step {manifest.step}, not of step {name.step}, as its directory says")
    return manifest


def _read(directory: Path, manifest: Manifest, rank: int) -> tuple[Contents, Contents]:
    """The model as a rank had it, and what that rank had of its own."""
    path = directory / MODEL
    model_state = checked_model(path, read_tensors(path, manifest.files[MODEL]))
    own = _read_rank(directory, manifest, rank)
    model_state.update(own["model"])  # in place: the state dict has versions of modules in an attribute
    return model_state, own


def _read_rank(directory: Path, manifest: Manifest, rank: int) -> Contents:
    path = directory / rank_file(rank)
    return checked_rank(path, read_tensors(path, manifest.files[rank_file(rank)]))


@contextmanager
def _as_documented(directory: Path) -> Iterator[None]:
    """Have whatever data may lead to that only look right, or are of another model, end in an error that `load` has."""
    try:
        yield
    except Exception as error:
        if isinstance(error, (CorruptCheckpoint, PeerLost, Warning)) or type(error) in (ValueError, RuntimeError):
            raise
        raise ValueError(f"{directory} cannot be loaded: {type(error).__name__}: {error}") from error


def _require_all(directory: Path, manifest: Manifest) -> None:
    missing = [file for file in manifest.files if not (directory / file).exists()]
    if missing:
        named = ", ".join(missing[:8]) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
        raise CorruptCheckpoint(
            f"{directory} lacks {named}: to go on with other ranks, each needs the files of all that saved. If every "
            f"machine has its own directory, copy their rank-….pt together into each, beside its own {MODEL} and "
            f"{MANIFEST}"
        )


def _nothing_in_common(seen: list[list[Name]]) -> str:
    newest: dict[str, list[int]] = {}
    for rank, names in enumerate(seen):
        newest.setdefault(str(names[-1]) if names else "none", []).append(rank)
    told = ", ".join(f"{name} on {name_ranks(ranks)}" for name, ranks in newest.items())
    return (
        f"no checkpoint is seen by all ranks; the newest are: {told}. Is `path` right on every machine, or are the "
        "files of one lost? Remove what is there to begin anew"
    )


def _in_brackets(nodes: tuple[tuple[int, ...], ...]) -> str:
    """As few words as tell nodes apart: [0 1] [2 3]."""
    return " ".join(f"[{' '.join(map(str, node))}]" for node in nodes)
