"""Where ranks come from: a process that has imported all they need, and forks.

`python -m thinwire.cli.chaos.nursery <descriptor>`, with a socket to the supervisor: orders and a rank's line come in,
process ids go out. A forked rank leaves the loop and ends as any program does, through the whole exit of Python. Ranks
stay zombies until the supervisor has asked for their exit codes, so that their ids cannot become another's before.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import socket
import sys
from collections.abc import Callable

from thinwire._torch_compat import IMPORTED_BY_OPTIMIZERS
from thinwire.cli.chaos.worker import LONGEST_REPORT, Line, Orders, main
from thinwire.testbed.launcher import die_with


def serve(control: socket.socket) -> tuple[Orders, Line] | None:
    """In the nursery: None when the supervisor is gone. In a rank: what it is to do."""
    nursery = os.getpid()
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, LONGEST_REPORT, 1)
        if not message:
            return None
        asked = json.loads(message)
        if "reap" in asked:
            _, status = os.waitpid(asked["reap"], 0)
            control.send(json.dumps({"code": os.waitstatus_to_exitcode(status)}).encode())
            continue
        (descriptor,) = descriptors
        pid = os.fork()
        if pid == 0:
            die_with(nursery)
            control.close()
            return Orders.from_json(asked["orders"]), Line(socket.socket(fileno=descriptor))
        os.close(descriptor)
        control.send(json.dumps({"pid": pid}).encode())


def run(play: Callable[[Orders, Line], None]) -> None:
    """Be the nursery of ranks that `play`."""
    importlib.import_module(IMPORTED_BY_OPTIMIZERS)
    # What all of them have in common is not theirs to collect: at its exit each would copy and go through all of it,
    # for a second of a core that the others need.
    gc.collect()
    gc.freeze()
    supervisor = socket.socket(fileno=int(sys.argv[1]))
    supervisor.send(b"{}")
    work = serve(supervisor)
    if work is not None:
        play(*work)


if __name__ == "__main__":
    run(main)
