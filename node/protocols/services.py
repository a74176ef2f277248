"""Services and `/peerloom/services/1`: finding services, and asking peers to hold their stages.

A service's manifest is signed by its publisher and names the model by the hash of its graph, which has a
digest of each parameter's values: it thereby names the weights too. All members hold the manifest and pass it
on, so a service outlives its publisher's node. Its id is the manifest's hash.
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
"""Purposes of members' DHT records: under a service's name, and of all services under one key. The value is
the manifest's fact."""
MANIFEST_BYTES_MAX = 640
"""With its signature it fits a DHT record of 900 bytes."""
REQUEST_BYTES_MAX = 8_192
REPLY_BYTES_MAX = 16_384
REPLICAS_MAX = 16
SERVICES_MAX = 8
"""Listings in one answer, one per stage."""
VOCABULARY_MAX = 1 << 24
VECTOR_MAX = 1 << 16
"""Numbers in the vector of a text: the largest encoders have some thousand."""
SESSIONS_SHOWN_MAX = 1 << 20
PACE_MAX = 1 << 36
"""A minute in nanoseconds: no useful stage takes longer for one token."""
ENDED_MAX = 256
"""Stopped services that a node remembers, so that no late message restarts them."""

HOLDERS_MAX = 12
"""Peers that a service may be restricted to: the manifest has to fit a record."""
HOLDER_BYTES = 16
"""The part of the hash of a peer's id: long enough that nobody finds another id with the same part."""
Holder = Annotated[bytes, msgspec.Meta(min_length=HOLDER_BYTES, max_length=HOLDER_BYTES)]

TokensShown = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]

Name = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,79}\Z")]


class ServiceManifest(msgspec.Struct, frozen=True, array_like=True):
    """A service as its publisher defines it.

    `cuts` are the layers at which stages begin, without the first. `threads` must be equal for stages to
    agree to the bit. `text` is the way to tokenize: "bytes", or a tokenizer whose files have the list of
    chunks `tokenizer` (`node.content.text_files`); "" if the service takes only tokens. `run` and `step` are
    the run and the checkpoint of the weights, if they come from one. With `holders` only these peers may hold
    a stage: the first bytes of the hashes of their ids. With `vector` the model answers a text by this many
    numbers and no tokens, which is the form of version 2: a node that knows only version 1 takes no stage of
    it.
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
            raise ValueError("cuts that are not in their order")
        if (self.text == "tokenizer") != (len(self.tokenizer) == 32):
            raise ValueError("a tokenizer without its hash, or a hash without one")
        if self.text == "bytes" and (self.vocabulary != 256 or self.vector):
            raise ValueError("a model of bytes with another vocabulary")
        if (self.version == 2) != bool(self.vector):
            raise ValueError("a version of another form")
        if self.vector and self.context > UNIT_TOKENS_MAX:
            raise ValueError("texts that do not come as one unit")
        if len(self.run) not in (0, 32) or (self.step and not self.run):
            raise ValueError("a step without its run")

    def may_hold(self, peer: PeerId) -> bool:
        """Return whether a peer may hold a stage."""
        return not self.holders or holder_name(peer) in self.holders

    @property
    def stages(self) -> int:
        return len(self.cuts) + 1

    def ranges(self, layers: int) -> list[tuple[int, int]]:
        """Return the layers of each stage. Raises RemoteProtocolError: the model has a different number of
        layers."""
        ends = (0, *self.cuts, layers)
        if any(first >= last for first, last in pairwise(ends)):
            raise RemoteProtocolError(f"a service that cuts a model of {layers} layers elsewhere")
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
        """Return the id as people see it: the first 16 hexadecimal digits."""
        return service_text(self.id)

    @property
    def requester(self) -> PeerId:
        """Return the publisher, under the name that owners' rules use."""
        return self.publisher


class StopServiceBody(msgspec.Struct, frozen=True, array_like=True):
    """The publisher has ended this service."""

    service: Hash


class Host(msgspec.Struct, frozen=True, tag="host"):
    """Hold this stage of a service; `rows` are its members. Answered by Done once the stage is loading, or
    Declined."""

    manifest: Fact
    stage: StageNumber
    rows: Annotated[tuple[ServiceRow, ...], msgspec.Meta(max_length=ROLL_ROWS_MAX)] = ()


class Find(msgspec.Struct, frozen=True, tag="find"):
    """List the services of which you are a member: this one (an id), or all (empty). Answered by
    ServicesFound."""

    service: Annotated[bytes, msgspec.Meta(max_length=32)] = b""


class StopService(msgspec.Struct, frozen=True, tag="stop"):
    """Release your stage: the publisher ended the service, by a signed StopServiceBody. Answered by Done."""

    stop: Fact


Request = Host | Find | StopService


class Listing(msgspec.Struct, frozen=True, array_like=True):
    """A service of which the asked node is a member; `sessions` are open at that node itself, with `tokens`
    of the `tokens_max` whose keys and values it has room for. `bits` is the claimed bit class of its stage:
    empty if it has none, or it is not loaded. Its stage takes `decode_microseconds` for one more token of a
    session, and `read_nanoseconds` for a token of a prompt; 0: not measured."""

    manifest: Fact
    rows: Annotated[tuple[ServiceRow, ...], msgspec.Meta(max_length=ROLL_ROWS_MAX)]
    sessions: Annotated[int, msgspec.Meta(ge=0, le=SESSIONS_SHOWN_MAX)]
    tokens: TokensShown = 0
    tokens_max: TokensShown = 0
    bits: Annotated[bytes, msgspec.Meta(max_length=BITS_BYTES)] = b""
    decode_microseconds: Annotated[int, msgspec.Meta(ge=0, le=PACE_MAX)] = 0
    read_nanoseconds: Annotated[int, msgspec.Meta(ge=0, le=PACE_MAX)] = 0


class ServicesFound(msgspec.Struct, frozen=True, tag="found"):
    """The listings; empty if the node is a member of no such service. Of one service's listings only the
    first has rows beside the node's own, and no more than fit."""

    listings: Annotated[tuple[Listing, ...], msgspec.Meta(max_length=SERVICES_MAX)] = ()


Reply = Done | Declined | ServicesFound


def make_found(listings: Iterable[Listing]) -> ServicesFound:
    """Return the answer of a node with these stages: all of its services come before a second stage of one,
    and if it would be too long, the longest lists of members are cut."""
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
    """Return the service in a DHT record; None if it is malformed, or its member has left."""
    try:
        fact: Fact = decode(value, Fact, bytes_max=REQUEST_BYTES_MAX)
        return check_service(signer, fact)
    except RemoteProtocolError:
        return None


def make_stop(signer: Signer, service: bytes) -> Fact:
    """Return this peer's signed statement that its service is over."""
    return signer.sign(STOP_SERVICE_PURPOSE, encode(StopServiceBody(service)))


def check_stop(signer: Signer, fact: Fact) -> tuple[bytes, PeerId]:
    """Return which service is over, and who signed it. Raises RemoteProtocolError."""
    author = signer.check(STOP_SERVICE_PURPOSE, fact)
    body: StopServiceBody = decode(fact.body, StopServiceBody, bytes_max=REQUEST_BYTES_MAX)
    return body.service, author
