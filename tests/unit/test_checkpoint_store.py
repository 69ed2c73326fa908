"""A directory of checkpoints in one process: what is in it, in which order, what stays, and what of it is believed."""

from __future__ import annotations

import errno
import functools
import hashlib
import os
import random
import resource
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import thinwire
from tests.forgeries import Malicious, forge, reseal
from thinwire import checkpoint
from thinwire.checkpoint._manifest import Entry, Manifest, decode, rank_file
from thinwire.errors import CorruptCheckpoint

FILES = ["manifest.json", "model.pt", "rank-00000.pt"]


class Run:
    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.net = nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5), nn.Dropout(0.5), nn.Linear(5, 1))
        self.optimizer = thinwire.Birder(self.net.parameters(), lr=0.01, seed=1)
        self.step = 0

    def train(self, steps: int = 1) -> Run:
        for _ in range(steps):
            self.step += 1
            # The batch is drawn as well, so that a random state that is not restored shows.
            self.net(torch.randn(8, 7) * random.random()).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return self

    def now(self) -> list[Any]:
        state = [value.clone() for p in self.net.parameters() for value in self.optimizer.state[p].values()]
        return [*(value.clone() for value in self.net.state_dict().values()), *state]

    def save(self, path: Path, **options: Any) -> Path:
        return checkpoint.save(path, self.net, self.optimizer, self.step, **options)

    def load(self, path: Path, **options: Any) -> checkpoint.Checkpoint | None:
        return checkpoint.load(path, self.net, self.optimizer, **options)


def same(ours: list[Any], theirs: list[Any]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def listed(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir())


Saved = tuple[Path, list[Any], list[Any]]
"""A directory with checkpoints of steps 2 and 3, and what there was to save."""


@pytest.fixture(scope="module")
def saved_once(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    path = tmp_path_factory.mktemp("saved") / "run"
    run = Run().train(2)
    run.save(path)
    before = run.now()
    run.train().save(path)
    return path, before, run.now()


@pytest.fixture
def saved(saved_once: Saved, tmp_path: Path) -> Saved:
    """For a test to spoil."""
    return shutil.copytree(saved_once[0], tmp_path / "run"), *saved_once[1:]


# A round trip --------------------------------------------------------------------------------------------------------


def test_resuming_is_never_having_stopped(tmp_path: Path) -> None:
    first = Run().train(3)
    path = first.save(tmp_path / "a" / "run", extra={"epoch": 4})
    assert path == tmp_path / "a" / "run" / "000001-step-3"
    assert listed(path) == FILES
    first.train(4)
    second = Run(seed=8)
    assert second.load(tmp_path / "a" / "run") == checkpoint.Checkpoint(path, 3, {"epoch": 4}, exact=True)
    assert same(second.train(4).now(), first.now())


def test_no_checkpoint_at_all(tmp_path: Path) -> None:
    run = Run()
    before = run.now()
    assert run.load(tmp_path / "nothing") is None
    assert run.load(tmp_path) is None
    assert same(run.now(), before)
    assert not (tmp_path / "nothing").exists()


def test_anybody_may_use_the_model(saved: Saved) -> None:
    state = torch.load(saved[0] / "000002-step-3" / "model.pt", weights_only=True)
    net = Run(seed=5).net
    net.load_state_dict(state)
    assert same(list(net.state_dict().values()), saved[2][: len(state)])


def test_a_compiled_model_is_saved_without_its_wrapping(tmp_path: Path) -> None:
    run = Run().train()
    compiled = torch.compile(run.net, backend="eager")
    assert isinstance(compiled, nn.Module)
    checkpoint.save(tmp_path, compiled, run.optimizer, 1)
    other = Run(seed=3)
    assert other.load(tmp_path) is not None
    assert same(other.now(), run.now())


def test_versions_of_modules_survive(tmp_path: Path) -> None:
    run = Run().train()
    run.save(tmp_path)
    seen: list[Any] = []
    other = Run()
    other.net[1].register_load_state_dict_pre_hook(lambda _, state, prefix, metadata, *rest: seen.append(metadata))
    other.load(tmp_path)
    assert seen == [{"version": 2}]


def test_permissions_are_those_that_the_user_wants(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        path = Run().save(tmp_path / "run")
    finally:
        os.umask(before)
    assert {stat.S_IMODE((path / file).stat().st_mode) for file in FILES} == {0o640}
    assert {stat.S_IMODE(directory.stat().st_mode) for directory in (path, path.parent)} == {0o750}


# Which of them -------------------------------------------------------------------------------------------------------


def test_the_last_few_stay(tmp_path: Path) -> None:
    run = Run()
    for _ in range(5):
        run.train().save(tmp_path)
    assert listed(tmp_path) == ["000003-step-3", "000004-step-4", "000005-step-5"]
    run.train().save(tmp_path, keep=1)
    assert listed(tmp_path) == ["000006-step-6"]
    for _ in range(4):
        run.train().save(tmp_path, keep=None)
    assert len(listed(tmp_path)) == 5


@pytest.mark.parametrize("keep", [0, -1, 1.0, True, "3"])
def test_how_many_stay_is_checked(tmp_path: Path, keep: Any) -> None:
    with pytest.raises(ValueError, match="keep="):
        Run().save(tmp_path / "run", keep=keep)
    assert not (tmp_path / "run").exists()


def test_the_last_saved_counts_not_the_largest_step(tmp_path: Path) -> None:
    """A run that was set back to an earlier step goes on from there."""
    far, back = Run().train(9), Run().train(4)
    far.save(tmp_path)
    back.save(tmp_path)
    found = Run().load(tmp_path)
    assert found is not None
    assert found.path.name == "000002-step-4"
    back.train().save(tmp_path, keep=2)
    assert listed(tmp_path) == ["000002-step-4", "000003-step-5"]


def test_what_else_is_in_the_directory_stays_there(tmp_path: Path) -> None:
    strangers = [".5f1c0aa39be77d10.tmpx", ".x.tmp", "0000007-step-1", "000007-step-x", "7-step-1", "notes", "a.tmp"]
    for name in strangers:
        (tmp_path / name).mkdir()
    (tmp_path / "000009-step-9").write_text("not a directory")
    Run().save(tmp_path, keep=1)
    assert listed(tmp_path) == sorted([*strangers, "000009-step-9", "000001-step-0"])


def test_what_crashed_writers_left_goes_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind in ("tmp", "trash"):
        (tmp_path / f".5f1c0aa39be77d10.{kind}").mkdir()
        (tmp_path / f".5f1c0aa39be77d10.{kind}" / "rank-00000.pt").write_text("half of it")
    seen: list[str] = []
    real = torch.save

    def look_and_save(*args: Any, **kwargs: Any) -> None:
        seen.extend(listed(tmp_path))
        real(*args, **kwargs)

    monkeypatch.setattr(torch, "save", look_and_save)
    Run().save(tmp_path)
    assert len(set(seen)) == 1
    assert not any(name.startswith(".5f1c") for name in seen)
    assert listed(tmp_path) == ["000001-step-0"]


def test_what_cannot_be_removed_is_told_and_does_not_stop_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run()
    run.save(tmp_path, keep=1)
    real = os.rename

    def refuse_trash(source: Any, target: Any) -> None:
        if str(target).endswith(".trash"):
            raise OSError(errno.EBUSY, "in use", str(source))
        real(source, target)

    monkeypatch.setattr(os, "rename", refuse_trash)
    with pytest.warns(RuntimeWarning, match=r"000002-step-1 is saved, but something old could not be removed.*in use"):
        run.train().save(tmp_path, keep=1)
    assert listed(tmp_path) == ["000001-step-0", "000002-step-1"]
    monkeypatch.undo()
    run.train().save(tmp_path, keep=1)
    assert listed(tmp_path) == ["000003-step-2"]


# Arguments -----------------------------------------------------------------------------------------------------------


class Unreadable:
    pass


@pytest.mark.parametrize("value", [Unreadable(), lambda: None, Path("x")], ids=["object", "function", "path"])
def test_what_would_not_load_is_not_saved(saved: Saved, value: Any) -> None:
    path, _, last = saved
    with pytest.raises(ValueError, match=r"rank-00000.pt would not load: `extra`.* must hold nothing but"):
        Run().save(path, extra={"value": value}, keep=1)
    assert listed(path) == ["000001-step-2", "000002-step-3"]
    run = Run()
    run.load(path)
    assert same(run.now(), last)


@pytest.mark.parametrize(
    ("arguments", "error", "told"),
    [
        ({"step": -1}, ValueError, "step=-1"),
        ({"step": 1.5}, ValueError, "step=1.5"),
        ({"step": True}, ValueError, "step=True"),
        ({"model": None}, TypeError, "model is NoneType"),
        ({"optimizer": torch.optim.SGD([nn.Parameter(torch.ones(1))])}, TypeError, "torch.optim.sgd.SGD, expected one"),
        ({"extra": [1]}, TypeError, "extra is list"),
    ],
)
def test_arguments_are_checked(tmp_path: Path, arguments: dict[str, Any], error: type[Exception], told: str) -> None:
    run = Run()
    call: dict[str, Any] = {"path": tmp_path / "run", "model": run.net, "optimizer": run.optimizer, "step": 1}
    with pytest.raises(error, match=told):
        checkpoint.save(**{**call, **arguments})
    assert not (tmp_path / "run").exists()


def test_arguments_of_load_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="on_mismatch='guess': expected 'error', 'average' or 'reset'"):
        Run().load(tmp_path, on_mismatch="guess")
    with pytest.raises(TypeError, match="model is int"):
        checkpoint.load(tmp_path, 1, Run().optimizer)  # type: ignore[arg-type]


@pytest.mark.parametrize("below", ["", "x", "x/y"])
def test_a_file_in_the_place_of_the_directory(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("a file")
    for call in (Run().save, Run().load):
        with pytest.raises(NotADirectoryError):
            call(tmp_path / "file" / below)
    assert (tmp_path / "file").read_text() == "a file"


def test_a_full_disk(saved: Saved) -> None:
    """A limit on the size of files makes writes fail midway, as a full disk does."""
    path, _, last = saved
    sizes = [(path / "000002-step-3" / file).stat().st_size for file in ("rank-00000.pt", "model.pt")]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for limit in (0, 100, sizes[0] // 2, sizes[0] - 1, *([sizes[0]] if sizes[0] < sizes[1] else [])):
        run = Run()
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        try:
            with pytest.raises(OSError, match="File too large"):
                run.save(path, keep=1)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert listed(path) == ["000001-step-2", "000002-step-3"]
    run = Run()
    run.load(path)
    assert same(run.now(), last)


@pytest.mark.parametrize("function", ["fsync", "rename", "mkdir"])
def test_whatever_fails_leaves_what_was_there(saved: Saved, function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _, last = saved
    run = Run().train(7)
    real = getattr(os, function)
    failures = 0
    while True:
        calls = 0

        def fail_once(*args: Any, after: int = failures, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == after + 1:
                raise OSError(errno.EIO, "the disk is broken")
            return real(*args, **kwargs)

        monkeypatch.setattr(os, function, fail_once)
        complaint = ""
        try:
            run.save(path, keep=None)
        except OSError as error:
            complaint = str(error)
        finally:
            monkeypatch.undo()
        if not complaint:
            break
        failures += 1
        assert "the disk is broken" in complaint
        # The last fsync is that of the rename: the checkpoint is there then, and it is whole.
        other = Run()
        found = other.load(path)
        assert found is not None
        assert found.step in (3, 7)
        assert same(other.now(), last if found.step == 3 else run.now())
        assert not any(name.startswith(".") for name in listed(path))
    assert failures == {"fsync": 5, "rename": 1, "mkdir": 1}[function]


# Damage --------------------------------------------------------------------------------------------------------------


def assert_recognised(path: Path, file: str, before: list[Any], reason: str = "") -> None:
    """The damage to the newest is told, nothing is touched, and the one before is taken when asked for."""
    run = Run(seed=6)
    untouched = run.now()
    with pytest.raises(CorruptCheckpoint, match=rf"000002-step-3/{file} .*{reason}"):
        run.load(path)
    assert same(run.now(), untouched)
    with pytest.warns(RuntimeWarning, match=rf"000002-step-3/{file} .*000001-step-2, is tried"):
        found = run.load(path, fallback=True)
    assert found is not None
    assert found.step == 2
    assert same(run.now(), before)


def test_resealing_is_what_the_writer_does(saved: Saved) -> None:
    """Otherwise the forgeries below would be refused for the wrong reason."""
    directory = saved[0] / "000002-step-3"
    raw = (directory / "manifest.json").read_bytes()
    reseal(directory, lambda fields: None)
    assert (directory / "manifest.json").read_bytes() == raw
    forge(directory, "model.pt", torch.load(directory / "model.pt", weights_only=True))
    assert Run().load(saved[0]) is not None


@pytest.mark.parametrize("file", FILES)
def test_a_truncated_file(saved: Saved, file: str) -> None:
    path, before, _ = saved
    raw = (path / "000002-step-3" / file).read_bytes()
    for length in (0, 1, len(raw) // 2, len(raw) - 1):
        (path / "000002-step-3" / file).write_bytes(raw[:length])
        assert_recognised(path, file, before)
    (path / "000002-step-3" / file).write_bytes(raw + b"\0")
    assert_recognised(path, file, before)


@pytest.mark.parametrize("file", FILES)
def test_a_flipped_bit(saved: Saved, file: str) -> None:
    path, _, _ = saved
    raw = (path / "000002-step-3" / file).read_bytes()
    run, positions = Run(), random.Random(0)
    for _ in range(150):
        flipped = bytearray(raw)
        flipped[positions.randrange(len(raw))] ^= 1 << positions.randrange(8)
        (path / "000002-step-3" / file).write_bytes(flipped)
        with pytest.raises(CorruptCheckpoint, match=rf"000002-step-3/{file} "):
            run.load(path)


@pytest.mark.parametrize("file", FILES)
def test_a_missing_file(saved: Saved, file: str) -> None:
    path, before, _ = saved
    (path / "000002-step-3" / file).unlink()
    assert_recognised(path, file, before, "is missing")
    (path / "000002-step-3" / file).mkdir()
    assert_recognised(path, file, before, "is not a file")
    (path / "000002-step-3" / file).rmdir()
    os.mkfifo(path / "000002-step-3" / file)
    assert_recognised(path, file, before, "is not a file")


def test_nothing_to_fall_back_to(saved: Saved) -> None:
    path, _, _ = saved
    for name in listed(path):
        (path / name / "model.pt").unlink()
    with (
        pytest.warns(RuntimeWarning, match="000002-step-3/model.pt is missing"),
        pytest.raises(CorruptCheckpoint, match=r"000001-step-2/model.pt is missing. No checkpoint before it is left"),
    ):
        Run().load(path, fallback=True)


GARBAGE = {
    "nothing": b"",
    "not text": b"\xff\xfe\x00",
    "not JSON": b"{'step': 3}",
    "a list": b"[]",
    "a number": b"1",
    "deep": b"[" * 100_000,
    "deep inside": b'{"format": 1, "x": ' + b"[" * 500 + b"]" * 500 + b"}",
    "a huge number": b'{"format": ' + b"9" * 10_000 + b"}",
    "infinity": b'{"format": Infinity}',
    "half a pair": b'{"format": 1, "\\ud800": 1}',
    "no version": b"{}",
    "another version": b'{"format": 2}',
    "only a version": b'{"format": 1}',
}


@pytest.mark.parametrize("raw", GARBAGE)
def test_a_manifest_of_garbage(saved: Saved, raw: str) -> None:
    path, before, _ = saved
    (path / "000002-step-3" / "manifest.json").write_bytes(GARBAGE[raw])
    assert_recognised(path, "manifest.json", before)


ENTRY = {"size": 1, "sha256": "0" * 64}
FORGED_MANIFESTS: dict[str, Callable[[dict[str, Any]], object]] = {
    "another version": lambda m: m.update(format=2),
    "a true version": lambda m: m.update(format=True),
    "nested deeply": lambda m: m.update(nodes=functools.reduce(lambda inner, _: [inner], range(90), [])),
    "a version that is text": lambda m: m.update(format="1"),
    "another step": lambda m: m.update(step=4),
    "a step that is text": lambda m: m.update(step="3"),
    "a step that is a float": lambda m: m.update(step=3.0),
    "a negative step": lambda m: m.update(step=-3),
    "a class that is a number": lambda m: m.update(optimizer=7),
    "a version that is null": lambda m: m.update(thinwire=None),
    "no ranks": lambda m: m.update(world_size=0, nodes=[]),
    "very many ranks": lambda m: m.update(world_size=10**15),
    "more ranks than numbers": lambda m: m.update(world_size=10**30),
    "true ranks": lambda m: m.update(world_size=True),
    "nodes of others": lambda m: m.update(nodes=[[1]]),
    "nodes that are text": lambda m: m.update(nodes=["0"]),
    "nodes of huge numbers": lambda m: m.update(nodes=[[10**40]]),
    "nodes of floats": lambda m: m.update(nodes=[[0.0]]),
    "an empty node": lambda m: m.update(nodes=[[0], []]),
    "no nodes": lambda m: m.update(nodes=None),
    "buckets of nothing": lambda m: m.update(bucket_mb=0),
    "huge buckets": lambda m: m.update(bucket_mb=10**400),
    "buckets without end": lambda m: m.update(bucket_mb=float("inf")),
    "buckets that are no number": lambda m: m.update(bucket_mb=float("nan")),
    "buckets of text": lambda m: m.update(bucket_mb="4"),
    "no files": lambda m: m.update(files={}),
    "a list of files": lambda m: m.update(files=["model.pt", "rank-00000.pt"]),
    "a path that leads elsewhere": lambda m: m.update(files={"model.pt": ENTRY, "../../x": ENTRY}),
    "one file too many": lambda m: m["files"].update({"../../x": ENTRY}),
    "an absolute path": lambda m: m.update(files={"/etc/passwd": ENTRY, "rank-00000.pt": ENTRY}),
    "a negative size": lambda m: m["files"]["model.pt"].update(size=-1),
    "a huge size": lambda m: m["files"]["model.pt"].update(size=10**40),
    "a large size": lambda m: m["files"]["model.pt"].update(size=2**62),
    "a size that is text": lambda m: m["files"]["model.pt"].update(size="1"),
    "a short digest": lambda m: m["files"]["model.pt"].update(sha256="0" * 63),
    "a digest that is a number": lambda m: m["files"]["model.pt"].update(sha256=0),
    "an entry more": lambda m: m["files"]["model.pt"].update(mode=7),
    "an unknown entry": lambda m: m.update(more=1),
    "an entry less": lambda m: m.pop("thinwire"),
}


@pytest.mark.parametrize("change", FORGED_MANIFESTS)
def test_a_forged_manifest(saved: Saved, change: str) -> None:
    path, before, _ = saved
    reseal(path / "000002-step-3", FORGED_MANIFESTS[change])
    assert_recognised(path, "model.pt" if change == "a large size" else "manifest.json", before)


@given(st.binary(max_size=200) | st.text(max_size=50).map(str.encode), st.integers(0, 700), st.integers(0, 30))
def test_a_manifest_is_believed_as_it_was_written_or_not_at_all(piece: bytes, start: int, replaced: int) -> None:
    entries = {name: Entry(1, "0" * 64) for name in ("model.pt", rank_file(0), rank_file(1))}
    raw = Manifest("0.1.0", 3, "Birder", 2, ((0,), (1,)), None, entries).encode()
    mutated = raw[:start] + piece + raw[start + replaced :]
    if mutated == raw:
        assert decode(mutated).encode() == raw
    else:
        with pytest.raises(ValueError, match=r"^(is|has|cannot) "):
            decode(mutated)


@pytest.mark.parametrize("file", FILES[1:])
def test_no_code_of_a_checkpoint_is_run(saved: Saved, file: str, tmp_path: Path) -> None:
    path, before, _ = saved
    contents = torch.load(path / "000002-step-3" / file, weights_only=True)
    contents["x"] = Malicious(tmp_path / "touched")
    forge(path / "000002-step-3", file, contents)
    assert_recognised(path, file, before, "is refused by torch.load.*mkdir")
    assert not (tmp_path / "touched").exists()
    # It would have worked on somebody careless.
    torch.load(path / "000002-step-3" / file, weights_only=False)
    assert (tmp_path / "touched").exists()


@pytest.mark.filterwarnings("ignore:.*(TorchScript|torch.jit)")
def test_a_program_in_the_place_of_tensors(saved: Saved) -> None:
    """torch.load would run a TorchScript archive, were it not for weights_only."""
    path, before, _ = saved
    file = path / "000002-step-3" / "model.pt"
    torch.jit.save(torch.jit.script(nn.Linear(2, 2)), file)
    entry = {"size": file.stat().st_size, "sha256": hashlib.sha256(file.read_bytes()).hexdigest()}
    reseal(file.parent, lambda fields: fields["files"].update({"model.pt": entry}))
    assert_recognised(path, "model.pt", before, "is refused by torch.load.*TorchScript")


@pytest.mark.parametrize(
    ("file", "contents"),
    [
        *[("model.pt", contents) for contents in ([], None, {1: 2})],
        *[("rank-00000.pt", contents) for contents in ([], None, {1: 2}, {})],
        ("rank-00000.pt", {"optimizer": {}, "model": {}, "random": {}, "extra": {}}),
    ],
)
def test_data_of_another_kind(saved: Saved, file: str, contents: Any) -> None:
    path, before, _ = saved
    forge(path / "000002-step-3", file, contents)
    assert_recognised(path, file, before, "is not the")


# What does not fit ---------------------------------------------------------------------------------------------------


def test_another_model_is_refused(saved: Saved) -> None:
    net = nn.Linear(7, 5)
    optimizer = thinwire.Birder(net.parameters())
    with pytest.raises(RuntimeError, match=r"Unexpected key\(s\) in state_dict"):
        checkpoint.load(saved[0], net, optimizer)


def test_another_class_is_refused_whatever_the_policy(saved: Saved) -> None:
    net = Run().net
    for policy in ("error", "average", "reset"):
        with pytest.raises(ValueError, match="000002-step-3 is a checkpoint of Birder, this optimizer is CDAdam"):
            checkpoint.load(saved[0], net, thinwire.CDAdam(net.parameters()), on_mismatch=policy, fallback=True)


def test_a_copied_checkpoint_loads(saved: Saved, tmp_path: Path) -> None:
    shutil.copytree(saved[0] / "000001-step-2", tmp_path / "other" / "000001-step-2")
    run = Run()
    run.load(tmp_path / "other")
    assert same(run.now(), saved[1])
