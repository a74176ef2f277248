"""The size of a message on the wire beyond its own bytes. Pure."""

from dataclasses import dataclass

from crypto.sessions.packets import DATAGRAM_BYTES_MAX, payload_bytes_max

PACKET_BYTES = 48
"""Headers of IPv6 and UDP."""
STREAM_OVERHEAD = 1.06
"""Bytes on the wire for each of a stream: headers of IPv6 and TCP, Noise's tags."""

_NAME = "/x"
_ENVELOPE_BYTES = DATAGRAM_BYTES_MAX - payload_bytes_max(_NAME) - len(_NAME)


def envelope_bytes(protocol: str) -> int:
    """Return the overhead of each datagram of a protocol in bytes: packet headers, a session's header and
    tag, the name."""
    return PACKET_BYTES + _ENVELOPE_BYTES + len(protocol.encode())


@dataclass(frozen=True)
class SentTraffic:
    """Sent messages, arrived or not, and their bytes with envelopes; 0 where bytes are not counted."""

    messages: int = 0
    sent_bytes: int = 0

    def __add__(self, other: "SentTraffic") -> "SentTraffic":
        return SentTraffic(self.messages + other.messages, self.sent_bytes + other.sent_bytes)
