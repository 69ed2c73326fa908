"""Compares the gradients of the first step across ranks: if they are equal, something is wrong.

Under DistributedDataParallel without `thinwire.attach`, gradients are averaged before thinwire exchanges them. Training
works, but sends all dense gradients. Nothing else would tell: thinwire's metrics count its own packets only. Averaged
gradients are equal on all ranks, to the bit. They are also equal if all ranks train on the same data, by mistake or in
a test. This costs a checksum of all gradients and a small message, once.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

from torch import Tensor

from thinwire._callers import warn_user
from thinwire._ddp import find_averaging_model
from thinwire.optimizers.inputs import checksum
from thinwire.transport.peers import Peers

_STAGE = "the checksums of the first gradients"


class FirstGradients:
    """The comparison of one optimizer, which ends with the first step in which some rank has a gradient other than 0.

    Args:
        due: whether to compare at all.
    """

    def __init__(self, *, due: bool) -> None:
        self.due = due

    def compare(self, peers: Peers, params: Sequence[Tensor], gradients: Sequence[Tensor | None], step: int) -> None:
        """Compare the gradients of a step. All ranks call this before they send any of them.

        Args:
            peers: all ranks.
            params: the parameters.
            gradients: of each of them.
            step: the number of the step.

        Raises:
            RuntimeError: on every rank, if all have the same gradients, and the parameters belong to a model that
                averages them.
            PeerLost: if a rank does not answer.
        """
        if not self.due or peers.size == 1:
            return
        found = peers.gather_integer(_digest(gradients), _STAGE, step)
        self.due = not any(found)
        if self.due or len(set(found)) > 1:
            return
        models = [each for each in peers.gather(find_averaging_model(params), _STAGE, step) if each is not None]
        same = f"all ranks have the same gradients in step {step}, to the bit"
        if models:
            raise RuntimeError(
                f"{same}, because {models[0]} has averaged them before thinwire. Dense gradients travel beside "
                f"thinwire's packets, and nothing is gained. Before training, add the line\n\n"
                "    thinwire.attach(model, optimizer)\n"
            )
        warn_user(
            f"{same}. Either all ranks train on the same data: give each its own, for example by DistributedSampler. "
            "Or gradients were averaged before thinwire exchanges them: with DistributedDataParallel, call "
            "thinwire.attach(model, optimizer); otherwise leave the averaging to thinwire"
        )


def _digest(gradients: Sequence[Tensor | None]) -> int:
    """63 bits that identify the gradients; 0 if none of them has an element other than 0."""
    if not any(grad is not None and bool(grad.any()) for grad in gradients):
        return 0
    checksums = [-1 if grad is None else checksum(grad) for grad in gradients]
    digest = hashlib.blake2b(struct.pack(f"<{len(checksums)}q", *checksums), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1 | 1
