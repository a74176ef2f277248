"""A long line between two machines of a laboratory, which delivers each packet after a delay.

python -m tests.lab.long_line HOLDER-PID SECONDS ONE-MACHINE INTERFACE OTHER-MACHINE INTERFACE

Both ends are tunnel interfaces that this program makes, because many kernels lack netem, their own means to
delay packets. The program ends with the process that holds the laboratory.
"""

import ctypes
import fcntl
import heapq
import os
import select
import struct
import sys
import time
from contextlib import suppress

PACKET_BYTES = 65_536
LOOK_SECONDS = 0.5
HELD_MAX = 20_000
"""Maximum number of packets on the way; further packets are lost, as in a full queue."""
_CLONE_NEWNET = 0x40000000
_TUNSETIFF = 0x400454CA
_TUN_WITHOUT_HEADER = 0x1001


def open_end(machine: str, interface: str) -> int:
    """Create one end of the line on a machine."""
    libc = ctypes.CDLL(None, use_errno=True)
    namespace = os.open(f"/run/netns/{machine}", os.O_RDONLY)
    if libc.setns(namespace, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")
    os.close(namespace)
    end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(end, _TUNSETIFF, struct.pack("16sH22x", interface.encode(), _TUN_WITHOUT_HEADER))
    return end


def carry(ends: tuple[int, int], seconds: float, holder: int) -> None:
    """Carry packets in both directions as long as the holder lives."""
    waiting: list[tuple[float, int, int, bytes]] = []
    number = 0
    while True:
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            _, _, end, packet = heapq.heappop(waiting)
            with suppress(OSError):
                os.write(end, packet)
        pause = min(LOOK_SECONDS, waiting[0][0] - now) if waiting else LOOK_SECONDS
        for end in select.select(ends, (), (), max(0.0, pause))[0]:
            far = ends[1] if end == ends[0] else ends[0]
            with suppress(BlockingIOError):
                while len(waiting) < HELD_MAX:
                    packet = os.read(end, PACKET_BYTES)
                    number += 1
                    heapq.heappush(waiting, (time.monotonic() + seconds, number, far, packet))
        os.kill(holder, 0)


def main() -> None:
    holder, seconds, *places = sys.argv[1:]
    ends = open_end(places[0], places[1]), open_end(places[2], places[3])
    with suppress(ProcessLookupError):
        carry(ends, float(seconds), int(holder))


if __name__ == "__main__":
    main()
