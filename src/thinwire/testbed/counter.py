"""The bytes that leave an interface, read by a process on that host: one question to the kernel, no other program."""

from __future__ import annotations

import os
import socket
import struct

_HEADER = struct.Struct("=IHHII")  # nlmsghdr: length, type, flags, sequence, port
_QUEUE = struct.Struct("=BBHiIII")  # tcmsg: family, padding, interface, handle, parent, info
_ATTRIBUTE = struct.Struct("=HH")  # rtattr: length, type
_BYTES = struct.Struct("=Q")  # how tc_stats begins
_ERROR, _DONE, _GET_QUEUES, _ASK_FOR_ALL = 2, 3, 38, 0x301
_ROOT = 0xFFFFFFFF
_STATISTICS = 3
_MESSAGE_BYTES = 1 << 16


class LinkCounter:
    """Counts what leaves an interface, as `Testbed.bytes_sent` does: every frame with its headers.

    A reading takes some 20 µs, so that a rank can count the bytes of each of its steps.

    Args:
        interface: of the namespace that the calling thread is in. Its queue is a testbed's.

    Raises:
        OSError: if there is no such interface, or this is not Linux.
    """

    def __init__(self, interface: str) -> None:
        self._interface = socket.if_nametoindex(interface)
        # It stays in the namespace of the thread that opens it.
        self._kernel = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE)

    def bytes_sent(self) -> int:
        """All that left so far."""
        request = _QUEUE.pack(socket.AF_UNSPEC, 0, 0, 0, 0, 0, 0)
        self._kernel.send(_HEADER.pack(_HEADER.size + len(request), _GET_QUEUES, _ASK_FOR_ALL, 0, 0) + request)
        found: int | None = None
        while True:
            answer = self._kernel.recv(_MESSAGE_BYTES)
            while answer:
                length, kind, *_ = _HEADER.unpack_from(answer)
                if kind == _ERROR:
                    (number,) = struct.unpack_from("=i", answer, _HEADER.size)
                    raise OSError(-number, os.strerror(-number))
                if kind == _DONE:
                    if found is None:
                        raise OSError(f"interface {self._interface} has no queue that counts")
                    return found
                message = answer[_HEADER.size : length]
                _, _, _, interface, _, parent, _ = _QUEUE.unpack_from(message)
                if interface == self._interface and parent == _ROOT:
                    found = _counted(message[_QUEUE.size :])
                answer = answer[_aligned(length) :]

    def close(self) -> None:
        """Release the descriptor."""
        self._kernel.close()


def _counted(attributes: bytes) -> int | None:
    while attributes:
        length, kind = _ATTRIBUTE.unpack_from(attributes)
        if kind == _STATISTICS:
            return _BYTES.unpack_from(attributes, _ATTRIBUTE.size)[0]
        attributes = attributes[_aligned(length) :]
    return None


def _aligned(length: int) -> int:
    return -(-length // 4) * 4
