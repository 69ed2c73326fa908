"""Slow networks on one Linux machine: hosts are network namespaces, and their links have the rate that you choose.

    with Testbed(hosts=4, rate="100mbit") as testbed:
        code = testbed.run(["python", "train.py"], ranks=2)
        print(testbed.bytes_sent())

Needs root, ``ip`` and ``tc``. docs/testbed.md says what is modelled, and what is not.
"""

from thinwire.testbed.counter import LinkCounter
from thinwire.testbed.leftovers import remove_leftovers
from thinwire.testbed.network import Host, Testbed
from thinwire.testbed.processes import check_ranks, enter_namespace
from thinwire.testbed.shaping import parse_delay, parse_rate
from thinwire.testbed.tools import TestbedUnavailable, require_tools

__all__ = [
    "Host",
    "LinkCounter",
    "Testbed",
    "TestbedUnavailable",
    "check_ranks",
    "enter_namespace",
    "parse_delay",
    "parse_rate",
    "remove_leftovers",
    "require_tools",
]
