"""Checkpoints with a file that was altered: by accident, or by somebody who can make digests match.

An accident must be recognised by its digest. A forgery may be refused in any documented way, or be loaded, if it is
data; it must not run code, end the process or keep it busy. Whatever is refused has changed nothing, to the bit:
neither model nor optimizer nor compression nor random states; and the checkpoint that was saved still loads.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import io
import json
import pickle
import random
import struct
import tempfile
import warnings
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

import thinwire
from tests.distributed.averaging_runs import Averaging, PlainLoop
from tests.fuzz import mutate
from thinwire import checkpoint
from thinwire.averaging.handle import Compression
from thinwire.checkpoint._load import OnMismatch
from thinwire.checkpoint._manifest import MANIFEST, MODEL, _with_digest, rank_file
from thinwire.errors import CorruptCheckpoint

_INPUT = struct.Struct("<BBB")
_OWN = rank_file(0)
_FILES = (MANIFEST, MODEL, _OWN)
_WARM_UP = {"betas": (0.1, 0.5), "warmup_steps": 2}
_LOCAL_STEPS = {"betas": (0.1, 0.5), "var_freeze_step": 2, "var_update_scaler": 1, "local_step_scaler": 1}


@dataclass(frozen=True)
class _Kind:
    """An optimizer, and what it is saved and loaded with."""

    optimizer: Callable[..., Optimizer]
    settings: dict[str, Any] = field(default_factory=dict)
    steps: int = 2
    """How many are taken before it is saved."""
    on_mismatch: OnMismatch = "error"
    """Unless it is "error", those who load have other buckets than those who have saved, so that it is needed."""
    averaging: Averaging | None = None
    """How gradients are averaged, if that is not left to the optimizer."""


_KINDS = [
    _Kind(thinwire.Birder),
    _Kind(thinwire.OneBitAdam, _WARM_UP, 3),
    _Kind(thinwire.ZeroOneAdam, _LOCAL_STEPS, 5),
    _Kind(thinwire.CDAdam),
    _Kind(thinwire.SketchedAMSGrad, {"k": 4}),
    _Kind(thinwire.Lamb),
    _Kind(thinwire.OneBitLamb, _WARM_UP, 3),
    _Kind(thinwire.OneBitAdam, _WARM_UP, 3, "average"),
    _Kind(thinwire.ZeroOneAdam, _LOCAL_STEPS, 5, "average"),
    _Kind(thinwire.ZeroOneAdam, _LOCAL_STEPS, 5, "reset"),
    _Kind(thinwire.CDAdam, on_mismatch="reset"),
    # Most compressors keep nothing on a single rank. This one does.
    _Kind(torch.optim.AdamW, averaging=Averaging("powersgd", {"rank": 1})),
    _Kind(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, averaging=Averaging("powersgd", {"rank": 1})),
]
_NAME = "000001-step-7"
MARKER = Path("code-was-run")
"""What forged files would make, in the working directory, if their code ran."""


class Subject:
    """A model and its optimizer, and a checkpoint that they can load.

    Args:
        kind: which.
    """

    def __init__(self, kind: int) -> None:
        self.saved = _saved(kind)
        """By the names of files."""
        self.on_mismatch: OnMismatch = _KINDS[kind].on_mismatch
        self.model, self.optimizer, self.compression = _make(kind, loads=True)
        self._before = copy.deepcopy([part.state_dict() for part in self._parts()])
        self._random = torch.get_rng_state(), random.getstate()
        self._now = self._everything()
        self._restored: list[Any] | None = None

    def _parts(self) -> list[Any]:
        return [self.model, self.optimizer, *([self.compression] if self.compression else [])]

    def _everything(self) -> list[Any]:
        model, *states = [part.state_dict() for part in self._parts()]
        kept = [value for state in states for of_one in state["state"].values() for value in of_one.values()]
        tensors = [value for value in (*model.values(), *kept, torch.get_rng_state()) if value is not None]
        return [
            [(tensor.dtype, tensor.numpy().tobytes()) for tensor in tensors],
            random.getstate(),
            repr([state["param_groups"] for state in states]),
        ]

    def require_as_it_was(self) -> None:
        """See that nothing has changed that a checkpoint would change."""
        changed = [what for what, now, was in zip(_PARTS, self._everything(), self._now, strict=True) if now != was]
        assert not changed, f"a refused checkpoint has changed {' and '.join(changed)}"

    def require_restored(self) -> None:
        """See that the honest checkpoint, which was loaded just now, has made what it always makes."""
        now = self._everything()
        self._restored = self._restored or now
        assert now == self._restored, "after a refusal an honest checkpoint makes another state than before"

    def take_turn(self) -> None:
        """Set the random states, which all subjects share, to its own."""
        torch.set_rng_state(self._random[0])
        random.setstate(self._random[1])

    def renew(self) -> None:
        """Go back to how it was."""
        for part, before in zip(self._parts(), self._before, strict=True):
            part.load_state_dict(copy.deepcopy(before))  # torch's optimizers keep the tensors that they load
        self.take_turn()
        assert self._everything() == self._now, "something was left behind that an honest state does not mend"


_PARTS = ("tensors or torch's random state", "Python's random state", "parameter groups")


def _make(kind: int, *, loads: bool) -> tuple[nn.Module, Optimizer, Compression | None]:
    """Those that have saved, or those that load, which have come to another state."""
    torch.manual_seed(kind + 1000 * loads)
    random.seed(kind + 1000 * loads)
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    chosen = _KINDS[kind]
    buckets = {} if chosen.on_mismatch == "error" or not loads else {"bucket_mb": 1.0}
    made = chosen.optimizer(model.parameters(), **chosen.settings, **buckets)
    loop = PlainLoop(model, chosen.averaging) if chosen.averaging else None
    for _ in range(chosen.steps):
        model(torch.randn(4, 3)).square().sum().backward()
        if loop is not None:
            loop.average()
        made.step()
        made.zero_grad()
    return model, made, Compression(loop.averager) if loop else None


@functools.cache
def _saved(kind: int) -> dict[str, bytes]:
    """The files of a checkpoint; the same in every process."""
    model, optimizer, compression = _make(kind, loads=False)
    extra = {"schedule": [1, 2.5, "x"], "tensor": torch.ones(3)}
    with tempfile.TemporaryDirectory(prefix="thinwire-fuzz-") as folder:
        path = checkpoint.save(folder, model, optimizer, 7, extra=extra, compression=compression)
        return {name: (path / name).read_bytes() for name in _FILES}


# How files are altered -----------------------------------------------------------------------------------------------


def _archive(raw: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(raw)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def _archived(records: dict[str, bytes], draw: random.Random) -> bytes:
    out = io.BytesIO()
    method = zipfile.ZIP_STORED if draw.random() < 0.9 else zipfile.ZIP_DEFLATED
    with zipfile.ZipFile(out, "w", method) as archive:
        for name, contents in records.items():
            archive.writestr(zipfile.ZipInfo(name), contents, method)
    return out.getvalue()


_CALLABLES = [
    ("os", "system"),
    ("posix", "system"),
    ("builtins", "exec"),
    ("builtins", "eval"),
    ("builtins", "getattr"),
    ("subprocess", "Popen"),
    ("torch", "load"),
    ("torch.storage", "_load_from_bytes"),
    ("torch.jit", "load"),
    ("torch._utils", "_rebuild_tensor_v2"),
    ("torch._utils", "_rebuild_parameter"),
    ("torch", "FloatStorage"),
    ("torch.nn", "Linear"),
    ("_codecs", "encode"),
    ("collections", "OrderedDict"),
    ("collections", "Counter"),
    ("pathlib", "Path.touch"),
]


def _forged_call(draw: random.Random) -> bytes:
    """A pickle that calls something with something."""
    module, name = draw.choice(_CALLABLES)
    arguments = draw.choice(
        (
            f"touch {MARKER}",
            f"open({str(MARKER)!r}, 'w')",
            pickle.dumps(0, 2),
            {},
            [1] * 3,
            2**70,
        )
    )
    called = f"c{module}\n{name}\n".encode() + pickle.dumps((arguments,), 2)[2:-1] + b"R"
    return b"\x80\x02" + draw.choice((called, b"}X\x05\x00\x00\x00extra" + called + b"s", b"(" + called + b"l")) + b"."


def _forged_pickle(draw: random.Random, raw: bytes) -> bytes:
    if draw.random() < 0.15:
        return _forged_call(draw)
    if draw.random() < 0.2:  # in the middle of a good one
        at = draw.randrange(2, len(raw))
        return raw[:at] + _forged_call(draw)[2:-1] + draw.choice((b"", b"0")) + raw[at:]
    return mutate.damaged_file(draw, raw, raw)


def _forged_archive(draw: random.Random, raw: bytes) -> bytes:
    records = _archive(raw)
    names = list(records)
    name = draw.choice([name for name in names if name.endswith("data.pkl")] * len(names) + names)
    if name.endswith("data.pkl"):
        records[name] = _forged_pickle(draw, records[name])
    elif draw.random() < 0.2:
        del records[name]
    elif draw.random() < 0.2:
        other = draw.choice(names)
        records[name], records[other] = records[other], records[name]
    else:
        records[name] = mutate.damaged_file(draw, records[name], records[draw.choice(names)])
    return _archived(records, draw)


_VALUES: list[Any] = [
    None,
    True,
    -1,
    0,
    2**63,
    2**64,
    10**400,
    -0.5,
    float("nan"),
    float("inf"),
    "",
    "x" * 1000,
    [],
    {},
]
_TENSORS = [
    torch.zeros(0),
    torch.full((2, 3), float("nan")),
    torch.full((3,), 2**62),
    torch.tensor(-(2**63)),
    torch.tensor(True),
    torch.zeros(1).expand(2, 3),
    torch.zeros(3, dtype=torch.complex64),
    torch.zeros(2, 3).to_sparse(),
]


def _deep(draw: random.Random, depth: int) -> Any:
    nest: Any = draw.choice(([], {}))
    for _ in range(depth):
        nest = [nest]
    return nest


def _altered_tree(draw: random.Random, tree: Any, values: list[Any]) -> Any:
    """The same, with a branch somewhere that is something else, is missing, or is one more."""
    if isinstance(tree, dict | list) and tree and draw.random() < 0.85:
        copy: Any = tree.copy()
        key = draw.choice(list(tree)) if isinstance(tree, dict) else draw.randrange(len(tree))
        kind = draw.randrange(10)
        if kind == 0:
            del copy[key]
        elif kind == 1:
            value = draw.choice((*values, copy[key]))
            copy.insert(key, value) if isinstance(copy, list) else copy.update({draw.choice(("x", 3, "", key)): value})
        else:
            copy[key] = _altered_tree(draw, tree[key], values)
        return copy
    if draw.random() < 0.02:
        return _deep(draw, draw.choice((10, 900, 5000)))
    return draw.choice(values)


@functools.cache
def _contents(raw: bytes) -> Any:
    return torch.load(io.BytesIO(raw), weights_only=True)


def _forged_contents(draw: random.Random, raw: bytes) -> bytes:
    tree, out = _contents(raw), io.BytesIO()
    try:
        torch.save(_altered_tree(draw, tree, [*_VALUES, *_TENSORS, tree]), out)
    except (RecursionError, RuntimeError):  # too deep to be written
        return mutate.damaged_file(draw, raw, raw)
    return out.getvalue()


def _forged_manifest(draw: random.Random, raw: bytes) -> bytes:
    fields = json.loads(raw)
    del fields["sha256"]
    for _ in range(draw.choice((1, 1, 2))):
        fields = _altered_tree(draw, fields, [*_VALUES, fields])
    try:
        return _with_digest(fields) if isinstance(fields, dict) else json.dumps(fields).encode()
    except (TypeError, ValueError, RecursionError):
        return mutate.damaged_file(draw, raw, raw)


def _with_digest_of(name: str, raw: bytes, manifest: bytes) -> bytes:
    """The manifest that a file would be right by."""
    fields = json.loads(manifest)
    del fields["sha256"]
    fields["files"][name] = {"size": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
    return _with_digest(fields)


class Checkpoints:
    """`thinwire.checkpoint.load`, of one rank."""

    name = "checkpoints"
    share = 0.08
    outcomes: tuple[str, ...] = (
        "loaded: as it was saved",
        "loaded: a forgery that is data",
        "refused: CorruptCheckpoint, an accident",
        "refused: CorruptCheckpoint, a forgery",
        "refused: ValueError",
        "refused: RuntimeError",
    )

    def __init__(self) -> None:
        self._folders: dict[str, Path] = {}
        self._on_disk: dict[tuple[str, str], bytes] = {}
        self._subjects: dict[int, Subject] = {}

    def make(self, draw: random.Random) -> bytes:
        """A file of a checkpoint, altered, and whether digests are to match."""
        kind = draw.randrange(len(_KINDS))
        saved = _saved(kind)
        how = draw.randrange(12)
        forged = how > 4
        name = MANIFEST if how < 3 else draw.choice((MODEL, _OWN, _OWN))
        raw = saved[name]
        if how in (0, 1):
            altered = mutate.damaged_file(draw, raw, saved[MODEL])
        elif how == 2:
            altered, forged = _forged_manifest(draw, raw), True
        elif how in (3, 4, 5):
            altered = mutate.damaged_file(draw, raw, saved[MODEL])
        elif how < 9:
            altered = _forged_archive(draw, raw)
        else:
            altered = _forged_contents(draw, raw)
        return _INPUT.pack(kind, _FILES.index(name), forged) + altered

    def _subject(self, kind: int) -> Subject:
        if kind not in self._subjects:
            self._subjects[kind] = Subject(kind)
        return self._subjects[kind]

    def run(self, data: bytes) -> str:
        """See `Target`."""
        kind, file, forged = _INPUT.unpack_from(data)
        name, altered = _FILES[file], data[_INPUT.size :]
        subject = self._subject(kind)
        files = {**subject.saved, name: altered}
        if forged and name != MANIFEST:
            files[MANIFEST] = _with_digest_of(name, altered, files[MANIFEST])
        subject.take_turn()
        try:
            outcome = self._load(subject, files, "altered")
            if outcome != "loaded":
                subject.require_as_it_was()
                honest = self._load(subject, subject.saved, "honest")
                assert honest == "loaded", f"after a refusal an honest checkpoint is refused: {honest}"
                subject.require_restored()
            subject.renew()
        except BaseException:
            del self._subjects[kind]
            raise
        finally:
            if MARKER.exists():
                MARKER.unlink()
                raise AssertionError("a checkpoint has run code")
        if altered == subject.saved[name]:
            assert outcome == "loaded", f"what was saved is refused: {outcome}"
            return "loaded: as it was saved"
        if outcome == "CorruptCheckpoint":
            return f"refused: CorruptCheckpoint, {'a forgery' if forged else 'an accident'}"
        assert forged, f"an accident was not recognised: {outcome}"
        return "loaded: a forgery that is data" if outcome == "loaded" else f"refused: {outcome}"

    def _load(self, subject: Subject, files: dict[str, bytes], place: str) -> str:
        if place not in self._folders:
            self._folders[place] = Path(tempfile.mkdtemp())  # within the runner's, which removes it
            (self._folders[place] / _NAME).mkdir()
        for name, contents in files.items():
            if self._on_disk.get((place, name)) != contents:
                (self._folders[place] / _NAME / name).write_bytes(contents)
                self._on_disk[place, name] = contents
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                checkpoint.load(
                    self._folders[place],
                    subject.model,
                    subject.optimizer,
                    on_mismatch=subject.on_mismatch,
                    compression=subject.compression,
                )
            except (CorruptCheckpoint, ValueError, RuntimeError) as error:
                if type(error) not in (CorruptCheckpoint, ValueError, RuntimeError):
                    raise  # NotImplementedError is a RuntimeError too, UnicodeError a ValueError
                return type(error).__name__
        return "loaded"
