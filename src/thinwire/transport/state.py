"""State that is kept over the flat space: flat tensors, and which part of them belongs to which parameter."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from thinwire.transport.layout import WORD, Layout
from thinwire.transport.memory import HOST

Tensors = dict[str, Tensor]
Check = Callable[[Tensor, int], str | None]
"""Returns what is wrong with a loaded tensor of counters, given the number of steps taken; None if it is valid."""


class PerParameter:
    """One number per parameter: saved in a tensor, and kept in a list, which is faster, between `read` and `write`.

    Args:
        parameters: how many there are.
        dtype: of the tensor.
        start: the initial value.
    """

    def __init__(self, parameters: int, dtype: torch.dtype, start: float = 0) -> None:
        self.tensor = torch.full((parameters,), start, dtype=dtype, device=HOST)
        self.read()

    def read(self) -> None:
        """Take the numbers from the tensor."""
        self.now: list[Any] = self.tensor.tolist()

    def write(self) -> None:
        """Put them back into the tensor."""
        self.tensor.copy_(torch.tensor(self.now, dtype=self.tensor.dtype, device=HOST))


@dataclass(frozen=True)
class State:
    """State by name. Each kind of tensor is divided among the parameters in its own way."""

    own: Tensors = field(default_factory=dict)
    """As long as this rank's slices of the flat space: a worker's private state."""
    whole: Tensors = field(default_factory=dict)
    """As long as the whole flat space."""
    owned: Tensors = field(default_factory=dict)
    """As long as the shards that this rank owns."""
    own_words: Tensors = field(default_factory=dict)
    """One bit per element of this rank's slices."""
    words: Tensors = field(default_factory=dict)
    """One bit per element of the whole flat space, the same on all ranks."""
    shards: Tensors = field(default_factory=dict)
    """One entry per shard."""
    layers: Tensors = field(default_factory=dict)
    """One entry per parameter, in flat order."""
    common: Tensors = field(default_factory=dict)
    """Shared by all parameters as they are."""
    checks: dict[str, Check] = field(default_factory=dict)
    """For entries that decide what steps do next: what makes a loaded value invalid."""
    differing: list[str] = field(default_factory=list)
    """The names in `whole` and `layers` under which each rank has its own values, even while replicas are equal."""
    numbers: list[PerParameter] = field(default_factory=list)
    """Those behind `layers` that are read at the beginning of a step and written at its end."""

    def add_numbers(
        self, name: str, parameters: int, dtype: torch.dtype, start: float = 0, check: Check | None = None
    ) -> PerParameter:
        """Add one number per parameter. By default integers must be counts of steps, and floats finite and >= 0."""
        numbers = PerParameter(parameters, dtype, start)
        self.numbers.append(numbers)
        self.layers[name] = numbers.tensor
        self.checks[name] = check or (amounts if dtype.is_floating_point else counts)
        return numbers

    def include(self, other: State) -> None:
        """Add all entries of another state."""
        for kind in fields(self):
            mine, theirs = getattr(self, kind.name), getattr(other, kind.name)
            if isinstance(mine, dict):
                mine.update(theirs)
            else:
                mine.extend(theirs)

    def names_of_rank(self) -> frozenset[str]:
        """The names under which each rank has its own values. The others are the same on all ranks if replicas are."""
        return frozenset((*self.own, *self.owned, *self.own_words, *self.shards, *self.differing))

    def shared(self) -> State:
        """What is the same on all ranks, without entries per shard, which depend on the layout."""
        return State(whole=self.whole, words=self.words, layers=self.layers, common=self.common)

    def of(self, layout: Layout, node: int, position: int, p: Tensor) -> Tensors:
        """The state of the parameter at a position of the flat space, on a rank of worker `node`."""
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


def counts(tensor: Tensor, step: int) -> str | None:
    """Check counts of steps."""
    fine = all(0 <= value <= step for value in tensor.flatten().tolist())
    return None if fine else f"counts steps beyond 0 to {step}"


def amounts(tensor: Tensor, step: int) -> str | None:
    """Check that numbers are finite and not negative."""
    fine = all(0 <= value < math.inf for value in tensor.flatten().tolist())
    return None if fine else "has a number that is negative or not finite"


def steps_then_numbers(steps: int, *, freezes: bool) -> Check:
    """A check of a vector whose first entries are step numbers, and the others any finite numbers.

    Args:
        steps: how many entries are step numbers. The first is the step at which the variance was frozen, or 0.
        freezes: whether it ever is: not if nothing is compressed.
    """

    def check(tensor: Tensor, step: int) -> str | None:
        values = tensor.tolist()
        if values[0] and not freezes:
            return "says that the dense stage is over, which never ends where nothing is compressed"
        if not all(0 <= value <= step and value == int(value) for value in values[:steps]):
            return f"has steps beyond 0 to {step}"
        return None if all(map(math.isfinite, values)) else "has a number that is not finite"

    return check
