"""The route that a door takes is the fastest according to its measurements."""

from itertools import pairwise, product
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from crypto.identity import Identity, PeerId
from partition.serve.routes import LOAD_SECONDS, StagePace, StageReplica, price_route

PEERS = [Identity(bytes([1 + number]) * 32).peer for number in range(9)]
A, B = PEERS[:2]
seconds = st.sampled_from([0.001, 0.01, 0.02, 0.1])


def best_route(*given: Any, **more: Any) -> tuple[PeerId, ...]:
    way = price_route(*given, **more)
    return () if way is None else way[2]


def price(route: tuple[StageReplica, ...], read: int, decode: int) -> float:
    """Return the time of an answer over a route, computed term by term."""
    tokens = (route[0].seconds + route[-1].seconds) / 2
    tokens += sum(each.decode_seconds + LOAD_SECONDS * each.sessions for each in route)
    tokens += sum(one.links.get(other.peer, 0.0) for one, other in pairwise(route))
    return decode * tokens + read * sum(each.read_seconds for each in route)


@given(st.data(), st.integers(1, 3), st.integers(1, 500), st.integers(1, 500))
def test_no_other_route_is_faster_than_the_chosen_one(
    data: st.DataObject, count: int, read: int, decode: int
) -> None:
    stages = [
        [
            StageReplica(
                PEERS[3 * stage + number],
                data.draw(st.integers(0, 3)),
                data.draw(seconds),
                data.draw(seconds),
                data.draw(seconds),
                {peer: data.draw(seconds) for peer in PEERS[3 * stage + 3 : 3 * stage + 6]},
            )
            for number in range(data.draw(st.integers(1, 3)))
        ]
        for stage in range(count)
    ]
    rows = {each.peer: each for stage in stages for each in stage}
    found = tuple(rows[peer] for peer in best_route(stages, read, decode))
    least = min(price(route, read, decode) for route in product(*stages))
    assert abs(price(found, read, decode) - least) <= 1e-9 * max(1.0, least)


def test_a_long_prompt_and_a_long_answer_go_to_different_replicas() -> None:
    reader = StageReplica(A, decode_seconds=0.05, read_seconds=0.0001)
    talker = StageReplica(B, decode_seconds=0.01, read_seconds=0.01)
    assert best_route([[reader, talker]], 1_000, 20) == (A,)
    assert best_route([[reader, talker]], 10, 200) == (B,)


def test_unmeasured_replicas_are_tried_but_not_overloaded() -> None:
    known, new = StageReplica(A, 1, decode_seconds=0.05), StageReplica(B)
    assert best_route([[known, new]], 1, 1) == (B,)
    assert best_route([[known, new]], 1, 1, sessions=lambda peer: 2 if peer == B else 0) == (A,)


def test_doubted_peers_come_last_however_fast_they_are() -> None:
    stages = [[StageReplica(A), StageReplica(B, seconds=0.5)]]
    assert best_route(stages, 1, 1, doubts={A: 1}) == (B,)
    assert best_route([stages[0][:1]], 1, 1, doubts={A: 1}) == (A,)


def test_a_peer_with_two_stages_uses_no_link_between_them() -> None:
    assert best_route([[StageReplica(A)], [StageReplica(A)]], 1, 1) == (A, A)
    near, far = {B: 0.001}, {B: 0.1}
    slow = StageReplica(A, decode_seconds=0.05)
    others = StageReplica(B, decode_seconds=0.01)
    assert best_route([[StageReplica(A, links=near)], [slow, others]], 1, 10) == (A, B)
    assert best_route([[StageReplica(A, links=far)], [slow, others]], 1, 10) == (A, A)


def test_prefill_and_decoding_speeds_are_measured_separately() -> None:
    pace = StagePace()
    pace.note([128, 128], 0.256)
    pace.note([1] * 8, 0.02)
    pace.note([1, 128], 9.0)
    assert (pace.decode_seconds, pace.read_seconds) == (0.02, 0.001)
    pace.note([1], 0.03)
    assert 0.02 < pace.decode_seconds < 0.03
    pace.note([1], -1.0)
    assert pace.decode_seconds < 0.03
