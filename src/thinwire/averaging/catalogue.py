"""The compressors of `thinwire.compress`, by name."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from thinwire.averaging.powersgd import PowerSgdRule
from thinwire.averaging.rule import AveragingRule, ElementwiseRule
from thinwire.compressors.chunked_topk import ChunkedTopKScheme
from thinwire.compressors.dct_topk import DctTopKScheme
from thinwire.compressors.gradient_compressor import Scheme
from thinwire.compressors.gtopk import GlobalTopKScheme
from thinwire.compressors.laq import LaqScheme
from thinwire.compressors.lossless import LosslessScheme
from thinwire.compressors.natural import NaturalScheme
from thinwire.compressors.onebit_sgd import OneBitSGDScheme
from thinwire.compressors.qsgd import QSGDScheme
from thinwire.compressors.quantized import QuantizedScheme
from thinwire.compressors.randomk import RandomKScheme
from thinwire.compressors.sign import SignScheme
from thinwire.compressors.signsgd import SignSGDScheme
from thinwire.compressors.sketched import CountSketchScheme
from thinwire.compressors.terngrad import TernGradScheme
from thinwire.compressors.topk import TopKScheme

SCHEMES: Mapping[str, Callable[..., Scheme]] = {
    "int4": functools.partial(QuantizedScheme, 4),
    "int8": functools.partial(QuantizedScheme, 8),
    "int3": functools.partial(QuantizedScheme, 3),
    "int2": functools.partial(QuantizedScheme, 2, block=32),
    "int1": functools.partial(QuantizedScheme, 1),
    "sign": SignScheme,
    "onebit_sgd": OneBitSGDScheme,
    "signsgd": SignSGDScheme,
    "qsgd": QSGDScheme,
    "terngrad": TernGradScheme,
    "natural": NaturalScheme,
    "topk": TopKScheme,
    "gtopk": GlobalTopKScheme,
    "chunked_topk": ChunkedTopKScheme,
    "dct_topk": DctTopKScheme,
    "randomk": RandomKScheme,
    "count_sketch": CountSketchScheme,
    "laq": LaqScheme,
    "none": LosslessScheme,
}
"""Compressors whose packets hold the elements of a shard."""
OTHERS: Mapping[str, Callable[..., AveragingRule]] = {
    "powersgd": PowerSgdRule,
}
NAMES = (*SCHEMES, *OTHERS)


def rule_of(name: str, options: Mapping[str, Any], residual_decay: float = 1.0) -> AveragingRule:
    """The rule with a name, and with options.

    Raises:
        ValueError: for an unknown name, with the list of names; for an option's value.
        TypeError: for an unknown option, with the list of options.
    """
    if not isinstance(name, str) or name not in NAMES:
        raise ValueError(f"compressor={name!r}: expected one of {', '.join(NAMES)}{_closest(name)}")
    make = SCHEMES.get(name) or OTHERS[name]
    known = [each for each in inspect.signature(make).parameters if each != "residual_decay"]
    unknown = [option for option in options if option not in known]
    if unknown:
        expected = ", ".join(known) or "none"
        raise TypeError(f"compressor {name!r} has no option {unknown[0]!r}: its options are {expected}")
    if name in SCHEMES:
        return ElementwiseRule(name, SCHEMES[name](**options), residual_decay)
    return OTHERS[name](**options, residual_decay=residual_decay)


def _closest(name: object) -> str:
    found = difflib.get_close_matches(str(name).lower(), NAMES, n=1)
    return f". Did you mean {found[0]!r}?" if found else ""
