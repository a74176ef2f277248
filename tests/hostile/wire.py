"""All messages of peers above the transport, as data: protocols, messages, signed bodies.

A union of messages is listed by its name, so its new messages are covered automatically. A new protocol, or a
new decoded type, must be entered: `tests.test_hostile_wire` searches the program for both. Messages of
unknown peers below the transport, in handshakes, hellos and beacons, are in `packets`, `visitors` and
`guests`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, get_args

import msgspec

import dht.messages
import dht.records
import gossip.messages
import gossip.swim
from dht.capabilities import Advert
from gossip import matchmaking, matchmaking_messages, roster
from gossip.averaging import evidence
from gossip.averaging import messages as averaging
from gossip.pieces import messages as pieces
from node.averaging import proofs, transfer
from node.averaging import service as averaging_service
from node.checkpoints import replication
from node.checkpoints.weights import WEIGHTS_PURPOSE
from node.content import blobs, directory, exchange
from node.local.stage_server import STREAMS as COLUMN_STREAMS
from node.protocols import audits as shown
from node.protocols import checkpoint, followed, manifest, services
from node.protocols import receipts as given
from node.protocols import runs as runs
from node.protocols.revision import REVISION_PURPOSE, RevisionBody
from node.runs import audits, receipts, traces
from node.runs.stopping import STOP_PURPOSE, StopBody
from node.seams import USUAL_STREAMS, StreamLimits
from node.services import autonat, links, lives, metadata
from node.services.relays import server as relays
from node.services.relays.finding import RelayRecord
from node.serving import streams
from node.transport import punch_messages, relay_messages
from partition.plan.change import Change
from partition.plan.history import FIRST_PLAN_PURPOSE, SEGMENT_PURPOSE, Segment
from partition.plan.observed import Observed
from partition.plan.plan import Plan
from partition.plan.rates import Calibration
from partition.run import admission, conclusions
from partition.run.local import column_messages as column
from partition.run.receipts import MEASURED_PURPOSE, ReceiptBody
from partition.run.tickets import REVOCATION_PURPOSE, TICKET_PURPOSE, Revocation, Ticket
from partition.serve import messages as serve
from partition.steps.frames import FRAME_PURPOSE, FrameHeader

DATAGRAM_BYTES_MAX = 1_100
"""A length that certainly fits into one packet; a longer message goes over a stream of its own."""


@dataclass(frozen=True)
class Protocol:
    """One protocol. The opener of a stream sends `said`, and the other side sends `answered` on the same
    stream."""

    name: str
    said: Any
    answered: Any = None
    datagrams: Any = None
    payloads: bool = False
    limits: StreamLimits = USUAL_STREAMS
    former: str = ""
    """The name under which nodes of the previous version speak the protocol, if its version has been raised
    since."""

    @property
    def kinds(self) -> tuple[type, ...]:
        """Return the types of messages that the opener sends on a stream."""
        return structs(self.said)


PROTOCOLS = (
    Protocol(gossip.swim.PROTOCOL, None, datagrams=gossip.messages.Message),
    Protocol(dht.messages.PROTOCOL, None, datagrams=dht.messages.Message),
    Protocol(runs.RUNS_PROTOCOL, runs.Request, runs.Reply),
    Protocol(runs.PIPELINE_PROTOCOL, runs.PipelineMessage, payloads=True, limits=runs.PIPELINE_STREAMS),
    Protocol(blobs.BLOBS_PROTOCOL, blobs.Want, blobs.Reply),
    Protocol(pieces.DATA_PROTOCOL, pieces.Message, limits=exchange.STREAMS),
    Protocol(replication.COPIES_PROTOCOL, replication.Request, replication.Reply),
    Protocol(roster.PROTOCOL, None, datagrams=roster.Message),
    Protocol(matchmaking.PROTOCOL, None, datagrams=matchmaking_messages.Message),
    Protocol(admission.PROTOCOL, None, datagrams=admission.Message),
    Protocol(conclusions.PROTOCOL, None, datagrams=conclusions.Message),
    Protocol(averaging.PROTOCOL, averaging.Message, payloads=True, limits=averaging_service.STREAMS),
    Protocol(evidence.PROTOCOL, evidence.Evidence, limits=proofs.STREAMS),
    Protocol(column.PROTOCOL, column.Question, column.Answer, payloads=True, limits=COLUMN_STREAMS),
    Protocol(
        serve.SERVE_PROTOCOL,
        serve.Message,
        payloads=True,
        limits=streams.STREAMS,
        former=serve.SERVE_PROTOCOL_FORMER,
    ),
    Protocol(services.SERVICES_PROTOCOL, services.Request, services.Reply),
    Protocol(transfer.PROTOCOL, transfer.Question, transfer.Answer, limits=transfer.STREAMS),
    Protocol(traces.TRACES_PROTOCOL, traces.SpanRequest, traces.Told),
    Protocol(shown.FRAMES_PROTOCOL, shown.Question, shown.Answer, payloads=True, limits=audits.STREAMS),
    Protocol(given.RECEIPTS_PROTOCOL, given.Question, given.Answer, limits=receipts.STREAMS),
    Protocol(autonat.PROTOCOL, autonat.DialBack, autonat.Dialled, datagrams=autonat.Echo),
    Protocol(punch_messages.PROTOCOL, punch_messages.Message, datagrams=punch_messages.Introduced),
    Protocol(relay_messages.PROTOCOL, relay_messages.Request, relay_messages.Reply, limits=relays.STREAMS),
    Protocol(lives.PROTOCOL, lives.LifeName, lives.LifeName, limits=lives.STREAMS),
    Protocol(
        links.LINKS_PROTOCOL, links.ProbeQuestion, links.ProbeAnswer, payloads=True, limits=links.STREAMS
    ),
)

PURPOSES: Mapping[type, str] = {
    gossip.messages.AliveBody: "swim-alive",
    gossip.messages.SuspectBody: "swim-suspect",
    gossip.messages.DeadBody: "swim-dead",
    gossip.messages.LeftBody: "swim-left",
    gossip.messages.BroadcastBody: "swim-broadcast",
    dht.records.RecordBody: dht.records.RECORD_PURPOSE,
    manifest.Manifest: manifest.MANIFEST_PURPOSE,
    runs.LeaseBody: runs.LEASE_PURPOSE,
    FrameHeader: FRAME_PURPOSE,
    averaging.CommitmentBody: averaging.COMMITMENT_PURPOSE,
    averaging.HaveBody: averaging.HAVE_PURPOSE,
    averaging.SealBody: averaging.SEAL_PURPOSE,
    checkpoint.Checkpoint: checkpoint.CHECKPOINT_PURPOSE,
    Plan: FIRST_PLAN_PURPOSE,
    Segment: SEGMENT_PURPOSE,
    StopBody: STOP_PURPOSE,
    Ticket: TICKET_PURPOSE,
    Revocation: REVOCATION_PURPOSE,
    RevisionBody: REVISION_PURPOSE,
    ReceiptBody: MEASURED_PURPOSE,
    services.ServiceManifest: services.SERVICE_PURPOSE,
    services.StopServiceBody: services.STOP_SERVICE_PURPOSE,
    followed.SettingsBody: followed.SETTINGS_PURPOSE,
}
"""The types inside a Fact, and their signing purposes."""

FACTS: Mapping[str, tuple[type, ...]] = {
    gossip.swim.PROTOCOL: get_args(gossip.messages.Body),
    dht.messages.PROTOCOL: (dht.records.RecordBody, followed.SettingsBody),
    runs.RUNS_PROTOCOL: (manifest.Manifest, runs.LeaseBody, Plan, Segment, StopBody, RevisionBody, Ticket),
    given.RECEIPTS_PROTOCOL: (ReceiptBody,),
    services.SERVICES_PROTOCOL: (services.ServiceManifest, services.StopServiceBody),
    conclusions.PROTOCOL: (Ticket, Revocation),
    admission.PROTOCOL: (Ticket, Revocation),
    column.PROTOCOL: (Ticket,),
    runs.PIPELINE_PROTOCOL: (FrameHeader, RevisionBody),
    shown.FRAMES_PROTOCOL: (FrameHeader,),
    averaging.PROTOCOL: (averaging.CommitmentBody, averaging.HaveBody, averaging.SealBody),
    evidence.PROTOCOL: (averaging.CommitmentBody, averaging.HaveBody, averaging.SealBody),
}
"""The facts that a protocol carries. Other facts are also tried, with a low probability."""

INSIDE: Mapping[str, tuple[type, ...]] = {
    "plan": (Plan,),
    "value": (
        Change,
        replication.CheckpointOffer,
        Calibration,
        Advert,
        Observed,
        directory.SubkeyRow,
        RelayRecord,
    ),
    "links": (Change,),
    "metadata": (metadata.Metadata,),
    "data": (checkpoint.StatePart,),
}
"""Fields of bytes that the receiver decodes again, and the types that they contain."""

WORDS = (
    WEIGHTS_PURPOSE,
    "digits",
    "127.0.0.1",
    "127.0.0.1:1",
    "/ip4/127.0.0.1/tcp/1",
    "/ip6/::1/udp/9",
    "-",
    "simple-cnn",
)
"""Texts for fields without a pattern that are meaningful in some field."""


@cache
def structs(kind: Any) -> tuple[type, ...]:
    """Return the structs of a union, of a union of unions, or of a single struct; none for None."""
    if kind is None:
        return ()
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return (kind,)
    return tuple(dict.fromkeys(each for part in get_args(kind) for each in structs(part)))


def everything() -> frozenset[type]:
    """Return every struct that is sent as a message, signed as a fact, or decoded inside another."""
    found: set[type] = set(PURPOSES)
    for protocol in PROTOCOLS:
        for kind in (protocol.said, protocol.answered, protocol.datagrams):
            found.update(structs(kind))
    for inside in INSIDE.values():
        found.update(inside)
    return frozenset(found)
