"""Which kernels run: the fastest ones, or those of the environment variables; and the warning if they are missing."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch

from tests.unit.kernel_cases import ISAS, kernels_of
from thinwire.kernels import native, ops
from thinwire.kernels.native import library

CPU = torch.device("cpu")
needs_native = pytest.mark.skipif(not ISAS, reason="this installation has no native kernels")


@pytest.fixture(autouse=True)
def no_wishes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The suite itself may run under these variables."""
    monkeypatch.delenv("THINWIRE_KERNELS", raising=False)
    monkeypatch.delenv("THINWIRE_ISA", raising=False)
    monkeypatch.delenv("THINWIRE_REQUIRE_NATIVE", raising=False)


@pytest.fixture
def without_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an installation without a C++ compiler has found when it was imported."""
    monkeypatch.setattr(native, "_library", None)
    monkeypatch.setattr(ops, "_warned", set())


@needs_native
def test_native_kernels_run_unless_the_environment_chooses_others(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ops.backend(CPU).name == "native"
    for name in ("reference", "native"):
        monkeypatch.setenv("THINWIRE_KERNELS", name)
        assert ops.backend(CPU).name == name


@needs_native
def test_the_environment_chooses_the_instruction_set(monkeypatch: pytest.MonkeyPatch) -> None:
    with kernels_of(native.isa()):  # puts back what was in use
        for isa in ISAS:
            monkeypatch.setenv("THINWIRE_ISA", isa)
            assert ops.backend(CPU).name == "native"
            assert native.isa() == isa


def test_another_build_that_is_not_there_is_no_reason_for_the_reference(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(library, "PATH", tmp_path / "_native.so")
    monkeypatch.setattr(library, "_OTHER_BUILD", None)
    assert library.load() is None
    monkeypatch.setattr(library, "_OTHER_BUILD", str(tmp_path / "_native.so"))
    with pytest.raises(OSError, match=r"_native\.so: cannot open"):
        library.load()


def test_a_library_that_is_required_must_be_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(library, "PATH", tmp_path / "_native.so")
    monkeypatch.setattr(library, "_OTHER_BUILD", None)
    for off in ("", "0", "False", "off"):
        monkeypatch.setenv("THINWIRE_REQUIRE_NATIVE", off)
        assert library.load() is None
    for on in ("1", "true"):
        monkeypatch.setenv("THINWIRE_REQUIRE_NATIVE", on)
        with pytest.raises(ImportError, match=rf"THINWIRE_REQUIRE_NATIVE={on}, but .* Install a C\+\+ compiler"):
            library.load()


def test_a_misspelt_backend_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THINWIRE_KERNELS", "natvie")
    with pytest.raises(ValueError, match="THINWIRE_KERNELS='natvie': expected one of native, reference, triton"):
        ops.backend(CPU)


@needs_native
def test_an_instruction_set_that_is_not_there_is_refused_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    before = native.isa()
    monkeypatch.setenv("THINWIRE_ISA", "mmx")
    with pytest.raises(ValueError, match=f"THINWIRE_ISA='mmx': .* it uses '{before}'"):
        ops.backend(CPU)
    assert native.isa() == before


def test_other_devices_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="device 'meta': thinwire's kernels run on 'cpu' and 'cuda'"):
        ops.backend(torch.device("meta"))


@pytest.mark.usefixtures("without_library")
def test_without_native_kernels_the_reference_runs_and_warns_once() -> None:
    with pytest.warns(RuntimeWarning, match=r"without its native kernels .* Install a C\+\+ compiler"):
        assert ops.backend(CPU).name == "reference"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ops.backend(CPU).name == "reference"


@pytest.mark.usefixtures("without_library")
def test_choosing_the_reference_warns_of_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THINWIRE_KERNELS", "reference")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ops.backend(CPU).name == "reference"


@pytest.mark.usefixtures("without_library")
def test_native_kernels_that_are_missing_are_not_replaced_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THINWIRE_KERNELS", "native")
    with pytest.raises(RuntimeError, match=r"_native.so does not exist. Install a C\+\+ compiler"):
        ops.backend(torch.device("cpu"))
