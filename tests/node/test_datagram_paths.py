"""Peers that no datagram reaches are reached by streams, and datagrams are tried again later."""

from math import inf

from crypto.identity import PeerId
from node.transport.datagram_paths import (
    ANSWER_SECONDS,
    DOUBT_SECONDS,
    KNOCK_SECONDS,
    PEERS_MAX,
    DatagramPaths,
)

PEER = PeerId(bytes(32))


def test_for_a_while_answers_use_the_channel_of_the_question() -> None:
    paths = DatagramPaths()
    paths.asked(PEER, 10.0, 9.0)
    assert not paths.is_by_stream(PEER, 10.0), "a stream was chosen although a datagram came a second ago"
    assert paths.has_asked(PEER)
    paths.asked(PEER, 10.0, -inf)
    assert paths.is_by_stream(PEER, 10.0 + ANSWER_SECONDS)
    assert not paths.is_by_stream(PEER, 10.1 + ANSWER_SECONDS)
    assert paths.blocked == ()


def test_a_peer_without_datagrams_is_tried_by_datagram_each_minute() -> None:
    paths = DatagramPaths()
    paths.unanswered(PEER, 0.0)
    assert paths.is_by_stream(PEER, 1e6)
    assert list(paths.blocked) == [], "a peer was listed although no message has used a stream yet"
    paths.streamed(PEER)
    assert list(paths.blocked) == [PEER]
    knocks = [now for now in range(1, 200) if paths.knocks(PEER, now)]
    assert knocks == [KNOCK_SECONDS, 2 * KNOCK_SECONDS, 3 * KNOCK_SECONDS]
    paths.heard(PEER)
    assert not paths.is_by_stream(PEER, 200.0)
    assert len(paths) == 0


def test_a_peer_that_streams_cannot_reach_keeps_datagrams() -> None:
    paths = DatagramPaths()
    paths.unanswered(PEER, 0.0)
    paths.streamed(PEER)
    paths.failed(PEER, 5.0)
    paths.unanswered(PEER, 6.0)
    assert not paths.is_by_stream(PEER, 6.0)
    assert paths.blocked == ()
    paths.unanswered(PEER, 5.0 + DOUBT_SECONDS)
    assert paths.is_by_stream(PEER, 5.0 + DOUBT_SECONDS)


def test_memory_for_the_paths_of_peers_is_bounded() -> None:
    paths = DatagramPaths()
    for number in range(PEERS_MAX + 10):
        paths.asked(PeerId(number.to_bytes(32, "big")), 0.0, -inf)
    assert len(paths) == PEERS_MAX
