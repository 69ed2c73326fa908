"""Steps of whole optimizers among strangers, whose packets have right headers and checksums, and any contents.

Nothing can tell a traitor's floats from a friend's, so what they do to the parameters is not looked at. What is: that
no kernel leaves its memory, and that nothing but what is documented is raised.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import random
import struct
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

import thinwire
from tests.fuzz.foreign import Echo, Hostile, Line, Strangers
from tests.fuzz.memory import Fences
from tests.instruction_sets import instruction_sets
from thinwire.errors import CorruptPacket
from thinwire.kernels import native
from thinwire.kernels.ops import BACKENDS
from thinwire.optimizers import optimizer as _base
from thinwire.optimizers.optimizer import WireOptimizer
from thinwire.optimizers.sketched_amsgrad import SketchedAMSGradRule

_SHAPES = ((70,), (1,), (3, 43), (64,), (200,), (3,))
"""Of parameters: within a word, across words, across shards and buckets."""
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float32, torch.float32, torch.bfloat16)
_INPUT = struct.Struct("<BBQ")
_BUCKET_MB = 300 * 4 / 2**20


@dataclasses.dataclass(frozen=True)
class Kind:
    """An optimizer at a stage of its run."""

    optimizer: Callable[..., WireOptimizer]
    settings: dict[str, Any]
    steps: int = 0
    """So many are taken before."""
    nodes: tuple[tuple[int, ...], ...] = ((0,), (1,), (2,))


_PAIRS = ((0, 1), (2, 3))
_ONE_NODE = ((0, 1, 2),)
_FREEZES = {"lr": 1e-4, "betas": (0.1, 0.5), "warmup_steps": 2}
_LOCAL = {"lr": 1e-4, "betas": (0.1, 0.5), "var_freeze_step": 3, "var_update_scaler": 1, "local_step_scaler": 1}

KINDS = [
    Kind(thinwire.Birder, {}),
    Kind(thinwire.Birder, {}, 3),
    Kind(thinwire.Birder, {"downlink": "majority"}, 3),
    Kind(thinwire.Birder, {"downlink": "votes"}, 3),
    Kind(thinwire.Birder, {"amsgrad": True, "state_dtype": torch.bfloat16}, 2, _PAIRS),
    Kind(thinwire.Birder, {}, 1, _ONE_NODE),
    Kind(thinwire.OneBitAdam, _FREEZES),
    Kind(thinwire.OneBitAdam, _FREEZES, 4),
    Kind(thinwire.OneBitAdam, {**_FREEZES, "error_dtype": torch.bfloat16}, 4, _PAIRS),
    *(Kind(thinwire.ZeroOneAdam, _LOCAL, steps) for steps in (0, 1, 2, 4, 5)),
    Kind(thinwire.ZeroOneAdam, _LOCAL, 5, _PAIRS),
    Kind(thinwire.Lamb, {"lr": 1e-3}, 1),
    Kind(thinwire.OneBitLamb, _FREEZES, 4),
    Kind(thinwire.OneBitLamb, _FREEZES, 5, _PAIRS),
    Kind(thinwire.CDAdam, {}),
    Kind(thinwire.CDAdam, {}, 3),
    Kind(thinwire.CDAdam, {"compress": "momentum"}, 3, _PAIRS),
    Kind(thinwire.CDAdam, {"codec": "topk"}, 2),
    Kind(thinwire.CDAdam, {"codec": "topk", "ratio": 0.3}, 2),
    Kind(thinwire.CDAdam, {"codec": "topk"}, 2, _PAIRS),
    Kind(thinwire.SketchedAMSGrad, {}, 2),
    Kind(thinwire.SketchedAMSGrad, {"rows": 4, "columns": 70, "k": 300}, 2),
    Kind(thinwire.SketchedAMSGrad, {"rows": 1, "k": 1}, 2, _PAIRS),
]


@contextmanager
def _within(fences: Fences) -> Iterator[None]:
    """Whatever thinwire allocates meanwhile is put into fences."""
    usual = torch.zeros

    def zeros(*size: Any, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
        shape = torch.Size(size[0] if len(size) == 1 and not isinstance(size[0], int) else size)
        return fences.zeros(shape.numel(), dtype or torch.float32).view(shape)

    def zeros_at_first_use(elements: int, dtype: torch.dtype, _: torch.device) -> Tensor:
        return fences.zeros(elements, dtype)

    modules: list[Any] = [module for name, module in sys.modules.items() if name.startswith("thinwire.")]
    lazy = [(module, module.untouched_zeros) for module in modules if hasattr(module, "untouched_zeros")]
    try:
        torch.zeros = zeros  # type: ignore[assignment]
        for module, _ in lazy:
            module.untouched_zeros = zeros_at_first_use
        yield
    finally:
        torch.zeros = usual
        for module, function in lazy:
            module.untouched_zeros = function


class Stage:
    """An optimizer of some kind, which can be brought back to the step that it was made for.

    Args:
        kind: which.
    """

    def __init__(self, kind: Kind) -> None:
        self._kind = kind
        self._around_params = Fences()
        draw = torch.Generator().manual_seed(0)
        self._params = []
        for shape, dtype in zip(_SHAPES, _DTYPES, strict=True):
            value, gradient = (torch.randn(shape, generator=draw).to(dtype) for _ in range(2))
            p = nn.Parameter(self._around_params.copy(value))
            p.grad = self._around_params.copy(gradient)
            self._params.append(p)
        self._first = [p.detach().clone() for p in self._params]
        self._build()

    def _build(self) -> None:
        kind, size = self._kind, sum(map(len, self._kind.nodes))
        self._line = Line(BACKENDS["native" if native.available() else "reference"])
        peers = Strangers(None, size - 1 if len(kind.nodes) == 2 else 1, size, self._line, kind.nodes)
        flat = len(kind.nodes[0]) == 1
        self._put(self._first)
        self._fences = Fences()
        os.environ["LOCAL_WORLD_SIZE"] = str(len(kind.nodes[0]))
        usual = _base.Peers.of
        _base.Peers.of = lambda _: peers  # type: ignore[method-assign]
        try:
            with _within(self._fences):
                self._optimizer = kind.optimizer(
                    self._params,
                    **kind.settings,
                    bucket_mb=_BUCKET_MB,
                    topology="flat" if flat else "hierarchical",
                    check_replicas_every=1,
                )
                self._optimizer._first_gradients.due = False  # the strangers say what this rank says
                for _ in range(kind.steps):
                    self._optimizer.step()
                self._optimizer._prepare()
        finally:
            _base.Peers.of = usual
            del os.environ["LOCAL_WORLD_SIZE"]
        self._begun = [p.detach().clone() for p in self._params]
        saved = self._optimizer._state_of_this_rank()
        # Not by deepcopy, which copies all of the memory that a tensor lies in, fences and all.
        state = {i: {name: value.clone() for name, value in of.items()} for i, of in saved["state"].items()}
        self._state = {"state": state, "param_groups": [dict(group) for group in saved["param_groups"]]}
        self._fresh = True

    def _put(self, values: list[Tensor]) -> None:
        with torch.no_grad():
            for p, value in zip(self._params, values, strict=True):
                p.copy_(value)

    def run(self, draw: random.Random) -> str:
        """Take a step or two among strangers who are as `draw` has it."""
        if not self._fresh:
            self._put(self._begun)
            self._line.voice = Echo()
            self._optimizer.load_state_dict(self._state)
        self._fresh = False
        self._line.voice = Hostile(draw)
        skipped = self._optimizer.metrics().skipped_steps
        try:
            for _ in range(draw.choice((1, 1, 2))):
                self._optimizer.step()
        except (CorruptPacket, ValueError, RuntimeError) as error:
            documented = _documented(error)
            self._build()
            if not documented:
                raise
            return documented
        finally:
            self._around_params.check()
            self._fences.check()
        rule = self._optimizer._rule
        if isinstance(rule, SketchedAMSGradRule):
            picked = rule._indices[: rule._picked]
            assert bool((picked[1:] > picked[:-1]).all()), "coordinates are picked twice, or not in order"
        return "skipped" if self._optimizer.metrics().skipped_steps > skipped else "taken"


def _documented(error: BaseException) -> str:
    """The outcome that an exception is, or nothing."""
    return "refused: CorruptPacket" if isinstance(error, CorruptPacket) else ""


@functools.cache
def _stage(number: int) -> Stage:
    return Stage(KINDS[number])


class Steps:
    """All optimizers at all stages."""

    name = "steps"
    share = 0.08
    outcomes: tuple[str, ...] = ("taken", "skipped", "refused: CorruptPacket")

    def __init__(self) -> None:
        self._isas = instruction_sets()

    def make(self, draw: random.Random) -> bytes:
        """Who takes a step, with which kernels, and what the strangers' words are drawn from."""
        return _INPUT.pack(draw.randrange(len(KINDS)), draw.randrange(256), draw.getrandbits(64))

    def run(self, data: bytes) -> str:
        """See `Target`."""
        kind, isa, seed = _INPUT.unpack(data)
        if self._isas:
            native.use_isa(self._isas[isa % len(self._isas)])
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return _stage(kind % len(KINDS)).run(random.Random(seed))
