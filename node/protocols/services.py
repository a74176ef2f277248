"""Services (models that answer) and `/peerloom/services/1`: finding services, and asking peers to hold their
stages.

A service's manifest is signed by its publisher and identifies the model by the hash of its graph. The graph
has a digest of each parameter's values, so the manifest identifies the weights too. All members hold the
manifest and pass it on, so a service outlives its publisher's node. Its id is the manifest's hash.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Literal

import msgspec
from blake3 import blake3
from msgspec.structs import replace

from crypto.encoding import decode, encode
from crypto.errors import RemoteProtocolError
from crypto.facts import Fact, Signer
from crypto.identity import PeerId
from partition.model.graph import LAYERS_MAX
from partition.plan.plan import STAGES_MAX
from partition.run.asks import Declined as Declined
from partition.run.asks import Done as Done
from partition.serve.messages import POSITION_MAX, ROLL_ROWS_MAX, UNIT_TOKENS_MAX, Hash, StageNumber
from partition.serve.messages import ServiceRow as ServiceRow
from partition.stage import BITS_BYTES

SERVICES_PROTOCOL = "/peerloom/services/1"
SERVICE_PURPOSE = "service-manifest"
STOP_SERVICE_PURPOSE = "service-stop"
NAMED_PURPOSE, ALL_PURPOSE = "service", "services"
"""Purposes of members' DHT records: one key for each service's name, and one key for all services. The value
is the manifest's fact."""
MANIFEST_BYTES_MAX = 640
"""Maximum size of a manifest, so that with its signature it fits a DHT record of 900 bytes."""
REQUEST_BYTES_MAX = 8_192
REPLY_BYTES_MAX = 16_384
REPLICAS_MAX = 16
SERVICES_MAX = 8
"""Maximum number of listings in one answer, one for each stage."""
VOCABULARY_MAX = 1 << 24
VECTOR_MAX = 1 << 16
"""Maximum number of values in the vector of a text; the largest encoders have some thousand."""
SESSIONS_SHOWN_MAX = 1 << 20
PACE_MAX = 1 << 36
"""A minute in nanoseconds. No useful stage takes longer for one token."""
ENDED_MAX = 256
"""Maximum number of stopped services that a node remembers, so that no late message restarts them."""

HOLDERS_MAX = 12
"""Maximum number of peers that a service may be restricted to, so that the manifest fits a record."""
HOLDER_BYTES = 16
"""Bytes of the hash of a peer's id: enough that nobody can find another id whose hash begins the same."""
Holder = Annotated[bytes, msgspec.Meta(min_length=HOLDER_BYTES, max_length=HOLDER_BYTES)]

TokensShown = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]

Name = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,79}\Z")]


class ServiceManifest(msgspec.Struct, frozen=True, array_like=True):
    """A service as its publisher defines it.

    `cuts` are the layers at which stages begin, without the first. `threads` must be equal for stages to
    agree to the bit. `text` is the way to tokenize: "bytes", or a tokenizer whose files have the list of
    chunks `tokenizer` (`node.content.text_files`); "" if the service takes only tokens. `run` and `step`
    identify the run and the checkpoint from which the weights come, if any. If `holders` is given, only these
    peers may hold a stage; each entry is the beginning of the hash of a peer's id. With `vector`, the model
    answers a text with this many values instead of tokens. Such a manifest has version 2, so a node that
    knows only version 1 takes no stage of it.
    """

    version: Literal[1, 2]
    name: Name
    graph: Hash
    cuts: Annotated[
        tuple[Annotated[int, msgspec.Meta(ge=1, le=LAYERS_MAX)], ...], msgspec.Meta(max_length=STAGES_MAX - 1)
    ]
    replicas: Annotated[int, msgspec.Meta(ge=1, le=REPLICAS_MAX)]
    vocabulary: Annotated[int, msgspec.Meta(ge=1, le=VOCABULARY_MAX)]
    context: Annotated[int, msgspec.Meta(ge=2, le=POSITION_MAX)]
    threads: Annotated[int, msgspec.Meta(ge=1, le=64)]
    at_milliseconds: Annotated[int, msgspec.Meta(ge=0, lt=2**53)]
    text: Literal["", "bytes", "tokenizer"] = ""
    tokenizer: Annotated[bytes, msgspec.Meta(max_length=32)] = b""
    stops: Annotated[
        tuple[Annotated[int, msgspec.Meta(ge=0, lt=VOCABULARY_MAX)], ...], msgspec.Meta(max_length=8)
    ] = ()
    run: Annotated[bytes, msgspec.Meta(max_length=32)] = b""
    step: Annotated[int, msgspec.Meta(ge=0, lt=2**53)] = 0
    holders: Annotated[tuple[Holder, ...], msgspec.Meta(max_length=HOLDERS_MAX)] = ()
    vector: Annotated[int, msgspec.Meta(ge=0, le=VECTOR_MAX)] = 0

    def __post_init__(self) -> None:
        if any(first >= last for first, last in pairwise(self.cuts)):
            raise ValueError("cuts that are not in ascending order")
        if (self.text == "tokenizer") != (len(self.tokenizer) == 32):
            raise ValueError("a tokenizer without its hash, or a hash without one")
        if self.text == "bytes" and (self.vocabulary != 256 or self.vector):
            raise ValueError("a model of bytes with a different vocabulary")
        if (self.version == 2) != bool(self.vector):
            raise ValueError("a manifest whose version does not match its content")
        if self.vector and self.context > UNIT_TOKENS_MAX:
            raise ValueError("a text that would not fit one unit")
        if len(self.run) not in (0, 32) or (self.step and not self.run):
            raise ValueError("a step without its run")

    def may_hold(self, peer: PeerId) -> bool:
        """Return whether a peer may hold a stage."""
        return not self.holders or holder_name(peer) in self.holders

    @property
    def stages(self) -> int:
        return len(self.cuts) + 1

    def ranges(self, layers: int) -> list[tuple[int, int]]:
        """Return the layers of each stage. Raises RemoteProtocolError if the cuts do not fit the model."""
        ends = (0, *self.cuts, layers)
        if any(first >= last for first, last in pairwise(ends)):
            raise RemoteProtocolError(f"the service's cuts do not fit a model of {layers} layers")
        return list(pairwise(ends))


@dataclass(frozen=True)
class Service:
    """A manifest with a valid signature."""

    id: bytes
    publisher: PeerId
    manifest: ServiceManifest
    fact: Fact

    @property
    def text(self) -> str:
        """The id as people see it: the first 16 hexadecimal digits."""
        return service_text(self.id)

    @property
    def requester(self) -> PeerId:
        """The publisher, with the name that owners' rules use."""
        return self.publisher


class StopServiceBody(msgspec.Struct, frozen=True, array_like=True):
    """The publisher has ended this service."""

    service: Hash


class Host(msgspec.Struct, frozen=True, tag="host"):
    """A request to hold this stage of a service; `rows` are its members. Answered by Done once the stage is
    loading, or Declined."""

    manifest: Fact
    stage: StageNumber
    rows: Annotated[tuple[ServiceRow, ...], msgspec.Meta(max_length=ROLL_ROWS_MAX)] = ()


class Find(msgspec.Struct, frozen=True, tag="find"):
    """A request to list the services of which the recipient is a member: the one with this id, or all if it
    is empty. Answered by ServicesFound."""

    service: Annotated[bytes, msgspec.Meta(max_length=32)] = b""


class StopService(msgspec.Struct, frozen=True, tag="stop"):
    """A request to release a stage, because the publisher ended the service with a signed StopServiceBody.
    Answered by Done."""

    stop: Fact


Request = Host | Find | StopService


class Listing(msgspec.Struct, frozen=True, array_like=True):
    """A service of which the asked node is a member. `sessions` are open at that node itself. Of the
    `tokens_max` tokens whose keys and values it has room for, `tokens` are in use. `bits` is the claimed bit
    class of its stage (a fingerprint of its exact output bits), empty if it has none or is not loaded. Its
    stage takes `decode_microseconds` for one more token of a session, and `read_nanoseconds` for a token of a
    prompt; 0 means not measured."""

    manifest: Fact
    rows: Annotated[tuple[ServiceRow, ...], msgspec.Meta(max_length=ROLL_ROWS_MAX)]
    sessions: Annotated[int, msgspec.Meta(ge=0, le=SESSIONS_SHOWN_MAX)]
    tokens: TokensShown = 0
    tokens_max: TokensShown = 0
    bits: Annotated[bytes, msgspec.Meta(max_length=BITS_BYTES)] = b""
    decode_microseconds: Annotated[int, msgspec.Meta(ge=0, le=PACE_MAX)] = 0
    read_nanoseconds: Annotated[int, msgspec.Meta(ge=0, le=PACE_MAX)] = 0


class ServicesFound(msgspec.Struct, frozen=True, tag="found"):
    """The listings; empty if the node is a member of no such service. Among the listings of one service, only
    the first has rows in addition to the node's own, and no more than fit."""

    listings: Annotated[tuple[Listing, ...], msgspec.Meta(max_length=SERVICES_MAX)] = ()


Reply = Done | Declined | ServicesFound


def make_found(listings: Iterable[Listing]) -> ServicesFound:
    """Return the answer of a node with these stages. Each of its services is listed once before any second
    stage. If the answer would be too long, the longest lists of members are cut."""
    firsts: dict[bytes, Listing] = {}
    others: list[Listing] = []
    for each in listings:
        if firsts.setdefault(each.manifest.body, each) is not each:
            others.append(replace(each, rows=each.rows[:1]))
    found = [*firsts.values(), *others][:SERVICES_MAX]
    while len(encode(ServicesFound(tuple(found)))) > REPLY_BYTES_MAX:
        longest = max(range(len(found)), key=lambda place: len(found[place].rows))
        rows = found[longest].rows
        found[longest] = replace(found[longest], rows=rows[: max(1, len(rows) // 2)])
        if len(rows) <= 1:
            found.pop()
    return ServicesFound(tuple(found))


def holder_name(peer: PeerId) -> bytes:
    """Return a peer's name in a manifest's list of holders."""
    return blake3(peer).digest(HOLDER_BYTES)


def service_text(service: bytes) -> str:
    """Return a service's id as people see it."""
    return service.hex()[:16]


def make_service(signer: Signer, manifest: ServiceManifest) -> Service:
    """Sign a manifest."""
    fact = signer.sign(SERVICE_PURPOSE, encode(manifest))
    return Service(blake3(fact.body).digest(), signer.peer, manifest, fact)


def check_service(signer: Signer, fact: Fact) -> Service:
    """Return the service whose manifest is in a fact. Raises RemoteProtocolError."""
    if len(fact.body) > MANIFEST_BYTES_MAX:
        raise RemoteProtocolError(f"a manifest of {len(fact.body)} bytes, at most {MANIFEST_BYTES_MAX}")
    publisher = signer.check(SERVICE_PURPOSE, fact)
    manifest: ServiceManifest = decode(fact.body, ServiceManifest, bytes_max=MANIFEST_BYTES_MAX)
    return Service(blake3(fact.body).digest(), publisher, manifest, fact)


def read_record(signer: Signer, value: bytes) -> Service | None:
    """Return the service in a DHT record; None if the record is malformed or its member has left."""
    try:
        fact: Fact = decode(value, Fact, bytes_max=REQUEST_BYTES_MAX)
        return check_service(signer, fact)
    except RemoteProtocolError:
        return None


def make_stop(signer: Signer, service: bytes) -> Fact:
    """Sign a statement that this peer's service is over."""
    return signer.sign(STOP_SERVICE_PURPOSE, encode(StopServiceBody(service)))


def check_stop(signer: Signer, fact: Fact) -> tuple[bytes, PeerId]:
    """Return which service is over, and which peer signed that. Raises RemoteProtocolError."""
    author = signer.check(STOP_SERVICE_PURPOSE, fact)
    body: StopServiceBody = decode(fact.body, StopServiceBody, bytes_max=REQUEST_BYTES_MAX)
    return body.service, author
