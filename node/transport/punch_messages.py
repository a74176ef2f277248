"""`/peerloom/punch/1`: the messages of two peers before both dial at once, as data.

Over a stream on a relay or an older path go Offer, the other's Offer, then RoundTrip and its echo, which
measure the round trip, and Begin, after which both dial at one instant. As in libp2p's DCUtR the side that
was reached through the relay begins the conversation. On a separate stream Observe asks a peer with a public
address where it sees the asker. A third peer that both know introduces two peers without any path. One sends
it Introduce; the other gets Introduced, as a single message, and opens a stream with Meet. Their following
messages are passed on, a few each.
"""

from typing import Annotated

import msgspec

from crypto.contact import ADDRESS_LENGTH_MAX
from crypto.encoding import decode
from crypto.errors import RemoteProtocolError
from crypto.identity import PEER_ID_BYTES

PROTOCOL = "/peerloom/punch/1"
CANDIDATES_MAX = 4
"""For each transport: an address of each family in the local network, and one outside."""
MESSAGE_BYTES_MAX = 3_072
TOKEN_BYTES = 16
OFFER_BYTES_MIN = 1_000
"""The least size of an offer: it makes a peer send at most three times as many bytes to all hosts that did
not ask (`punching.SENT_PER_BYTE_MAX`)."""

Candidate = Annotated[str, msgspec.Meta(min_length=1, max_length=ADDRESS_LENGTH_MAX)]
Candidates = Annotated[tuple[Candidate, ...], msgspec.Meta(max_length=CANDIDATES_MAX)]
RawPeer = Annotated[bytes, msgspec.Meta(min_length=PEER_ID_BYTES, max_length=PEER_ID_BYTES)]
Token = Annotated[bytes, msgspec.Meta(min_length=TOKEN_BYTES, max_length=TOKEN_BYTES)]
Place = Annotated[str, msgspec.Meta(max_length=ADDRESS_LENGTH_MAX)]


class PunchOffer(msgspec.Struct, frozen=True, array_like=True, tag="offer"):
    """My addresses, by TCP and by UDP."""

    tcp: Candidates
    udp: Candidates
    filling: Annotated[bytes, msgspec.Meta(max_length=OFFER_BYTES_MIN)] = b""


class RoundTrip(msgspec.Struct, frozen=True, array_like=True, tag="round_trip"):
    """Send this back at once."""


class Begin(msgspec.Struct, frozen=True, array_like=True, tag="begin"):
    """Dial now; I do as soon as you have read this."""


class Introduce(msgspec.Struct, frozen=True, array_like=True, tag="introduce"):
    """Introduce this peer to me, and pass on what follows."""

    peer: RawPeer


class Introduced(msgspec.Struct, frozen=True, array_like=True, tag="introduced"):
    """This peer wants to meet you: come with the token."""

    token: Token
    peer: RawPeer


class Meet(msgspec.Struct, frozen=True, array_like=True, tag="meet"):
    """I am here for the peer of this token: pass its messages on."""

    token: Token


class Observe(msgspec.Struct, frozen=True, array_like=True, tag="observe"):
    """Where do you see me?"""


class ObservedAddresses(msgspec.Struct, frozen=True, array_like=True, tag="observed"):
    """The source of this stream, and that of your datagrams if any came lately."""

    tcp: Place
    udp: Place


Passed = PunchOffer | RoundTrip | Begin
"""Messages that two peers exchange through a third one that introduced them."""
Message = PunchOffer | RoundTrip | Begin | Introduce | Introduced | Meet | Observe | ObservedAddresses


def read_message(data: bytes) -> Message:
    """Return the message in `data`. Raises RemoteProtocolError, also for an offer that is not filled: it
    would cause more bytes than it has."""
    message: Message = decode(data, Message, bytes_max=MESSAGE_BYTES_MAX)
    if isinstance(message, PunchOffer) and len(data) < OFFER_BYTES_MIN:
        raise RemoteProtocolError(f"an offer of less than {OFFER_BYTES_MIN} bytes")
    return message
