"""Every decoder of bytes from the wire, in one table: random bytes must end in RemoteProtocolError and a
counter.

The packages test their own decoders more closely. A new decoder must be entered in this table.
"""

from collections.abc import Callable
from typing import Any

import pytest
import trio
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

import dht.messages
import dht.records
import gossip.messages
from crypto.encoding import decode, encode
from crypto.errors import RemoteProtocolError
from crypto.facts import Fact, IdentitySigner
from crypto.identity import Identity
from crypto.noise import SUITES, PeerHandshake, ReplayCache, identity_payload
from crypto.sessions import packets
from crypto.sessions.core import Sessions
from crypto.swarm import Swarm
from gossip import matchmaking, matchmaking_messages, roster
from gossip.averaging import messages as averaging
from gossip.swim import PROTOCOL
from node.averaging import transfer
from node.averaging.runner import read_message
from node.protocols import calls
from node.protocols import runs as wire
from node.protocols.manifest import check_run
from node.services.metadata import read_metadata
from partition import stage as api
from partition.codecs import codec
from partition.model.graph import decode_graph
from partition.plan.plan import decode_plan
from partition.steps.frames import Frame, open_frame
from tests.stack import simulate, swarm

IDENTITY = Identity(bytes(range(32)))
SIGNER = IdentitySigner(IDENTITY, "home")


def fact(body: bytes) -> Fact:
    """Return a validly signed fact, so that only its body can be refused."""
    return SIGNER.sign("any", body)


def handshake(data: bytes) -> None:
    # The responder of a handshake, which any peer may send first bytes to.
    responder = PeerHandshake(
        initiator=False,
        proof=identity_payload(IDENTITY, bytes(32)),
        static=bytes(32),
        swarm=Swarm("home"),
        suites=SUITES,
        entropy=bytes,
        knocks=ReplayCache(),
    )
    responder.start()
    while len(data) >= responder.wanted:
        taken, data = data[: responder.wanted], data[responder.wanted :]
        responder.receive(taken)
    raise RemoteProtocolError("it ended too early")


def datagram(data: bytes) -> None:
    sessions = Sessions(IDENTITY, Swarm("home"), bytes, now=0.0, wall_milliseconds=0)
    sessions.receive(0.0, data, ("192.0.2.1", 1))


def payload(data: bytes) -> None:
    header = codec.TensorHeader("float32", (3, 5))
    packed = codec.Payload((3,), (header,), "zstd", blake3(data).digest(), memoryview(data))
    codec.unpack(packed, bytes_max=60)


DECODERS: dict[str, Callable[[bytes], Any]] = {
    "swim": lambda data: decode(data, gossip.messages.Message, bytes_max=1 << 20),
    "averaging": lambda data: decode(data, averaging.Message, bytes_max=averaging.MESSAGE_BYTES_MAX),
    "dht": lambda data: decode(data, dht.messages.Message, bytes_max=8_192),
    "dht record": lambda data: dht.records.check_record(SIGNER, fact(data)),
    "datagram": datagram,
    "initiation": lambda data: packets.read_offer(data + b"\1"),
    "session message": lambda data: packets.read_message(b"\0" + data),
    "session control": lambda data: packets.read_control(b"\0\3" + data),
    "handshake": handshake,
    "request": lambda data: decode(data, wire.Request, bytes_max=wire.REQUEST_BYTES_MAX),
    "reply": calls.read_reply,
    "roster": lambda data: decode(data, roster.Message, bytes_max=roster.MESSAGE_BYTES_MAX),
    "matchmaking": lambda data: decode(
        data, matchmaking_messages.Message, bytes_max=matchmaking.MESSAGE_BYTES_MAX
    ),
    "averaging stream": lambda data: read_message(data, memoryview(b"")),
    "catch-up question": lambda data: decode(data, transfer.Question, bytes_max=1_024),
    "catch-up answer": lambda data: decode(data, transfer.Answer, bytes_max=transfer.TABLE_BYTES_MAX),
    "pipeline": lambda data: decode(data, wire.PipelineMessage, bytes_max=wire.PIPELINE_BYTES_MAX),
    "lease": lambda data: decode(data, wire.LeaseBody, bytes_max=512),
    "manifest": lambda data: check_run(SIGNER, fact(data)),
    "plan": decode_plan,
    "frame": lambda data: open_frame(IDENTITY.peer, Frame(fact(data)), memoryview(data)),
    "payload": payload,
    "graph": decode_graph,
    "stage request": lambda data: decode(data, api.Request, bytes_max=1 << 20),
    "stage specification": lambda data: decode(data, api.StageSpecification, bytes_max=8_192),
}


@pytest.mark.parametrize("name", sorted(DECODERS))
@given(data=st.binary(max_size=400))
def test_random_bytes_end_in_a_remote_protocol_error(name: str, data: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        DECODERS[name](data)


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.binary(max_size=64)
    | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=20,
)


@pytest.mark.parametrize("name", sorted(DECODERS))
@given(value=VALUES)
def test_well_formed_messagepack_with_the_wrong_shape_is_refused(name: str, value: object) -> None:
    with pytest.raises(RemoteProtocolError):
        DECODERS[name](encode(value))


@given(data=st.binary(max_size=300))
def test_metadata_of_a_different_version_are_ignored(data: bytes) -> None:
    assert read_metadata(data) is None


def test_a_node_counts_garbage_on_every_protocol_and_keeps_running() -> None:
    async def scenario() -> None:
        async with swarm("ab") as group:
            node = group.nodes["a"]
            evil = group.medium.attach(Identity(b"evil" * 8).peer)
            evil.learn(node.peer, node.network.addresses)
            for protocol in (PROTOCOL, dht.messages.PROTOCOL):
                before = node.counters.get("protocol_errors", 0)
                evil.send(node.peer, protocol, b"\xc1 garbage")
                await settle()
                assert node.counters.get("protocol_errors", 0) > before, protocol
            for protocol in (wire.RUNS_PROTOCOL, wire.PIPELINE_PROTOCOL):
                before = node.counters.get("protocol_errors", 0)
                stream = await evil.open(node.peer, protocol)
                await stream.send(b"\xc1 garbage")
                await settle()
                assert node.counters.get("protocol_errors", 0) > before, protocol
            assert group.nodes["b"].peer in node.membership.live

    simulate(scenario)


async def settle() -> None:
    """Let enough virtual time pass for a message to arrive."""
    await trio.sleep(1)
