"""DeMo with compressed answers, literally: n workers in one process, in NumPy, in float32.

    m_i ← β·m_i + g_i,  q_i = the k largest coefficients of m_i,  m_i ← m_i - q_i       each worker
    r ← β·r + mean of q_i,  u = the k largest coefficients of r,  r ← r - u             the owner of a shard
    x ← (1 - lr·λ)·x - lr·sign(u)

Roundings matter: workers send equal multiples of a scale, so an owner often chooses among almost equal coefficients.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tests.oracles.averaging import Keys, dct_top_k


class Demo:
    """`params` are float32 arrays, whose sizes are multiples of 64, and together of 64 n; there is one bucket."""

    def __init__(
        self, params: Sequence[np.ndarray], workers: int, k: int, *, beta: float, lr: float, weight_decay: float
    ) -> None:
        self.params = [p.copy() for p in params]
        self.workers, self.compress = workers, dct_top_k(k)
        self.beta, self.lr, self.weight_decay = np.float32(beta), lr, weight_decay
        size = sum(p.size for p in params)
        self.momenta = np.zeros((workers, size), dtype=np.float32)
        self.rest = np.zeros(size, dtype=np.float32)

    def step(self, gradients: Sequence[Sequence[np.ndarray]]) -> None:
        """The gradients of each worker, by parameter."""
        length = self.rest.size // self.workers
        self.momenta, self.rest = self.beta * self.momenta, self.beta * self.rest
        update = np.zeros_like(self.rest)
        for m, of_worker in zip(self.momenta, gradients, strict=True):
            m += np.concatenate([g.reshape(-1) for g in reversed(of_worker)])  # the last parameter comes first
        for owner in range(self.workers):
            shard = slice(owner * length, (owner + 1) * length)
            for m in self.momenta:
                sent = self.largest(m[shard])
                m[shard] -= sent
                self.rest[shard] += np.float32(1 / self.workers) * sent
            update[shard] = self.largest(self.rest[shard])
            self.rest[shard] -= update[shard]
        end = update.size
        for index, p in enumerate(self.params):
            u = update[end - p.size : end].reshape(p.shape)
            end -= p.size
            self.params[index] = np.float32(1.0 - self.lr * self.weight_decay) * p - np.float32(self.lr) * np.sign(u)

    def largest(self, values: np.ndarray) -> np.ndarray:
        return self.compress(values.astype(np.float64), Keys(0, 0)).astype(np.float32)
