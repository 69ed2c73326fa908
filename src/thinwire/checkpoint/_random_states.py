"""The states of the random number generators of torch and Python."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import nn


def random_states(model: nn.Module) -> dict[str, Any]:
    """The states of torch's generators, on the CPU and on the GPUs of the model, and of Python's `random`."""
    return {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "cuda": [torch.cuda.get_rng_state(device) for device in _cuda_devices(model)],
    }


def restore_random_states(model: nn.Module, states: dict[str, Any]) -> None:
    """Set all generators to saved states."""
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    # By position among the model's devices: their numbers may have changed since.
    for device, state in zip(_cuda_devices(model), states["cuda"], strict=False):
        torch.cuda.set_rng_state(state, device)


def check_random_states(model: nn.Module, states: dict[str, Any]) -> None:
    """Check that `restore_random_states` will succeed, by setting the states of new generators.

    Raises:
        ValueError: naming the generator whose state is invalid.
    """
    devices = [torch.device("cpu"), *_cuda_devices(model)]
    for device, state in zip(devices, [states["torch"], *states["cuda"]], strict=False):
        try:
            torch.Generator(device).set_state(state)
        except Exception as error:  # the class depends on what is wrong: type, shape, dtype, layout or contents
            raise ValueError(f"the random state of torch for {str(device)!r} cannot be restored: {error}") from error
    try:
        random.Random().setstate(states["python"])
    except Exception as error:
        raise ValueError(f"the random state of Python cannot be restored: {error}") from error


def _cuda_devices(model: nn.Module) -> list[torch.device]:
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    return sorted(devices, key=lambda device: device.index or 0)
