"""Settings of `thinwire.LocalSteps` that papers have tuned together, by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PROFILES: Mapping[str, Mapping[str, Any]] = {
    "diloco": {"compressor": "none", "outer_lr": 0.7, "outer_momentum": 0.9},
    "diloco-int4": {"compressor": "int4", "outer_lr": 0.7, "outer_momentum": 0.9},
    "streaming-int4": {
        "compressor": "int4",
        "outer_lr": 0.7,
        "outer_momentum": 0.9,
        "fragments": 5,
        "delay": 5,
        "mix": 0.5,
    },
    "sign": {"compressor": "sign", "outer_lr": 0.7, "outer_momentum": 0.9},
    "sparse-loco": {
        "compressor": "chunked_topk",
        "k": 64,
        "union": True,
        "residual_decay": 0.95,
        "outer_lr": 1.0,
        "outer_momentum": 0.0,
        "clip_to_median": True,
    },
    "muloco": {"compressor": "int4", "outer_lr": 0.7, "outer_momentum": 0.6},
    "cser": {
        "compressor": "randomk",
        "ratio": 0.1,
        "error_reset": True,
        "step_compressor": "randomk",
        "step_options": {"ratio": 0.01},
        "outer_lr": 1.0,
        "outer_momentum": 0.0,
    },
}


def profile_of(name: str) -> dict[str, Any]:
    """The arguments of a profile.

    Raises:
        ValueError: for an unknown name, with the list of names; for "demo", which exchanges in every step.
    """
    if name == "demo":
        raise ValueError(
            "profile='demo': DeMo exchanges in every step, so it takes no local steps. Use "
            'thinwire.compress(model, "dct_topk", residual_decay=0.999) with thinwire.SignSGD(model.parameters())'
        )
    if not isinstance(name, str) or name not in PROFILES:
        raise ValueError(f"profile={name!r}: expected one of {', '.join(PROFILES)}")
    return dict(PROFILES[name])
