"""What the state dicts of all ranks say together, coordinate by coordinate: read as docs/protocol.md has it, without
thinwire."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tests.oracles.flat_space import FlatSpace, Group, sign

ELEMENTS_PER_MB = 2**18


def of_one_rank(saved: dict[str, Any]) -> dict[str, Any]:
    """A state dict of one rank, with the tensors themselves where it names the rank that they are of."""

    def tensor(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        (only,) = value.values()
        return only

    state = {i: {name: tensor(value) for name, value in entries.items()} for i, entries in saved["state"].items()}
    return {**saved, "state": state}


@dataclass(frozen=True, eq=False)
class SavedStates:
    """The state dicts of the ranks of `nodes`, of a model with parameters of these shapes.

    Arrays are float64 and joined: all parameters' elements one after another in the optimizer's order.
    """

    states: Sequence[dict[str, Any]]
    shapes: Sequence[tuple[int, ...]]
    nodes: Sequence[Sequence[int]]
    bucket_mb: float
    scale_block: int | None = None

    @property
    def names(self) -> set[str]:
        """Of what is kept for a parameter."""
        return set(self.states[0]["state"][0])

    def shared(self, name: str) -> np.ndarray:
        """What must be the same on all ranks, to the bit."""
        for parameter in self._parameters:
            first = self._saved(name, parameter, 0)
            for rank in range(len(self.states)):
                assert torch.equal(self._saved(name, parameter, rank), first), f"{name!r} is another on rank {rank}"
        return self.of_rank(name, 0)

    def of_rank(self, name: str, rank: int) -> np.ndarray:
        return np.concatenate([self._values(name, parameter, rank) for parameter in self._parameters])

    def bits(self, name: str) -> np.ndarray:
        """Those of a map that all ranks share."""
        self.shared(name)
        words = [self._saved(name, parameter, 0).numpy().view(np.uint8) for parameter in self._parameters]
        bits = [np.unpackbits(of_parameter, bitorder="little").astype(bool) for of_parameter in words]
        return np.concatenate([b[: shards.size] for b, shards in zip(bits, self._shards, strict=True)])

    def of_workers(self, name: str) -> np.ndarray:
        """What every worker keeps for itself, a row each; ranks of a node have a slice of it each."""
        return np.stack([self._join(name, dict(enumerate(node)), self._slice_of) for node in self.nodes])

    def of_owners(self, name: str) -> np.ndarray:
        """What the owners of shards keep, put together."""
        owners = {
            own_slice * len(self.nodes) + node: rank
            for node, ranks in enumerate(self.nodes)
            for own_slice, rank in enumerate(ranks)
        }
        return self._join(name, owners, self._shard_of)

    def worker_errors(self) -> np.ndarray:
        """e_i = c_i - s_i sign(c_i), a row each."""
        rows = []
        for node in self.nodes:
            of_ranks = np.stack([self._scales("sent_scale", rank) for rank in node])
            slices = self._slice_of(np.concatenate(self._shards))
            rows.append(of_ranks[slices, np.arange(slices.size)])
        c = self.of_workers("sent")
        return c - np.stack(rows) * sign(c)

    def owner_errors(self) -> np.ndarray:
        """ē, the same for owners."""
        y = self.of_owners("answered")
        return y - self._answer_scales() * sign(y)

    def answer(self) -> np.ndarray:
        """What everybody has heard last."""
        return np.where(self.bits("answer"), 1.0, -1.0) * self._answer_scales()

    def _answer_scales(self) -> np.ndarray:
        of_ranks = [self._scales("answer_scale", rank) for rank in range(len(self.states))]
        assert all(np.array_equal(of_rank, of_ranks[0]) for of_rank in of_ranks)
        return of_ranks[0]

    def _scales(self, name: str, rank: int) -> np.ndarray:
        """Each element's, of a table of shards of which every parameter has those that it reaches into."""
        tables = [self._values(name, parameter, rank) for parameter in self._parameters]
        blocks = self._space.split(self._space.block_of)
        return np.concatenate(
            [t.reshape(s[-1] - s[0] + 1, -1)[s - s[0], b] for t, s, b in zip(tables, self._shards, blocks, strict=True)]
        )

    def _join(self, name: str, ranks: dict[int, int], key: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        """Put together what ranks hold of the parts of the space that have those numbers."""
        joined = []
        for parameter, shards in enumerate(self._shards):
            values = np.full(shards.size, np.nan)
            for number, rank in ranks.items():
                here, saved = key(shards) == number, self._values(name, parameter, rank)
                # Of some states ranks have room for all elements, of which those of their own slice count.
                values[here] = saved if saved.size == here.sum() else saved[here]
            joined.append(values)
        result = np.concatenate(joined)
        assert not np.isnan(result).any()
        return result

    def _values(self, name: str, parameter: int, rank: int) -> np.ndarray:
        return self._saved(name, parameter, rank).detach().reshape(-1).double().numpy()

    def _saved(self, name: str, parameter: int, rank: int) -> torch.Tensor:
        return self._states[rank]["state"][parameter][name]

    @functools.cached_property
    def _states(self) -> list[dict[str, Any]]:
        return [of_one_rank(state) for state in self.states]

    @property
    def _parameters(self) -> range:
        return range(len(self.shapes))

    @functools.cached_property
    def _shards(self) -> list[np.ndarray]:
        """The number of each element's shard, counted through all buckets, a parameter each."""
        return self._space.split(self._space.shard_of)

    @functools.cached_property
    def _space(self) -> FlatSpace:
        group = Group([np.zeros(shape) for shape in self.shapes], 0.0)
        elements = max(1, int(self.bucket_mb * ELEMENTS_PER_MB))
        return FlatSpace([group], len(self.nodes), len(self.nodes[0]), elements, self.scale_block)

    def _shard_of(self, shards: np.ndarray) -> np.ndarray:
        """Their numbers within their buckets."""
        return shards % (len(self.nodes) * len(self.nodes[0]))

    def _slice_of(self, shards: np.ndarray) -> np.ndarray:
        return self._shard_of(shards) // len(self.nodes)
