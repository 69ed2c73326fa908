"""What the options of `thinwire plan` mean: numbers with units, models by name, scripts to measure."""

from __future__ import annotations

import importlib
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import typer
from torch import Tensor, nn

from thinwire.planning.measurement import STEPS, NothingMeasured, measure_workload, recording
from thinwire.planning.workload import Workload
from thinwire.testbed import parse_delay, parse_rate


def rate(text: str, option: str = "--link") -> float:
    """Bits per second of "1gbit" and the like.

    Raises:
        typer.BadParameter: for anything else, also for a rate of zero.
    """
    try:
        bits = parse_rate(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from None
    if bits is None:
        raise typer.BadParameter("must be a rate like 1gbit: without a limit nobody waits", param_hint=option)
    return bits


def latency(text: str) -> float:
    """Seconds of "0.2ms" and the like; "0" is allowed.

    Raises:
        typer.BadParameter: for anything else.
    """
    if text in ("0", "0ms", "0us", "0s"):
        return 0.0
    try:
        return parse_delay(text) or 0.0
    except ValueError as error:
        raise typer.BadParameter(str(error).replace("delay", "latency"), param_hint="--latency") from None


def count(text: str) -> int:
    """A number of parameters, which may be written as 110e6.

    Raises:
        typer.BadParameter: for anything else.
    """
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 1 <= number <= 1e13:
        raise typer.BadParameter(f"must be a number of parameters like 110e6, got {text!r}", param_hint="--params")
    return int(number)


def model_named(name: str) -> Workload:
    """Measure the model of "module:function".

    The function returns a module and a batch; the module, called with the batch, returns the loss. Or it returns a
    function that takes a training step.

    Raises:
        typer.BadParameter: for a name that leads to no such function, or a step that computes no gradient.
    """
    hint = "--model"
    module_name, _, function_name = name.partition(":")
    if not module_name or not function_name:
        raise typer.BadParameter(f"must be like mymodule:build, got {name!r}", param_hint=hint)
    sys.path.insert(0, str(Path.cwd()))
    try:
        build = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        raise typer.BadParameter(f"{name!r}: {error}", param_hint=hint) from None
    try:
        return measure_workload(_step_of(build(), name))
    except NothingMeasured as error:
        raise typer.BadParameter(f"{name!r}: {error}", param_hint=hint) from None


def _step_of(built: Any, name: str) -> Callable[[], object]:
    if callable(built) and not isinstance(built, nn.Module):
        return built
    if isinstance(built, tuple) and len(built) == 2 and isinstance(built[0], nn.Module):
        model, batch = built
        batch = batch if isinstance(batch, (tuple, list)) else (batch,)

        def step() -> None:
            loss = model(*batch)
            if not isinstance(loss, Tensor):
                raise typer.BadParameter(
                    f"{name!r}: the model must return the loss, a tensor, got {type(loss).__name__}",
                    param_hint="--model",
                )
            loss.sum().backward()
            model.zero_grad()

        return step
    raise typer.BadParameter(
        f"{name!r} must return (module, batch), where module(*batch) is the loss, or a function that takes a training "
        f"step; got {type(built).__name__}",
        param_hint="--model",
    )


class _Enough(BaseException):
    """Ends a script that has taken enough steps. Not an Exception, which the script might catch."""


def script(path: Path, arguments: Sequence[str], steps: int = STEPS) -> Workload:
    """Run a training script until it has called backward so many times, and measure it.

    Raises:
        typer.BadParameter: for a script that is missing, fails, or never calls backward.
    """
    if not path.is_file():
        raise typer.BadParameter(f"there is no file {str(path)!r}", param_hint="SCRIPT")

    def stop(passes: int) -> None:
        if passes >= steps:
            raise _Enough

    before, sys.argv = sys.argv, [str(path), *arguments]
    sys.path.insert(0, str(path.resolve().parent))
    try:
        with recording(stop) as recorder:
            try:
                runpy.run_path(str(path), run_name="__main__")
            except _Enough:
                pass
            except SystemExit as error:
                if error.code not in (None, 0):
                    raise typer.BadParameter(f"{str(path)!r} ended with {error.code!r}", param_hint="SCRIPT") from None
            return recorder.workload()
    except NothingMeasured as error:
        raise typer.BadParameter(f"{str(path)!r}: {error}", param_hint="SCRIPT") from None
    finally:
        sys.argv = before
        sys.path.pop(0)


def cores_per_rank() -> float:
    """Cores of this machine for each of its ranks."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else torch.get_num_threads()) / ranks
