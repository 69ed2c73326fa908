"""Draws configurations."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

import thinwire
from thinwire.averaging.catalogue import NAMES
from thinwire.cli.registry import OPTIMIZERS

ATTACHED, ALONE, REFERENCE, VIRTUAL = "attached", "alone", "reference", "virtual"
WAYS = (ATTACHED, ALONE, REFERENCE, VIRTUAL)
GRIDS = {"1": (1, 1), "2": (2, 1), "3": (3, 1), "4": (4, 1), "2x2": (4, 2)}
"""Ranks, and ranks a node."""
_SHARES = (2, 4, 2, 1, 2)
"""How often each is drawn: every rank costs the same."""
_BUCKETS = (0.002, 0.005, 0.02, None)
"""In MB: 524 elements, 1,310, 5,242, and one bucket for all."""

Draw = random.Random
Options = dict[str, Any]


@dataclass(frozen=True)
class Model:
    """A network of odd sizes."""

    vocabulary: int
    widths: tuple[int, ...]
    """Of the embedding, and of the layers after it."""
    classes: int
    dtype: torch.dtype = torch.float32
    tied: bool = False
    """Whether the last layer has the weights of the embedding."""
    frozen: tuple[int, ...] = ()
    """The layers without gradients; 0 is the embedding."""
    detour: bool = False
    """Whether there is a layer that only some ranks use, in some steps."""
    idle: bool = False
    """Whether there is a parameter that nobody ever uses."""
    transposed: bool = False
    """Whether the first layer has a weight that is not contiguous."""
    seed: int = 0


@dataclass(frozen=True)
class Configuration:
    """What is trained, and how."""

    seed: int
    number: int
    grid: str
    kind: str
    """"optimizer", "compress" or "local"."""
    subject: str
    """The name of an optimizer in the registry, or of a compressor."""
    options: Options
    """Of the optimizer, of `thinwire.compress`, or of `thinwire.LocalSteps`."""
    inner: str
    """The optimizer of a compression or of local steps; empty for one of thinwire's."""
    model: Model
    steps: int
    microbatches: tuple[int, ...]
    """How many backward passes a step has, in turn."""
    ddp: Options = field(default_factory=dict)
    other_bucket: float | None = 0.0
    """`bucket_mb` of the attached run, where it must not matter; 0 for the same."""
    two_groups: bool = False
    """Whether parameters are in two groups with different learning rates."""
    rate: float = 1.0
    """By which learning rates are multiplied after every step."""
    set_to_none: bool = True
    """An argument of `zero_grad`."""
    infinite: tuple[int, int] | None = None
    """The rank and the step with a loss that is not finite."""
    isa: str = ""
    """The instruction set of the attached run, if this machine has it; empty for the best."""
    perturbed: str = ""
    """A way in which a bit is flipped after the first step: to see that it is noticed."""

    @property
    def ways(self) -> tuple[str, ...]:
        """Those in which it is trained. Local steps have no DDP."""
        return WAYS[1:] if self.kind == "local" else WAYS

    @property
    def ranks(self) -> int:
        """Their number."""
        return GRIDS[self.grid][0]

    @property
    def label(self) -> str:
        """For tables."""
        return self.subject if self.kind == "optimizer" else f"{self.kind} {self.subject}"

    @property
    def command(self) -> str:
        """Which runs this configuration alone."""
        perturbed = f" --perturb {self.perturbed}" if self.perturbed else ""
        return f"python -m tests.differential --seed {self.seed} --only {self.number}{perturbed}"


def configuration(seed: int, number: int) -> Configuration:
    """The configuration of some number."""
    draw = random.Random(f"{seed}/{number}")
    grid = draw.choices(list(GRIDS), _SHARES)[0]
    # As many of each optimizer as of each three compressors or so.
    kind = draw.choices(("optimizer", "compress", "local"), weights=(5, 3, 2))[0]
    ranks, ranks_a_node = GRIDS[grid]
    steps = draw.randint(3, 6)
    model = _model(draw)
    two_groups = draw.random() < 0.2
    common: dict[str, Any] = {
        "seed": seed,
        "number": number,
        "grid": grid,
        "kind": kind,
        "model": model,
        "steps": steps,
        "microbatches": draw.choice(((1,), (1,), (2,), (1, 3))),
        "two_groups": two_groups,
        "rate": draw.choice((1.0, 1.0, 0.7)),
        "infinite": (draw.randrange(ranks), draw.randrange(1, steps)) if draw.random() < 0.15 else None,
        "isa": draw.choice(("", "", "plain", "avx2", "avx512", "neon")),
    }
    wire = _wire(draw, in_nodes=ranks_a_node > 1)
    if kind == "optimizer":
        subject = draw.choice(list(OPTIMIZERS))
        entry = OPTIMIZERS[subject]
        options = {**entry.options, **_of_optimizer(draw, entry.optimizer, model), **wire}
        options |= {"lr": draw.choice((1e-3, 1e-2, 5e-2)), "weight_decay": draw.choice((0.0, 0.01, 0.1))}
        other = 0.0 if entry.scales_per_bucket else draw.choice(_BUCKETS)
        return Configuration(
            subject=subject,
            options=options,
            inner="",
            ddp=_ddp(draw),
            other_bucket=other,
            set_to_none=draw.random() < 0.8,
            **common,
        )
    subject = draw.choice(NAMES)
    inner = draw.choice(("AdamW", "SGD", "SignSGD"))
    if kind == "compress":
        options = {**_of_compressor(draw, subject), **wire, "residual_decay": _decay(draw, subject)}
        if subject != "powersgd" and draw.random() < 0.2:
            options["delay"] = 1
            # DDP gives zeros to a parameter that only other ranks use now, which a loop without DDP cannot know.
            common["model"] = replace(model, detour=False)
        ddp = {**_ddp(draw), "find_unused_parameters": common["model"].detour or model.idle}
        return Configuration(subject=subject, options=options, inner=inner, ddp=ddp, **common)
    return Configuration(subject=subject, options=_of_local_steps(draw, subject, wire, model), inner=inner, **common)


def _model(draw: Draw) -> Model:
    widths = tuple(draw.choice((1, 3, 7, 17, 33, 64, 65, 130)) for _ in range(draw.randint(1, 3)))
    tied = draw.random() < 0.2
    layers = 1 + len(widths)
    return Model(
        vocabulary=draw.choice((2, 5, 31, 60)),
        widths=(*widths, widths[0]) if tied else widths,
        classes=draw.choice((2, 3, 29)),
        dtype=draw.choice((torch.float32, torch.float32, torch.float32, torch.bfloat16, torch.float16)),
        tied=tied,
        frozen=tuple(sorted(draw.sample(range(layers), draw.randint(1, layers - 1)))) if draw.random() < 0.2 else (),
        detour=draw.random() < 0.3,
        idle=draw.random() < 0.2,
        transposed=draw.random() < 0.2,
        seed=draw.randrange(1 << 32),
    )


def _wire(draw: Draw, *, in_nodes: bool) -> Options:
    options: Options = {"bucket_mb": draw.choice(_BUCKETS), "check_replicas_every": draw.choice((0, 1, 2, 100))}
    clipping = draw.random()
    if clipping < 0.15:
        options["clip_norm"] = draw.choice((0.1, 1.0))
    elif clipping < 0.3:
        options["clip_value"] = draw.choice((0.003, 0.1))
    if in_nodes and draw.random() < 0.25:
        options["node_dtype"] = torch.bfloat16
    return options


def _ddp(draw: Draw) -> Options:
    return {
        "bucket_cap_mb": draw.choice((0.002, 0.02, 25)),
        "gradient_as_bucket_view": draw.random() < 0.3,
    }


def _dtype(draw: Draw) -> torch.dtype:
    return draw.choice((torch.float32, torch.float32, torch.bfloat16))


def _warm_up(draw: Draw) -> Options:
    return {
        "betas": draw.choice(((0.9, 0.5), (0.5, 0.5), (0.0, 0.6))),
        "warmup_steps": draw.choice((2, 3, 4)) + 1,
        "warmup_bits": draw.choice((None, 4, 8)),
        "scale_block": draw.choice((None, 64, 128, 4096)),
        "error_dtype": _dtype(draw),
    }


def _of_birder(draw: Draw, model: Model) -> Options:
    return {
        "downlink": draw.choice(("bit", "majority", "votes")),
        "beta": draw.choice((0.0, 0.7, 0.9)),
        "beta_b": draw.choice((None, 0.95, 0.5)),
        "gain": draw.choice((None, 1.0, 2.0)),
        "amsgrad": draw.random() < 0.3,
        "state_dtype": _dtype(draw),
        "seed": draw.randrange(1 << 32),
        "delay": int(draw.random() < 0.25),
    }


def _of_lion(draw: Draw, model: Model) -> Options:
    return {
        "downlink": draw.choice(("majority", "votes")),
        "betas": draw.choice(((0.9, 0.99), (0.0, 0.5))),
        "delay": int(draw.random() < 0.25),
    }


def _of_onebit_adam(draw: Draw, model: Model) -> Options:
    return {**_warm_up(draw), "delay": int(draw.random() < 0.25)}


def _of_onebit_lamb(draw: Draw, model: Model) -> Options:
    return {**_warm_up(draw), "delay": int(draw.random() < 0.25)}


def _of_zero_one(draw: Draw, model: Model) -> Options:
    of_warm_up = _warm_up(draw)
    del of_warm_up["warmup_steps"]
    return {
        **of_warm_up,
        "var_freeze_step": draw.choice((3, 4)),
        "var_update_scaler": draw.choice((1, 2, 3)),
        "local_step_scaler": draw.choice((1, 2, 1000)),
        "local_step_clipper": draw.choice((1, 2, 4)),
    }


def _of_cd_adam(draw: Draw, model: Model) -> Options:
    return {
        "codec": draw.choice(("sign", "topk")),
        "ratio": draw.choice((0.01, 0.1, 1.0)),
        "compress": draw.choice(("gradient", "momentum")),
        "betas": draw.choice((None, (0.9, 0.9), (0.0, 0.99))),
        "delay": int(draw.random() < 0.25),
    }


def _of_sketched(draw: Draw, model: Model) -> Options:
    return {
        "rows": draw.choice((1, 3, 5)),
        "columns": draw.choice((None, 64, 200)),
        "betas": draw.choice(((0.0, 0.99), (0.9, 0.9))),
        "seed": draw.randrange(1 << 32),
    }


def _of_lamb(draw: Draw, model: Model) -> Options:
    return {
        "betas": draw.choice(((0.9, 0.9), (0.0, 0.999))),
        "max_coeff": draw.choice((1.0, 10.0)),
        "delay": int(draw.random() < 0.25),
    }


_OF_OPTIMIZERS: Mapping[type, Callable[[Draw, Model], Options]] = {
    thinwire.Birder: _of_birder,
    thinwire.DistributedLion: _of_lion,
    thinwire.OneBitAdam: _of_onebit_adam,
    thinwire.OneBitLamb: _of_onebit_lamb,
    thinwire.ZeroOneAdam: _of_zero_one,
    thinwire.CDAdam: _of_cd_adam,
    thinwire.SketchedAMSGrad: _of_sketched,
    thinwire.Lamb: _of_lamb,
}


def _of_optimizer(draw: Draw, kind: type, model: Model) -> Options:
    return {**_OF_OPTIMIZERS[kind](draw, model), "maximize": draw.random() < 0.2}


def _of_compressor(draw: Draw, name: str) -> Options:
    seed = {"seed": draw.randrange(1 << 32)}
    match name:
        case "int1" | "int2" | "int3" | "int4" | "int8":
            return {"block": draw.choice((16, 32, 64)), "residual_dtype": _dtype(draw)} | (
                {"error_feedback": False} if draw.random() < 0.2 else {}
            )
        case "sign":
            return {"block": draw.choice((None, 64, 512))}
        case "onebit_sgd":
            return {"block": draw.choice((64, 512))}
        case "signsgd":
            return {"scale": draw.choice((0.1, 1.0)), **seed}
        case "qsgd":
            return {
                "levels": draw.choice((1, 3, 7)),
                "block": draw.choice((64, 512)),
                "norm": draw.choice(("max", "l2")),
                "error_feedback": draw.random() < 0.5,
                **seed,
            }
        case "terngrad":
            return {"block": draw.choice((64, 512)), **seed}
        case "natural":
            return {"error_feedback": draw.random() < 0.5, **seed}
        case "topk" | "gtopk":
            return {"ratio": draw.choice((0.01, 0.1, 1.0))}
        case "chunked_topk":
            return {"k": draw.choice((4, 64)), "union": draw.random() < 0.5}
        case "dct_topk":
            return {"k": draw.choice((2, 32))}
        case "randomk":
            return {"ratio": draw.choice((0.01, 0.1, 1.0)), **seed}
        case "count_sketch":
            return {"ratio": 0.05, "cells": draw.choice((0.1, 0.5)), "rows": draw.choice((3, 5)), **seed}
        case "laq":
            return {"bits": draw.choice((3, 4, 8)), "block": draw.choice((16, 64)), "max_age": draw.choice((2, 100))}
        case "powersgd":
            return {"rank": draw.choice((1, 2, 4)), "error_feedback": draw.random() < 0.8, **seed}
        case "none":
            return {}
    raise KeyError(f"no options are drawn for the compressor {name!r}")


def _decay(draw: Draw, name: str) -> float:
    # LAQ keeps no residuals.
    return 1.0 if name == "laq" else draw.choice((1.0, 1.0, 0.9))


_RESETS = ("int4", "topk", "randomk")
"""Some compressors with error feedback, which an error reset needs."""


def _of_local_steps(draw: Draw, subject: str, wire: Options, model: Model) -> Options:
    every = draw.randint(1, 3)
    fragments = draw.randint(1, min(2, every))
    options = {
        **_of_compressor(draw, subject),
        **{name: value for name, value in wire.items() if not name.startswith("clip")},
        "every": every,
        "outer_lr": draw.choice((0.7, 1.0)),
        "outer_momentum": draw.choice((0.0, 0.9)),
    }
    reset = subject in _RESETS and options.get("error_feedback", True) and model.dtype is torch.float32
    if reset and "node_dtype" not in wire and draw.random() < 0.6:
        steps = {"step_compressor": "randomk", "step_options": {"ratio": 0.1}} if draw.random() < 0.5 else {}
        return {**options, "error_reset": True, "topology": "flat", **steps}
    options |= {
        "fragments": fragments,
        "residual_decay": _decay(draw, subject),
        "weighted": draw.random() < 0.3,
        "clip_to_median": draw.random() < 0.3,
    }
    if every // fragments > 1 and draw.random() < 0.5:
        options |= {"delay": 1, "mix": draw.choice((0.0, 0.5))}
    return options
