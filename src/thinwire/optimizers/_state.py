"""What an optimizer keeps, in flat tensors, and which part of them belongs to which parameter."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from thinwire.wire.buckets import WORD, Layout
from thinwire.wire.memory import HOST

Tensors = dict[str, Tensor]


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
