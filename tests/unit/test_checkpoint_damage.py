"""Checkpoints that are damaged or forged: recognised, named, and nothing of them is loaded or run."""

from __future__ import annotations

import functools
import hashlib
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.forgeries import Malicious, forge, reseal
from tests.unit.checkpoint_cases import FILES, Run, Saved, copied, listed, same, save_two
from thinwire.checkpoint._manifest import Entry, Manifest, decode, rank_file
from thinwire.errors import CorruptCheckpoint


@pytest.fixture(scope="module")
def saved_once(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return save_two(tmp_path_factory.mktemp("saved") / "run")


@pytest.fixture
def saved(saved_once: Saved, tmp_path: Path) -> Saved:
    return copied(saved_once, tmp_path / "run")


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
        pytest.raises(CorruptCheckpoint, match=r"000001-step-2/model.pt is missing. There is no older checkpoint"),
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
    assert_recognised(path, file, before, "is rejected by torch.load.*mkdir")
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
    assert_recognised(path, "model.pt", before, "is rejected by torch.load.*TorchScript")


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
