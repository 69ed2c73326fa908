"""Train over thin wires: optimizers for PyTorch data parallelism that send one bit per parameter instead of 32.

Example::

    model = DDP(net)
    opt = thinwire.Birder(model.parameters(), lr=1e-3, weight_decay=0.1)
    thinwire.attach(model, opt)                    # DDP no longer averages; bits travel while backward runs
    ...
    loss.backward(); opt.step(); opt.zero_grad()   # the loop stays as it was
"""

from typing import TYPE_CHECKING, Any

from thinwire import checkpoint
from thinwire._version import __version__
from thinwire.attach import attach
from thinwire.averaging.handle import Compression
from thinwire.averaging.sign_sgd import SignSGD
from thinwire.compress import compress
from thinwire.detach import detach
from thinwire.errors import (
    CorruptCheckpoint,
    CorruptPacket,
    GradientChanged,
    PeerLost,
    ReplicasDiffer,
    TooManySkips,
)
from thinwire.local_steps import LocalSteps
from thinwire.metrics import Metrics
from thinwire.optimizers.birder import Birder
from thinwire.optimizers.cd_adam import CDAdam
from thinwire.optimizers.distributed_lion import DistributedLion
from thinwire.optimizers.lamb import Lamb
from thinwire.optimizers.onebit_adam import OneBitAdam
from thinwire.optimizers.onebit_lamb import OneBitLamb
from thinwire.optimizers.sketched_amsgrad import SketchedAMSGrad
from thinwire.optimizers.zero_one_adam import ZeroOneAdam
from thinwire.outer.metrics import LocalMetrics
from thinwire.outer.muon_adamw import MuonAdamW

__all__ = [
    "Birder",
    "CDAdam",
    "Compression",
    "CorruptCheckpoint",
    "CorruptPacket",
    "DistributedLion",
    "GradientChanged",
    "Lamb",
    "LocalMetrics",
    "LocalSteps",
    "Metrics",
    "MuonAdamW",
    "OneBitAdam",
    "OneBitLamb",
    "PeerLost",
    "ReplicasDiffer",
    "SignSGD",
    "SketchedAMSGrad",
    "TooManySkips",
    "ZeroOneAdam",
    "__version__",
    "attach",
    "checkpoint",
    "compress",
    "detach",
    "plan",
]

if TYPE_CHECKING:
    from thinwire.planning.api import plan


def __getattr__(name: str) -> Any:
    # Training does not need it.
    if name == "plan":
        from thinwire.planning.api import plan

        return plan
    raise AttributeError(f"module 'thinwire' has no attribute {name!r}")
