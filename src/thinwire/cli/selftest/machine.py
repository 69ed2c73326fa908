"""The description of the machine in a report."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path

import torch
import torch.distributed as dist
from torch.cuda import nccl

import thinwire
from thinwire.cli.selftest.site import CPU
from thinwire.kernels import native, ops


def describe(device_type: str, ranks: int) -> dict[str, str]:
    """By name."""
    facts = {
        "thinwire": thinwire.__version__,
        "native kernels": native.isa() if native.available() else "none",
        f"kernels for {device_type}": _chosen(torch.device(device_type)),
        "torch": str(torch.__version__),
        "Triton": _version("triton"),
        "CUDA of torch": torch.version.cuda or "none",
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}, Python {platform.python_version()}",
        "CPU": f"{_cpu()}, {os.cpu_count()} cores",
    }
    if device_type == "cuda":
        facts["NCCL"] = ".".join(map(str, nccl.version())) if dist.is_nccl_available() else "none"
        facts["driver"] = _driver()
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            facts[f"GPU {index}"] = (
                f"{properties.name}, {properties.total_memory / 1e9:.0f} GB, sm_{properties.major}{properties.minor}"
            )
    facts["ranks"] = f"{ranks}, {'one a GPU, over NCCL' if device_type == 'cuda' else 'over gloo on loopback'}"
    return facts


def _chosen(device: torch.device) -> str:
    """The kernels that optimizers have there; if none can be had, why."""
    try:
        return ops.backend(device).name
    except (ImportError, RuntimeError, ValueError) as error:
        return f"none: {error}"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


def _driver() -> str:
    told = Path("/proc/driver/nvidia/version")
    return told.read_text().splitlines()[0] if told.exists() else "unknown"


def _cpu() -> str:
    told = Path("/proc/cpuinfo")
    lines = told.read_text().splitlines() if told.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or CPU.type
