"""The first program of a rank: ties the rank's life to the testbed's, then becomes the command.

Run by its path, `python launcher.py <pid of the testbed's process> <command> ...`, in the rank's namespace. It knows
nothing of thinwire, so that it costs a few milliseconds.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """Have this process killed when the thread of its parent ends that has started it."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        sys.exit(128 + signal.SIGKILL)  # it was killed before the line above


def main() -> None:
    """Become the command, or print why that is not possible."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    # If the testbed's process is killed, nothing else would end this one.
    die_with(parent)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        # As a shell does it.
        print(f"thinwire testbed: cannot run {command[0]!r}: {error.strerror}", file=sys.stderr)
        sys.exit(127 if isinstance(error, FileNotFoundError) else 126)


if __name__ == "__main__":
    main()
