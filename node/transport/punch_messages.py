"""`/peerloom/punch/1`: the messages that two peers exchange before both dial simultaneously, as data.

The messages travel on a stream over a relay or an older path. Each peer sends an Offer. Then RoundTrip and
its echo measure the round trip, and after Begin both dial at one instant. As in libp2p's DCUtR, the peer that
was reached through the relay begins the conversation. On a separate stream, Observe asks a peer with a public
address at which address it sees the asker. A third peer that knows both can introduce two peers that have no
path. One sends it Introduce; the other gets Introduced, as a single message, and opens a stream with Meet.
The third peer then passes on a few messages in each direction.
"""

from typing import Annotated

import msgspec

from crypto.contact import ADDRESS_LENGTH_MAX
from crypto.encoding import decode
from crypto.errors import RemoteProtocolError
from crypto.identity import PEER_ID_BYTES

PROTOCOL = "/peerloom/punch/1"
CANDIDATES_MAX = 4
"""Maximum number of addresses for each transport: an address of each IP version in the local network, and one
outside address."""
MESSAGE_BYTES_MAX = 3_072
TOKEN_BYTES = 16
OFFER_BYTES_MIN = 1_000
"""Least size of an offer. It makes a peer send at most three times as many bytes in all to hosts that did not
ask for them (`punching.SENT_PER_BYTE_MAX`)."""

Candidate = Annotated[str, msgspec.Meta(min_length=1, max_length=ADDRESS_LENGTH_MAX)]
Candidates = Annotated[tuple[Candidate, ...], msgspec.Meta(max_length=CANDIDATES_MAX)]
RawPeer = Annotated[bytes, msgspec.Meta(min_length=PEER_ID_BYTES, max_length=PEER_ID_BYTES)]
Token = Annotated[bytes, msgspec.Meta(min_length=TOKEN_BYTES, max_length=TOKEN_BYTES)]
Place = Annotated[str, msgspec.Meta(max_length=ADDRESS_LENGTH_MAX)]


class PunchOffer(msgspec.Struct, frozen=True, array_like=True, tag="offer"):
    """The sender's addresses for TCP and for UDP."""

    tcp: Candidates
    udp: Candidates
    filling: Annotated[bytes, msgspec.Meta(max_length=OFFER_BYTES_MIN)] = b""


class RoundTrip(msgspec.Struct, frozen=True, array_like=True, tag="round_trip"):
    """A request to send this message back immediately."""


class Begin(msgspec.Struct, frozen=True, array_like=True, tag="begin"):
    """A request to dial now. The sender dials as soon as it expects this message to have been read."""


class Introduce(msgspec.Struct, frozen=True, array_like=True, tag="introduce"):
    """A request to introduce this peer to the sender, and to pass on what follows."""

    peer: RawPeer


class Introduced(msgspec.Struct, frozen=True, array_like=True, tag="introduced"):
    """This peer wants to meet the recipient, who should open a stream and send Meet with the token."""

    token: Token
    peer: RawPeer


class Meet(msgspec.Struct, frozen=True, array_like=True, tag="meet"):
    """The answer to Introduced: a request to pass on the messages of the peer that belongs to this token."""

    token: Token


class Observe(msgspec.Struct, frozen=True, array_like=True, tag="observe"):
    """A question: at which address does the recipient see the sender?"""


class ObservedAddresses(msgspec.Struct, frozen=True, array_like=True, tag="observed"):
    """The source address of this stream, and the source of the asker's datagrams if any came recently."""

    tcp: Place
    udp: Place


Passed = PunchOffer | RoundTrip | Begin
"""Messages that a third peer passes on between two peers it has introduced."""
Message = PunchOffer | RoundTrip | Begin | Introduce | Introduced | Meet | Observe | ObservedAddresses


def read_message(data: bytes) -> Message:
    """Return the message in `data`. Raises RemoteProtocolError, also for an offer that is not padded, because
    it would cause more bytes than it has."""
    message: Message = decode(data, Message, bytes_max=MESSAGE_BYTES_MAX)
    if isinstance(message, PunchOffer) and len(data) < OFFER_BYTES_MIN:
        raise RemoteProtocolError(f"an offer shorter than {OFFER_BYTES_MIN} bytes")
    return message
