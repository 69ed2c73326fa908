"""What an optimizer keeps, in flat tensors, and which part of them belongs to which parameter."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from thinwire.wire.buckets import WORD, Layout

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class State:
    """What an optimizer keeps, by name: flat tensors, which are given out a parameter at a time."""

    own: Tensors = field(default_factory=dict)
    """As long as this rank's slices of the flat space: what a worker keeps for itself."""
    whole: Tensors = field(default_factory=dict)
    """As long as the whole flat space, the same on all ranks."""
    owned: Tensors = field(default_factory=dict)
    """As long as the shards that this rank owns."""
    words: Tensors = field(default_factory=dict)
    """A bit an element of the whole flat space, the same on all ranks."""
    shards: Tensors = field(default_factory=dict)
    """An entry a shard."""
    layers: Tensors = field(default_factory=dict)
    """An entry a parameter, in flat order."""
    common: Tensors = field(default_factory=dict)
    """As they are, given to every parameter."""

    def of(self, layout: Layout, node: int, position: int, p: Tensor) -> Tensors:
        """What belongs to the parameter at `position` of the flat order, on a rank of worker `node`."""
        slot = layout.slots[position]
        owned = layout.owned_by(node)
        state = dict(self.common)
        state |= {name: layer[position] for name, layer in self.layers.items()}
        state |= {name: layout.own_view(own, slot, p) for name, own in self.own.items()}
        state |= {name: layout.view(whole, slot, p) for name, whole in self.whole.items()}
        state |= {name: layout.held_view(held, slot, owned) for name, held in self.owned.items()}
        state |= {name: words[slot.start // WORD : slot.stop // WORD] for name, words in self.words.items()}
        state |= {name: layout.shard_view(table, slot) for name, table in self.shards.items()}
        return state
