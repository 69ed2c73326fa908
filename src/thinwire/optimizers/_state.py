"""What an optimizer keeps, in flat tensors, and which part of them belongs to which parameter."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from thinwire.transport.layout import WORD, Layout
from thinwire.transport.memory import HOST

Tensors = dict[str, Tensor]
Check = Callable[[Tensor, int], str | None]
"""Says what is wrong with a loaded tensor of counters, given the number of steps taken; None if nothing is."""


@dataclass(frozen=True)
class State:
    """What an optimizer keeps, by name: flat tensors, which are given out a parameter at a time."""

    own: Tensors = field(default_factory=dict)
    """As long as this rank's slices of the flat space: what a worker keeps for itself."""
    whole: Tensors = field(default_factory=dict)
    """As long as the whole flat space."""
    owned: Tensors = field(default_factory=dict)
    """As long as the shards that this rank owns."""
    own_words: Tensors = field(default_factory=dict)
    """A bit an element of this rank's slices."""
    words: Tensors = field(default_factory=dict)
    """A bit an element of the whole flat space, the same on all ranks."""
    shards: Tensors = field(default_factory=dict)
    """An entry a shard."""
    layers: Tensors = field(default_factory=dict)
    """An entry a parameter, in flat order."""
    common: Tensors = field(default_factory=dict)
    """As they are, given to every parameter."""
    checks: dict[str, Check] = field(default_factory=dict)
    """For entries that decide what steps do next: what a loaded value must be like."""

    def shared(self) -> State:
        """What is the same on all ranks; no shards, whose entries depend on where they are cut."""
        return State(whole=self.whole, words=self.words, layers=self.layers, common=self.common)

    def of(self, layout: Layout, node: int, position: int, p: Tensor) -> Tensors:
        """What belongs to the parameter at `position` of the flat order, on a rank of worker `node`."""
        slot = layout.slots[position]
        owned = layout.owned_by(node)
        state = dict(self.common)
        state |= {name: layer[position] for name, layer in self.layers.items()}
        state |= {name: layout.own_view(own, slot, p) for name, own in self.own.items()}
        state |= {name: layout.own_words_view(words, slot) for name, words in self.own_words.items()}
        state |= {name: layout.view(whole, slot, p) for name, whole in self.whole.items()}
        state |= {name: layout.held_view(held, slot, owned) for name, held in self.owned.items()}
        state |= {name: words[slot.start // WORD : slot.stop // WORD] for name, words in self.words.items()}
        state |= {name: layout.shard_view(table, slot) for name, table in self.shards.items()}
        return state


class LayerNumbers:
    """A number for each parameter: in a tensor that is saved, and between `read` and `write` in a list that is quick.

    Args:
        layers: how many parameters there are.
        dtype: of the tensor.
        start: what all numbers are at first.
    """

    def __init__(self, layers: int, dtype: torch.dtype, start: float = 0) -> None:
        self.tensor = torch.full((layers,), start, dtype=dtype, device=HOST)
        self.read()

    def read(self) -> None:
        """Take the numbers from the tensor."""
        self.now: list[Any] = self.tensor.tolist()

    def write(self) -> None:
        """Put them back into the tensor."""
        self.tensor.copy_(torch.tensor(self.now, dtype=self.tensor.dtype, device=HOST))


def counts(tensor: Tensor, step: int) -> str | None:
    """Check numbers of steps."""
    fine = all(0 <= value <= step for value in tensor.flatten().tolist())
    return None if fine else f"counts steps beyond 0 to {step}"


def amounts(tensor: Tensor, step: int) -> str | None:
    """Check numbers that are finite and not negative."""
    fine = all(0 <= value < math.inf for value in tensor.flatten().tolist())
    return None if fine else "has a number that is negative or not finite"


def steps_then_numbers(steps: int, *, freezes: bool) -> Check:
    """A check of a vector whose first entries are numbers of steps, and the others any finite numbers.

    Args:
        steps: how many entries are numbers of steps. The first is the one at which something was frozen, or 0.
        freezes: whether anything ever is: not where nothing is compressed.
    """

    def check(tensor: Tensor, step: int) -> str | None:
        values = tensor.tolist()
        if values[0] and not freezes:
            return "says that the dense stage is over, which never ends where nothing is compressed"
        if not all(0 <= value <= step and value == int(value) for value in values[:steps]):
            return f"has steps beyond 0 to {step}"
        return None if all(map(math.isfinite, values)) else "has a number that is not finite"

    return check
