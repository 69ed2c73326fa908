"""What users install: the wheel of `make wheel`, the wheel of a machine without a compiler, and what both import.

Wheels are built by the scikit-build-core, CMake, ninja and auditwheel of this environment (the `dev` extra has them),
so nothing is downloaded. They are built from the working tree: a library that an editable install left there must not
get into them. Kernels are not optimised, which takes most of the time of a build and is not what these tests are about.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from email import message_from_bytes
from email.message import Message
from pathlib import Path

import pytest

import thinwire

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "thinwire"
LIBRARY = "thinwire/kernels/_native.so"
# Linking and unpacking are quick; a compiler on a busy machine is not.
BUILD_SECONDS = 480

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

torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
torch.manual_seed(0)
net = torch.nn.Linear(8, 1)
model = torch.nn.parallel.DistributedDataParallel(net)
optimizer = thinwire.Birder(model.parameters(), lr=0.1)
thinwire.attach(model, optimizer)
losses = []
for _ in range(2):
    loss = (model(torch.ones(4, 8)) - 10.0).square().mean()
    losses.append(loss.item())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
with torch.no_grad():
    losses.append((net(torch.ones(4, 8)) - 10.0).square().mean().item())
torch.distributed.destroy_process_group()

json.dump({
    "file": thinwire.__file__,
    "version": thinwire.__version__,
    "native": native.available(),
    "warnings": [[w.category.__name__, str(w.message)] for w in caught],
    "moved": x.tolist(),
    "losses": losses,
}, sys.stdout)
"""
# With beta = 0 every vote is certain: each coordinate moves against its gradient, the one without a gradient stays.
MOVED = [0.5] * 35 + [0.0] + [-0.5] * 34


def attempt(*command: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=ROOT,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=BUILD_SECONDS,
        check=False,
    )


def run(*command: str, env: Mapping[str, str] | None = None) -> str:
    done = attempt(*command, env=env)
    assert done.returncode == 0, f"{command} failed:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def without_settings(**others: str) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("THINWIRE_")} | others


def pip_wheel(to: Path) -> list[str]:
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--verbose", "--wheel-dir", str(to)]
    return [sys.executable, "-m", "pip", "wheel", ".", *options]


@dataclass(frozen=True)
class Installation:
    """A wheel in an environment of its own, which sees the torch of this one."""

    python: Path
    packages: Path

    def use(self) -> dict:
        result = json.loads(run(str(self.python), "-c", USE_IT, env=without_settings()))
        assert Path(result["file"]).is_relative_to(self.packages)
        return result


def install(wheel: Path, where: Path) -> Installation:
    venv.create(where, with_pip=False)
    python = where / "bin" / "python"
    packages = Path(run(str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    # The .pth files in directories that a .pth file names are not read: an editable install is not seen.
    others = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (packages / "torch_of_the_tests.pth").write_text("".join(f"{other}\n" for other in others))
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install"]
    run(*pip, "--no-deps", "--no-index", "--ignore-installed", "--no-compile", str(wheel))
    return Installation(python, packages)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The one of `make wheel`."""
    # The project states its own flags, which stand after those of the environment: only the last word counts.
    compiler = tmp_path_factory.mktemp("compiler") / "c++"
    compiler.write_text(f'#!/bin/sh\nexec {os.environ.get("CXX", "c++")} "$@" -O0\n')
    compiler.chmod(0o755)
    to = tmp_path_factory.mktemp("dist")
    venv_of_tests = f"VENV={sys.prefix}", f"--assume-old={sys.prefix}/.installed"
    run("make", "wheel", *venv_of_tests, f"DIST={to}", env=without_settings(CXX=str(compiler)))
    (built,) = to.iterdir()
    return built


@dataclass(frozen=True)
class PureBuild:
    """A wheel of a machine without a compiler, and what its build printed."""

    wheel: Path
    log: str


@pytest.fixture(scope="module")
def no_compiler(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    # CMake looks into /usr/bin whatever PATH says; a CXX that is not there is what keeps it from a compiler.
    nowhere = tmp_path_factory.mktemp("empty")
    return {"PATH": str(nowhere), "CXX": str(nowhere / "c++")}


@pytest.fixture(scope="module")
def pure(tmp_path_factory: pytest.TempPathFactory, no_compiler: dict[str, str]) -> PureBuild:
    to = tmp_path_factory.mktemp("wheel")
    done = attempt(*pip_wheel(to), env=without_settings(**no_compiler))
    log = done.stdout + done.stderr  # pip prints what it says to the one, and what builds say to the other
    assert done.returncode == 0, log
    (built,) = to.iterdir()
    return PureBuild(built, log)


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


def test_one_wheel_serves_every_python_on_older_systems(wheel: Path) -> None:
    tags = re.fullmatch(rf"thinwire-{re.escape(thinwire.__version__)}-py3-none-(.+)\.whl", wheel.name)
    assert tags
    if sys.platform == "linux":
        glibc = re.search(r"manylinux_2_(\d+)_", tags[1])
        assert glibc, wheel.name
        assert int(glibc[1]) <= 28, "the oldest glibc of systems that torch 2.6 runs on"


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
    assert set(metadata.get_all("Provides-Extra", [])) == {
        *("bench", "cli", "dev", "docs", "elastic", "gpu", "integrations")
    }
    assert metadata["Requires-Python"] == ">=3.10"


def test_installed_wheel_trains_with_native_kernels_silently(wheel: Path, tmp_path: Path) -> None:
    result = install(wheel, tmp_path).use()
    assert result["native"]
    assert result["warnings"] == []
    assert result["moved"] == MOVED
    assert result["losses"] == sorted(result["losses"], reverse=True)
    assert result["version"] == metadata_of(wheel)["Version"] == thinwire.__version__


def test_without_a_compiler_the_wheel_has_another_name_and_everything_but_the_library(pure: PureBuild) -> None:
    assert pure.wheel.name == f"thinwire-{thinwire.__version__}-py3-none-any.whl"
    names = {name for name in names_in(pure.wheel) if ".dist-info/" not in name}
    assert names == package_sources()


def test_without_a_compiler_the_build_says_so(pure: PureBuild) -> None:
    assert "no working C++ compiler was found" in pure.log
    assert "built WITHOUT native kernels" in pure.log
    assert "set THINWIRE_REQUIRE_NATIVE=1" in pure.log


def test_without_a_compiler_it_runs_and_says_once_what_to_install(pure: PureBuild, tmp_path: Path) -> None:
    installation = install(pure.wheel, tmp_path)
    result = installation.use()
    assert not result["native"]
    ((category, message),) = result["warnings"]  # of two constructions
    assert category == "RuntimeWarning"
    assert "without its native kernels" in message
    assert "C++ compiler" in message
    assert "g++" in message
    assert "THINWIRE_REQUIRE_NATIVE=1" in message
    assert result["moved"] == MOVED
    assert result["losses"] == sorted(result["losses"], reverse=True)

    required = without_settings(THINWIRE_REQUIRE_NATIVE="1")
    refused = attempt(str(installation.python), "-c", "import thinwire", env=required)
    assert refused.returncode != 0
    last = refused.stderr.splitlines()[-1]
    assert re.match(
        r"ImportError: THINWIRE_REQUIRE_NATIVE=1, but .* without its native kernels.* Install a C\+\+", last
    )


def test_native_kernels_that_are_required_and_cannot_be_built_are_an_error(
    no_compiler: dict[str, str], tmp_path: Path
) -> None:
    done = attempt(*pip_wheel(tmp_path), env=without_settings(**no_compiler, THINWIRE_REQUIRE_NATIVE="1"))
    assert done.returncode != 0
    said = done.stdout + done.stderr
    assert "no working C++ compiler was found" in said
    assert "THINWIRE_REQUIRE_NATIVE is set, and the native kernels were not built" in said
    assert not list(tmp_path.iterdir())


def test_a_compiler_that_fails_is_no_reason_for_a_wheel_without_kernels(tmp_path: Path) -> None:
    compiler, dist = tmp_path / "c++", tmp_path / "dist"
    compiler.write_text(
        f"""#!/bin/sh
case "$*" in *kernels.cpp*) echo 'c++: internal error' >&2; exit 1;; esac
exec {os.environ.get("CXX", "c++")} "$@"
"""
    )
    compiler.chmod(0o755)
    done = attempt(*pip_wheel(dist), env=without_settings(CXX=str(compiler)))
    assert done.returncode != 0
    said = done.stdout + done.stderr
    assert "c++: internal error" in said
    assert "the native kernels were not built: its errors are above" in said
    assert not list(dist.glob("*.whl"))


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
    # `python -m thinwire` is the command line.
    library = [path for path, of_path in parts.items() if of_path[0] not in ("cli", "__main__.py")]
    assert library
    also: dict[tuple[str, ...], set[str]] = {
        ("kernels", "triton"): {"triton"},
        ("elastic", "quorum.py"): {"torchft"},
        **{("integrations", f"{name}.py"): {name} for name in ("accelerate", "lightning", "transformers")},
    }
    foreign = {
        f"{path.relative_to(PACKAGE)}: {name}"
        for path in library
        for name in imported_by(path)
        if name.partition(".")[0] not in allowed | also.get(parts[path][:2], set())
        or name.startswith(
            ("thinwire.cli", "thinwire.kernels.triton") if parts[path][1:2] != ("triton",) else "thinwire.cli"
        )
    }
    assert not foreign, "Triton and frameworks are for their own modules, which are imported by name when needed"


def test_importing_thinwire_brings_no_extra_with_it() -> None:
    loaded = set(
        json.loads(run(sys.executable, "-c", "import json, sys, thinwire; print(json.dumps(list(sys.modules)))"))
    )
    assert "thinwire.optimizers.birder" in loaded
    assert not loaded & {"matplotlib", "rich", "typer", "thinwire.cli", "thinwire.integrations", "thinwire.planning"}


def test_public_names() -> None:
    optimizers = [
        *("Birder", "CDAdam", "DistributedLion", "Lamb", "OneBitAdam", "OneBitLamb"),
        *("SketchedAMSGrad", "ZeroOneAdam"),
    ]
    errors = ["CorruptCheckpoint", "CorruptPacket", "GradientChanged", "PeerLost", "ReplicasDiffer", "TooManySkips"]
    others = [
        *("Compression", "LocalMetrics", "LocalSteps", "Metrics", "__version__", "attach", "checkpoint", "compress"),
        *("MuonAdamW", "SignSGD", "detach", "plan"),
    ]
    assert sorted(thinwire.__all__) == sorted([*others, *optimizers, *errors])
    assert all(hasattr(thinwire, name) for name in thinwire.__all__)
