"""What users install: the wheel with its kernels, the wheel of a machine without a compiler, and what both import.

Wheels are built by the scikit-build-core, CMake and ninja of this environment (the `dev` extra has them), so nothing is
downloaded. They are built from the working tree: a library that an editable install left there must not get into them.
Kernels are not optimised, which takes most of the time of a build and is not what these tests are about.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import sysconfig
import zipfile
from email import message_from_bytes
from email.message import Message
from pathlib import Path

import pytest

import thinwire

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "thinwire"
LIBRARY = "thinwire/kernels/_native.so"
# Linking and unpacking are quick; a compiler on a busy machine is not.
BUILD_SECONDS = 240

pytestmark = pytest.mark.timeout(BUILD_SECONDS + 60)

USE_IT = """
import json, sys, warnings
import torch, thinwire
from thinwire.kernels import native

x = torch.nn.Parameter(torch.zeros(70))
x.grad = torch.arange(-35.0, 35.0)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    optimizers = [thinwire.Birder([x], lr=0.5, beta=0.0), thinwire.Birder([x])]
    optimizers[0].step()
json.dump({
    "file": thinwire.__file__,
    "version": thinwire.__version__,
    "native": native.available(),
    "warnings": [[w.category.__name__, str(w.message)] for w in caught],
    "moved": x.tolist(),
}, sys.stdout)
"""
# With beta = 0 every vote is certain: each coordinate moves against its gradient, the one without a gradient stays.
MOVED = [0.5] * 35 + [0.0] + [-0.5] * 34


def run(*command: str, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=BUILD_SECONDS,
        check=False,
    )
    assert done.returncode == 0, f"{command} failed:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def build_wheel(to: Path, env: dict[str, str]) -> Path:
    run("-m", "pip", "wheel", ".", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(to), env=env)
    (wheel,) = to.iterdir()
    return wheel


def use_installed(wheel: Path, target: Path) -> dict:
    run("-m", "pip", "install", "--no-deps", "--no-index", "--target", str(target), str(wheel))
    # -S leaves out the .pth files of this environment, and with them its editable thinwire.
    path = os.pathsep.join([str(target), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")])
    env = {name: value for name, value in os.environ.items() if not name.startswith("THINWIRE_")}
    result = json.loads(run("-S", "-c", USE_IT, env={**env, "PYTHONPATH": path}))
    assert Path(result["file"]).is_relative_to(target)
    return result


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # The project states its own flags, which stand after those of the environment: only the last word counts.
    compiler = tmp_path_factory.mktemp("compiler") / "c++"
    compiler.write_text(f'#!/bin/sh\nexec {os.environ.get("CXX", "c++")} "$@" -O0\n')
    compiler.chmod(0o755)
    return build_wheel(tmp_path_factory.mktemp("wheel"), {**os.environ, "CXX": str(compiler)})


@pytest.fixture(scope="module")
def wheel_without_compiler(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # CMake looks into /usr/bin whatever PATH says; a CXX that is not there is what keeps it from a compiler.
    nowhere = tmp_path_factory.mktemp("empty")
    env = {**os.environ, "PATH": str(nowhere), "CXX": str(nowhere / "c++")}
    return build_wheel(tmp_path_factory.mktemp("wheel"), env)


def names_in(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if not name.endswith("/")}


def metadata_of(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return message_from_bytes(archive.read(name))


def package_sources() -> set[str]:
    found = (path.relative_to(PACKAGE.parent) for path in PACKAGE.rglob("*") if path.is_file())
    return {str(path) for path in found if path.suffix != ".so" and "__pycache__" not in path.parts}


def test_one_wheel_serves_every_python(wheel: Path) -> None:
    platform = re.sub(r"[-.]", "_", sysconfig.get_platform())
    assert re.fullmatch(rf"thinwire-{re.escape(thinwire.__version__)}-py3-none-(.+)\.whl", wheel.name)
    assert sys.platform == "darwin" or wheel.stem.endswith(platform)


def test_wheel_holds_the_package_and_the_library_and_nothing_else(wheel: Path) -> None:
    names = {name for name in names_in(wheel) if ".dist-info/" not in name}
    assert "thinwire/py.typed" in names
    assert names == package_sources() | {LIBRARY}


def test_wheel_carries_the_licence(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("/LICENSE")]
        assert archive.read(name) == (ROOT / "LICENSE").read_bytes()
    assert "Apache License" in (ROOT / "LICENSE").read_text()
    assert metadata_of(wheel)["License-Expression"] == "Apache-2.0"


def test_torch_is_the_only_dependency(wheel: Path) -> None:
    metadata = metadata_of(wheel)
    required = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert required == ["torch>=2.6"]
    assert set(metadata.get_all("Provides-Extra", [])) == {"bench", "cli", "dev", "docs", "gpu"}
    assert metadata["Requires-Python"] == ">=3.10"


def test_installed_wheel_runs_native_kernels_silently(wheel: Path, tmp_path: Path) -> None:
    result = use_installed(wheel, tmp_path)
    assert result["native"]
    assert result["warnings"] == []
    assert result["moved"] == MOVED
    assert result["version"] == metadata_of(wheel)["Version"] == thinwire.__version__


def test_without_a_compiler_the_wheel_has_everything_but_the_library(wheel_without_compiler: Path) -> None:
    names = {name for name in names_in(wheel_without_compiler) if ".dist-info/" not in name}
    assert names == package_sources()


def test_without_a_compiler_it_runs_and_says_once_what_to_install(wheel_without_compiler: Path, tmp_path: Path) -> None:
    result = use_installed(wheel_without_compiler, tmp_path)
    assert not result["native"]
    ((category, message),) = result["warnings"]  # of two constructions
    assert category == "RuntimeWarning"
    assert "without its native kernels" in message
    assert "C++ compiler" in message
    assert "g++" in message
    assert result["moved"] == MOVED


def imported_by(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            names.add(node.module or "")
    return names


def test_the_library_imports_torch_and_the_standard_library_only() -> None:
    allowed = {"torch", "typing_extensions", "thinwire", *sys.stdlib_module_names}  # the second comes with the first
    parts = {path: path.relative_to(PACKAGE).parts for path in PACKAGE.rglob("*.py")}
    library = [path for path, of_path in parts.items() if of_path[0] != "cli"]
    assert library
    foreign = {
        f"{path.relative_to(PACKAGE)}: {name}"
        for path in library
        for name in imported_by(path)
        if name.partition(".")[0] not in allowed | ({"triton"} if parts[path][:2] == ("kernels", "triton") else set())
        or name.startswith(
            ("thinwire.cli", "thinwire.kernels.triton") if parts[path][1:2] != ("triton",) else "thinwire.cli"
        )
    }
    assert not foreign, "Triton is for its own package only, which is imported by name when a GPU needs it"


def test_importing_thinwire_brings_no_extra_with_it() -> None:
    loaded = set(json.loads(run("-c", "import json, sys, thinwire; print(json.dumps(list(sys.modules)))")))
    assert "thinwire.optimizers.birder" in loaded
    assert not loaded & {"matplotlib", "rich", "typer", "thinwire.cli"}


def test_public_names() -> None:
    optimizers = [
        *("Birder", "CDAdam", "DistributedLion", "Lamb", "OneBitAdam", "OneBitLamb"),
        *("SketchedAMSGrad", "ZeroOneAdam"),
    ]
    errors = ["CorruptCheckpoint", "CorruptPacket", "PeerLost", "ReplicasDiffer", "TooManySkips"]
    others = ["Compression", "Metrics", "__version__", "attach", "checkpoint", "compress"]
    assert sorted(thinwire.__all__) == sorted([*others, *optimizers, *errors])
    assert all(hasattr(thinwire, name) for name in thinwire.__all__)
