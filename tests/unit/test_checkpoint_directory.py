"""A directory of checkpoints in one process: what is in it, in which order, and what stays when writing fails."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import thinwire
from tests.unit.checkpoint_cases import FILES, Run, Saved, copied, listed, same, save_two
from thinwire import checkpoint


@pytest.fixture(scope="module")
def saved_once(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return save_two(tmp_path_factory.mktemp("saved") / "run")


@pytest.fixture
def saved(saved_once: Saved, tmp_path: Path) -> Saved:
    return copied(saved_once, tmp_path / "run")


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
    with pytest.warns(RuntimeWarning, match=r"000002-step-1 is saved, but .* could not be removed.*in use"):
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
        (
            {"optimizer": torch.optim.SGD([nn.Parameter(torch.ones(1))])},
            TypeError,
            "torch.optim.sgd.SGD, expected a thinwire optimizer",
        ),
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
    assert failures == {"fsync": 6, "rename": 1, "mkdir": 1}[function]


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
