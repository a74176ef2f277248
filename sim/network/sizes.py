"""The size of a message on the wire beyond its own bytes. Pure."""

from dataclasses import dataclass

from crypto.sessions.packets import DATAGRAM_BYTES_MAX, payload_bytes_max

PACKET_BYTES = 48
"""Headers of IPv6 and UDP."""
STREAM_OVERHEAD = 1.06
"""Bytes on the wire per byte of a stream, with the headers of IPv6 and TCP and Noise's tags."""

_NAME = "/x"
_ENVELOPE_BYTES = DATAGRAM_BYTES_MAX - payload_bytes_max(_NAME) - len(_NAME)


def envelope_bytes(protocol: str) -> int:
    """Return the overhead of each datagram of a protocol in bytes: packet headers, the header and tag of a
    session, and the protocol's name."""
    return PACKET_BYTES + _ENVELOPE_BYTES + len(protocol.encode())


@dataclass(frozen=True)
class SentTraffic:
    """The number of sent messages, arrived or not, and their bytes with envelopes; 0 if bytes are not
    counted."""

    messages: int = 0
    sent_bytes: int = 0

    def __add__(self, other: "SentTraffic") -> "SentTraffic":
        return SentTraffic(self.messages + other.messages, self.sent_bytes + other.sent_bytes)
