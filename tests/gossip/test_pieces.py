"""The exchange of a data set: the core alone, in virtual time, over the simulator's network."""

from collections.abc import Callable
from random import Random

import numpy as np
import pytest

from crypto.errors import RemoteProtocolError
from crypto.identity import PEER_ID_BYTES, PeerId
from crypto.registers import STRANGER_PATIENCE_SECONDS
from gossip.pieces.choice import Choice
from gossip.pieces.messages import Cancel, Got, Piece, PieceRefused, PieceRequest, PiecesHeld, Unknown
from gossip.pieces.swarm import (
    MISSES_MAX,
    PEERS_MAX,
    STALL_SECONDS,
    PeerDropped,
    PieceArrived,
    PieceSwarm,
)
from gossip.pieces.uploads import UploadDue
from tests.gossip.trading import trade

A, B, C, ME = (PeerId(bytes([number]) * 38) for number in range(1, 5))
DATA = bytes(32)


def bits(count: int, *numbers: int) -> bytes:
    found = np.zeros(count, np.bool_)
    found[list(numbers)] = True
    return np.packbits(found, bitorder="little").tobytes()


def fetching(count: int = 20, *sources: PeerId, has: Callable[[int], range] = range) -> PieceSwarm:
    core = PieceSwarm(ME, DATA, count, [], Random(1))
    core.want(0.0, range(count))
    core.meet(0.0, sources)
    for source in sources:
        core.receive(
            0.0, source, PiecesHeld(DATA, bits(count, *has(count)), is_question=False, is_complete=True)
        )
    return core


def asked_of(core: PieceSwarm, peer: PeerId) -> list[int]:
    return list(core.peers[peer].asked)


def test_the_rarest_piece_is_requested_first() -> None:
    core = PieceSwarm(ME, DATA, 20, [], Random(1))
    core.want(0.0, range(20))
    core.meet(0.0, [A, B, C])
    for peer, numbers in ((B, range(19)), (C, range(18))):
        core.receive(0.0, peer, PiecesHeld(DATA, bits(20, *numbers), is_question=False))
    sends = core.receive(0.0, A, PiecesHeld(DATA, bits(20, *range(20)), is_question=False))
    asked = [message.numbers for peer, message in sends if isinstance(message, PieceRequest) and peer == A]
    assert asked[0][0] == 19


def test_urgent_pieces_are_requested_before_rare_ones() -> None:
    possible, holders = np.ones(10, np.bool_), np.arange(10)
    urgency = np.ones(10, np.int64)
    urgency[7] = 0
    picked = Choice(10, Random(1)).pick(possible, urgency, holders, place=0, shares=1, limit=3)
    assert picked == [7, 0, 1]


def test_a_piece_is_requested_from_a_second_peer_only_when_late() -> None:
    core = fetching(3, A, B)
    assert not set(asked_of(core, A)) & set(asked_of(core, B))
    late = asked_of(core, A)[0]
    for number in asked_of(core, B):
        core.receive(1.0, B, Piece(DATA, number, b""))
        core.stored(1.0, B, number, is_right=True)
    core.wake(6.0)
    assert asked_of(core, B)[0] in asked_of(core, A)
    number = asked_of(core, B)[0]
    core.receive(7.0, B, Piece(DATA, number, b""))
    sends = core.stored(7.0, B, number, is_right=True)
    assert (A, Cancel(DATA, (number,))) in sends
    assert late in range(3)


def test_a_peer_that_sends_a_wrong_piece_is_dropped() -> None:
    core = fetching(4, A, B)
    number = asked_of(core, A)[0]
    core.receive(1.0, A, Piece(DATA, number, b"wrong"))
    core.stored(1.0, A, number, is_right=False)
    assert any(isinstance(event, PeerDropped) and event.peer == A for event in core.events)
    assert A not in core.peers
    for _ in range(4):
        for each in asked_of(core, B):
            core.receive(1.0, B, Piece(DATA, each, b""))
            core.stored(1.0, B, each, is_right=True)
    assert core.is_complete


def test_a_silent_peer_is_skipped() -> None:
    core = fetching(4, A)
    assert asked_of(core, A)
    core.wake(STALL_SECONDS + 1)
    assert not asked_of(core, A)
    core.receive(STALL_SECONDS + 1, B, PiecesHeld(DATA, bits(4, *range(4)), is_question=False))
    assert asked_of(core, B)


def test_a_peer_without_the_pieces_it_claims_is_dropped() -> None:
    core = fetching(MISSES_MAX + 8, A)
    for _ in range(MISSES_MAX):
        number = asked_of(core, A)[0]
        core.receive(1.0, A, PieceRefused(DATA, number, "absent"))
        if A not in core.peers:
            break
    assert A not in core.peers


def test_a_source_sends_each_piece_once_before_any_twice() -> None:
    core = PieceSwarm(ME, DATA, 3, range(3), Random(1))
    for peer in (A, B):
        core.receive(0.0, peer, PiecesHeld(DATA, bits(3), is_question=True))
    core.receive(0.0, A, PieceRequest(DATA, (0,)))
    assert (B, PieceRefused(DATA, 0, "elsewhere")) in core.receive(0.0, B, PieceRequest(DATA, (0,)))
    core.receive(0.0, A, PieceRequest(DATA, (1,)))
    core.receive(0.0, B, PieceRequest(DATA, (2,)))
    core.events.clear()
    for number in (0, 2):
        core.uploaded(0.5, A if number == 0 else B, number, was_sent=True)
    assert core.receive(1.0, B, PieceRequest(DATA, (0,))) == []  # all pieces have been sent once now
    assert UploadDue(B, 0) in core.events


def test_a_piece_requested_from_a_peer_that_dies_is_requested_elsewhere() -> None:
    core = PieceSwarm(ME, DATA, 3, range(3), Random(1))
    for peer in (A, B):
        core.receive(0.0, peer, PiecesHeld(DATA, bits(3), is_question=True))
    core.receive(0.0, A, PieceRequest(DATA, (0,)))
    core.lost(1.0, A)
    assert core.receive(1.0, B, PieceRequest(DATA, (0,))) == []


@pytest.mark.parametrize(
    "message",
    [
        PiecesHeld(DATA, b"", is_question=False),
        PiecesHeld(DATA, b"\xff\xff\xff", is_question=False),
        Got(DATA, (20,)),
        PieceRequest(DATA, (20,)),
        Cancel(DATA, (20,)),
        PieceRefused(DATA, 20, "busy"),
        Piece(DATA, 20, b""),
        Piece(DATA, 19, b"unasked"),
    ],
    ids=lambda message: f"{type(message).__name__}",
)
def test_invalid_messages_are_refused(message: object) -> None:
    core = fetching(20, A, has=lambda _: range(1))
    with pytest.raises(RemoteProtocolError):
        core.receive(1.0, A, message)  # type: ignore[arg-type]  # any message


def test_a_swarm_is_four_times_as_fast_as_its_source_alone() -> None:
    """There are 8 peers, 16 MB, and links with 20 Mbit/s in each direction. The source dies after it has sent
    1.1 copies, and all peers still get everything."""
    found = trade(peers=8, pieces=64, mbit_per_second=20, seed=3, kill_after_copies=1.1)
    assert found.finished == 8
    assert found.copies_of_source <= 1.2
    assert found.seconds <= 0.25 * found.seconds_of_source_alone


def test_a_liar_and_a_silent_peer_delay_nobody() -> None:
    found = trade(peers=6, pieces=48, mbit_per_second=20, seed=4, liars=1, mutes=1)
    assert found.finished == 4
    assert found.dropped_liars >= 4


def test_a_piece_counts_only_after_its_bytes_were_verified() -> None:
    core = fetching(2, A)
    number = asked_of(core, A)[0]
    core.receive(1.0, A, Piece(DATA, number, b"x"))
    assert PieceArrived(A, number, b"x") in core.events
    assert not core.have[number]


def test_silent_peers_are_evicted_from_a_full_exchange() -> None:
    core = PieceSwarm(ME, DATA, 4, range(4), Random(1))
    crowd = [PeerId(bytes([100 + number]) * PEER_ID_BYTES) for number in range(PEERS_MAX)]
    for peer in crowd:
        core.receive(0.0, peer, PiecesHeld(DATA, bits(4), True, False))
    late = PiecesHeld(DATA, bits(4), True, False)
    assert core.receive(0.1, A, late) == [(A, Unknown(DATA))]
    sends = core.receive(STRANGER_PATIENCE_SECONDS, A, late)
    assert (crowd[0], Unknown(DATA)) in sends
    assert A in core.peers
    assert len(core.peers) == PEERS_MAX
    assert any(to == A and isinstance(message, PiecesHeld) for to, message in sends)


def test_a_served_peer_stays_in_a_full_exchange() -> None:
    core = PieceSwarm(ME, DATA, 4, range(4), Random(1))
    core.receive(0.0, A, PiecesHeld(DATA, bits(4), True, False))
    core.receive(0.0, A, PieceRequest(DATA, (0,)))
    core.uploaded(0.0, A, 0, was_sent=True)
    for number in range(3 * PEERS_MAX):
        stranger = PeerId(bytes([100 + number]) * PEER_ID_BYTES)
        core.receive(2.0 * number, stranger, PiecesHeld(DATA, bits(4), True, False))
        assert A in core.peers, "a served peer was evicted before an unknown one"
