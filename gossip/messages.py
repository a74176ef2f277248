"""Messages between members, and the signed facts inside them.

There are two layers. A *message* goes from one peer to the next: Ping, Ack, Nack, PingRequest (Das et al.
2002, section 3; the Nack is Lifeguard's), Gossip, Compare and Sync. If peers list only their neighbourhood,
ScopedCompare and ScopedSync take the place of the last two. A *fact* travels inside messages from peer to
peer and is signed by its author (ARCHITECTURE law 8): the subject signs alive and left facts, the accuser
suspect and dead facts. Nothing here keeps state or decides anything.
"""

from functools import lru_cache
from typing import Annotated, NamedTuple
from weakref import WeakValueDictionary

import msgspec
from blake3 import blake3

from crypto.contact import (
    ADDRESS_LENGTH_MAX,
    ADDRESSES_MAX,
    NAME_LENGTH_MAX,
    PLACE_LENGTH_MAX,
    parse_addresses,
)
from crypto.encoding import decode, encode
from crypto.errors import RemoteProtocolError
from crypto.facts import Fact, Signer
from crypto.identity import PEER_ID_BYTES, PeerId
from gossip.coordinates import Coordinate
from gossip.member import METADATA_BYTES_MAX, MemberChanged, MemberUp, Profile
from gossip.view import DEPTH_MAX

ALIVE_BODY_BYTES_MAX = 720
"""Maximum size of an alive body. So any single fact, with author and signature, fits into
`SwimSettings.facts_bytes_max` and into a datagram."""
FACT_BYTES_MAX = ALIVE_BODY_BYTES_MAX + 110
"""Maximum size of an alive fact on the wire: body, author 32, signature 64 and at most 14 bytes of
MessagePack."""
FACTS_MAX = 32
"""Maximum number of facts in a message other than Sync. The smallest takes over 100 bytes, so no valid
message holds more."""
MEMBERS_MAX = 2_000
"""Maximum number of members in a list. A neighbourhood is split long before this."""
SYNC_FACTS_MAX = 2 * MEMBERS_MAX
"""Maximum number of facts in a Sync: an alive fact and a verdict for each member."""
MESSAGE_BYTES_MAX = MEMBERS_MAX * (FACT_BYTES_MAX + 200) + 1_024
"""Maximum size of a Sync: every member dead, with an alive fact (830) and a verdict (under 200)."""
READ_MAX = 2_048
"""Number of decoded facts cached, because most facts that arrive were just received from a different peer."""
DIGESTS_MAX = 3
"""Maximum number of digests in a comparison of scopes: the depths of peers around one key usually differ by
one, seldom by two."""
MARK_BYTES = 8
LIFE_BYTES = 12
INSTANCE_BYTES = 6
"""Number of random bytes in the name of a life, in addition to six bytes of Unix milliseconds."""
STARTED_MAX = 2**48 - 1
INCARNATION_JUMP_MAX = 2**42
"""Maximum jump of an incarnation above the held one, or above 0: 139 years of milliseconds. A restart takes
the Unix time of a clock that may be wrong. A larger jump would leave no room above it."""
TOPIC_BYTES_MAX = 64
BROADCAST_BYTES_MAX = 512
"""Maximum size of the data in one broadcast. Larger data goes into a blob whose hash the broadcast names."""
SILENCE_MILLISECONDS_MAX = 3_600_000
"""Maximum claimed silence: an hour. It only appears in the text of a reason."""

Incarnation = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Number = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]
Subject = Annotated[bytes, msgspec.Meta(min_length=PEER_ID_BYTES, max_length=PEER_ID_BYTES)]
Milliseconds = Annotated[int, msgspec.Meta(ge=0, le=SILENCE_MILLISECONDS_MAX)]
Wall = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]
Depth = Annotated[int, msgspec.Meta(ge=0, le=DEPTH_MAX)]
Facts = Annotated[tuple[Fact, ...], msgspec.Meta(max_length=FACTS_MAX)]


class AliveBody(msgspec.Struct, frozen=True, array_like=True, tag="alive"):
    """Signed by the subject: it is alive, under this name, at these addresses (without `/p2p/`)."""

    incarnation: Incarnation
    name: Annotated[str, msgspec.Meta(max_length=NAME_LENGTH_MAX)]
    addresses: Annotated[
        tuple[Annotated[str, msgspec.Meta(max_length=PLACE_LENGTH_MAX)], ...],
        msgspec.Meta(max_length=ADDRESSES_MAX),
    ]
    metadata: Annotated[bytes, msgspec.Meta(max_length=METADATA_BYTES_MAX)]
    life: Annotated[bytes, msgspec.Meta(max_length=LIFE_BYTES)] = b""
    """The author's life: one start of its process."""
    rival: Annotated[bytes, msgspec.Meta(max_length=LIFE_BYTES)] = b""
    """A different life of this identity that the subject knows; empty if there is none. An earlier life
    cannot name a later one. So a peer that reads its own life here knows that the author runs
    concurrently."""
    circuits: Annotated[
        tuple[Annotated[str, msgspec.Meta(max_length=ADDRESS_LENGTH_MAX)], ...],
        msgspec.Meta(max_length=ADDRESSES_MAX),
    ] = ()
    """Addresses through relays. They are separate, because versions that do not know relays refuse a fact
    with such an address in `addresses`."""


class SuspectBody(msgspec.Struct, frozen=True, array_like=True, tag="suspect"):
    """Signed by an accuser: `subject` in `incarnation` answered neither the accuser nor its relays."""

    subject: Subject
    incarnation: Incarnation
    silence_milliseconds: Milliseconds


class DeadBody(msgspec.Struct, frozen=True, array_like=True, tag="dead"):
    """Signed by an accuser: its suspicion of `subject` in `incarnation` ended without being refuted."""

    subject: Subject
    incarnation: Incarnation
    silence_milliseconds: Milliseconds


class BroadcastBody(msgspec.Struct, frozen=True, array_like=True, tag="broadcast"):
    """Signed by its author: a user's broadcast, which replaces the previous one with this topic."""

    topic: Annotated[bytes, msgspec.Meta(min_length=1, max_length=TOPIC_BYTES_MAX)]
    sequence: Incarnation
    data: Annotated[bytes, msgspec.Meta(max_length=BROADCAST_BYTES_MAX)]


class LeftBody(msgspec.Struct, frozen=True, array_like=True, tag="left"):
    """Signed by the subject: it leaves voluntarily."""

    incarnation: Incarnation


Body = AliveBody | SuspectBody | DeadBody | LeftBody | BroadcastBody

_PURPOSES: dict[type, str] = {
    AliveBody: "swim-alive",
    SuspectBody: "swim-suspect",
    DeadBody: "swim-dead",
    LeftBody: "swim-left",
    BroadcastBody: "swim-broadcast",
}


class Ping(msgspec.Struct, frozen=True, array_like=True, tag="ping"):
    """A probe. Every peer that asks is answered, by an Ack with the same number."""

    number: Number
    facts: Facts = ()


class StreamPing(msgspec.Struct, frozen=True, array_like=True, tag="stream-ping"):
    """A Ping sent over a stream, for peers that no datagram reaches. The Ack is also sent over a stream if
    the Ping came over one, from a member that does not ask more often than it probes."""

    number: Number
    facts: Facts = ()


class Ack(msgspec.Struct, frozen=True, array_like=True, tag="ack"):
    """A sign that the sender is present; or, if a relay sends it, that the target of the PingRequest is.
    `here`: the sender's coordinate. `wall`: its clock, in Unix milliseconds."""

    number: Number
    facts: Facts = ()
    here: Coordinate | None = None
    wall: Wall | None = None


class Nack(msgspec.Struct, frozen=True, array_like=True, tag="nack"):
    """A relay's report that it is present itself, but that the target has not answered it so far
    (Lifeguard)."""

    number: Number
    facts: Facts = ()


class PingRequest(msgspec.Struct, frozen=True, array_like=True, tag="ping-request"):
    """A request to ping `target` for the sender, and to pass on its Ack under the sender's number."""

    number: Number
    target: Subject
    facts: Facts = ()


class Gossip(msgspec.Struct, frozen=True, array_like=True, tag="gossip"):
    """Facts only; there is no answer."""

    facts: Facts


class Compare(msgspec.Struct, frozen=True, array_like=True, tag="compare"):
    """A digest of the sender's live members. If it differs, the answer is a Sync."""

    digest: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
    facts: Facts = ()


class Sync(msgspec.Struct, frozen=True, array_like=True, tag="sync"):
    """All that the sender knows (push); `reply_wanted` asks for what the sender lacks (pull). A Sync may be
    large."""

    reply_wanted: bool
    facts: Annotated[tuple[Fact, ...], msgspec.Meta(max_length=SYNC_FACTS_MAX)]


class ScopedCompare(msgspec.Struct, frozen=True, array_like=True, tag="scoped-compare"):
    """A Compare in a swarm that is divided into neighbourhoods. The sender's scope is `depth` bits deep. The
    digests cover the live members that the sender lists in the receiver's neighbourhood, at depths of
    `depth`, `depth` + 1 and so on.
    """

    depth: Depth
    digests: Annotated[
        tuple[Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)], ...],
        msgspec.Meta(min_length=1, max_length=DIGESTS_MAX),
    ]
    facts: Facts = ()


class ScopedSync(msgspec.Struct, frozen=True, array_like=True, tag="scoped-sync"):
    """A Sync in a swarm that is divided into neighbourhoods: all the sender's facts about members that the
    receiver lists too.

    The sender's scope is `depth` bits deep; None if it has not found its neighbourhood yet. An answer without
    facts means that the sender is not in the receiver's neighbourhood.
    """

    reply_wanted: bool
    depth: Depth | None
    facts: Annotated[tuple[Fact, ...], msgspec.Meta(max_length=SYNC_FACTS_MAX)]


Message = Ping | StreamPing | Ack | Nack | PingRequest | Gossip | Compare | Sync | ScopedCompare | ScopedSync


class ByStream(NamedTuple):
    """A message to send over a stream, however short it is. `is_answer`: use a stream only if the message
    that it answers came over one, otherwise a datagram."""

    message: Message
    is_answer: bool = False


def sign_body(signer: Signer, body: Body) -> Fact:
    """Return a fact signed by this peer."""
    return signer.sign(_PURPOSES[type(body)], encode(body))


def check_body(signer: Signer, fact: Fact, body: Body) -> None:
    """Check that the author signed `body`, which `read_body` returned. Raises RemoteProtocolError if not.

    An Ed25519 check costs 105 us: call this only if the fact would change something. Correct peers pass on
    only facts that they have checked, so the sender is at fault for a wrong signature.
    """
    signer.check(_PURPOSES[type(body)], fact)


@lru_cache(maxsize=READ_MAX)
def read_body(fact: Fact) -> Body:
    """Return the well-formed but unproven claim of a fact. Raises RemoteProtocolError if it is malformed."""
    if len(fact.author) != PEER_ID_BYTES:
        raise RemoteProtocolError("a fact with a malformed author")
    # Text is not cleaned here: `read_alive` refuses a name that needs cleaning, because no correct author
    # sends one.
    body: Body = decode(fact.body, Body, bytes_max=ALIVE_BODY_BYTES_MAX, cleans_text=False)
    return body


def subject_of(fact: Fact, body: Body) -> PeerId:
    """Return the subject of a fact."""
    return PeerId(body.subject if isinstance(body, SuspectBody | DeadBody) else fact.author)


def life_of(started_milliseconds: int, instance: bytes) -> bytes:
    """Return the name of a life that began at this Unix time. Later lives have greater names."""
    started = min(started_milliseconds, STARTED_MAX)
    return started.to_bytes(LIFE_BYTES - INSTANCE_BYTES, "big") + instance


def started_of(life: bytes) -> int:
    """Return the start of a life, in Unix milliseconds by its own clock."""
    return int.from_bytes(life[: LIFE_BYTES - INSTANCE_BYTES], "big")


def alive_body(profile: Profile, incarnation: int, life: bytes = b"", rival: bytes = b"") -> AliveBody:
    """Return a profile in the form in which it is announced. Addresses that do not fit are left out from the
    end."""
    addresses = [address.of(None) for address in profile.addresses[:ADDRESSES_MAX]]
    while True:
        texts = [str(address) for address in addresses if address.relay is None]
        places = tuple(text for text in texts if len(text) <= PLACE_LENGTH_MAX)
        circuits = tuple(str(address) for address in addresses if address.relay is not None)
        body = AliveBody(incarnation, profile.name, places, profile.metadata, life, rival, circuits)
        if len(encode(body)) <= ALIVE_BODY_BYTES_MAX:
            return body
        addresses.pop()


class AliveFact(msgspec.Struct, frozen=True, eq=False, weakref=True):
    """A member's profile and incarnation, and the alive fact that proves them."""

    peer: PeerId
    profile: Profile
    incarnation: int
    fact: Fact
    mark: bytes
    """Identifies the peer and its profile in a list's digest. The incarnation is left out, because a mere
    refutation need not reach all peers."""


def announced(fact: Fact, profile: Profile, body: AliveBody) -> AliveFact:
    """Return `profile` as its author announced it with `fact`, which contains `body`."""
    peer = PeerId(fact.author)
    said = encode((body.name, body.addresses, body.metadata, *body.circuits))
    return AliveFact(peer, profile, body.incarnation, fact, peer + blake3(said).digest(length=MARK_BYTES))


# All holders share one object. Otherwise the lists of many peers in one process would fill its memory.
_announced: WeakValueDictionary[Fact, AliveFact] = WeakValueDictionary()


def read_alive(fact: Fact, body: AliveBody) -> AliveFact:
    """Return the author's profile from an alive fact with `body`. Raises RemoteProtocolError if it is
    invalid."""
    said = _announced.get(fact)
    if said is None:
        # Names are shown in terminals and logs, so they must not have escape sequences or line breaks.
        if not body.name.isprintable():
            raise RemoteProtocolError("a member name with unprintable characters")
        peer = PeerId(fact.author)
        addresses = parse_addresses((*body.addresses, *body.circuits)[:ADDRESSES_MAX], peer)
        profile = Profile(body.name, addresses, body.metadata)
        said = _announced[fact] = announced(fact, profile, body)
    return said


def fact_bytes(fact: Fact) -> int:
    """Return how many bytes `fact` takes in a message; the result may be up to two too high."""
    return len(fact.author) + len(fact.body) + len(fact.signature) + 10


def check_jump(body: AliveBody, held: int) -> None:
    """Raise RemoteProtocolError if an incarnation is so far above the `held` one that no restart can reach
    it."""
    if body.incarnation - held > INCARNATION_JUMP_MAX:
        raise RemoteProtocolError("an incarnation that is too far above the known one")


def incarnation_of(fact: Fact) -> int:
    """Return the incarnation in a well-formed fact."""
    body = read_body(fact)
    return body.sequence if isinstance(body, BroadcastBody) else body.incarnation


def silence_of(fact: Fact) -> int:
    """Return how long the fact's author has received no ack, in milliseconds; 0 if the fact does not say."""
    body = read_body(fact)
    return body.silence_milliseconds if isinstance(body, SuspectBody | DeadBody) else 0


def milliseconds(seconds: float) -> int:
    """Return a silence in milliseconds, the unit of facts."""
    return min(max(int(seconds * 1000), 0), SILENCE_MILLISECONDS_MAX)


def member_up(said: AliveFact, sender: PeerId) -> MemberUp:
    """Return the event that a member is up."""
    profile = said.profile
    return MemberUp(said.peer, profile.name, profile.addresses, profile.metadata, said.incarnation, sender)


def member_changed(said: AliveFact) -> MemberChanged:
    """Return the event that a live member has changed."""
    profile = said.profile
    return MemberChanged(said.peer, profile.name, profile.addresses, profile.metadata, said.incarnation)
