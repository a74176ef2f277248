"""The kernel's view of one TCP connection, apart from its bytes: options, and signs that the other machine
died.

If a connection refuses an option, because it is gone or the system does not have the option, the refusal is
ignored: the next read or write shows whether the connection is gone.
"""

import socket
import struct
import sys
from contextlib import suppress

from node.transport.handshake import KEEPALIVE_SECONDS

KEEPALIVE_QUESTIONS = 3
"""Number of keepalive probes to a silent machine. They are ten seconds apart and begin after half a
minute."""
REPEATED_MIN = 2
"""Least number of retransmissions that count as a sign. A single packet may just be on its way."""

_TCP_INFO_BYTES = 60
_RETRANSMITS_AT, _PROBES_AT, _LAST_ACK_AT = 2, 3, 56
"""Offsets in Linux's `struct tcp_info`: the number of retransmissions, the number of probes, and the
milliseconds since the last answer."""


class KernelSocket:
    """The options of a connected socket that another object reads, writes and closes."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        with suppress(OSError, AttributeError):
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_QUESTIONS)

    def queue_little(self, unsent_bytes_max: int) -> None:
        """Limit the unsent bytes that the kernel queues in addition to those in flight."""
        with suppress(OSError, AttributeError):
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, unsent_bytes_max)

    def take_little(self, received_bytes_max: int) -> None:
        """Limit the bytes that the kernel receives ahead of the reader."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, received_bytes_max)

    def leave_nothing(self) -> None:
        """End without TIME_WAIT. Otherwise no connection between the same two ports could follow for a
        minute. Unsent bytes are lost."""
        with suppress(OSError):
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def ask_often(self, *, is_doubted: bool) -> None:
        """Make the kernel probe the other machine every second if it `is_doubted`, else at the usual
        interval."""
        idle_seconds, pause_seconds = (1, 1) if is_doubted else (KEEPALIVE_SECONDS, KEEPALIVE_SECONDS // 3)
        with suppress(OSError, AttributeError):
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, pause_seconds)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, idle_seconds)

    def has_vanished(self, silent_seconds: float) -> bool:
        """Return whether the kernel has retransmitted without an answer for this long; only Linux reports
        it."""
        if sys.platform != "linux":
            return False
        try:
            info = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
        except OSError:
            return False
        repeated = max(info[_RETRANSMITS_AT], info[_PROBES_AT])
        waited_seconds = int.from_bytes(info[_LAST_ACK_AT : _LAST_ACK_AT + 4], sys.byteorder) / 1000
        return repeated >= REPEATED_MIN and waited_seconds >= silent_seconds
