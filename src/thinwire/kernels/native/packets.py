"""Headers and checksums of packets for a device: as the reference makes them, but for the checksums."""

from __future__ import annotations

import functools

from thinwire.kernels import reference
from thinwire.kernels.native.crc import crc32c

packet_seal = functools.partial(reference.packet_seal, checksum=crc32c)
packet_check = functools.partial(reference.packet_check, checksum=crc32c)
