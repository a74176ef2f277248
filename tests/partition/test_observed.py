"""Peers' measurements of each other, the planner's trust in them, and the schedule of link probes."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crypto.encoding import encode
from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId
from partition.plan.link_probes import (
    AGAIN_SECONDS,
    BUSY_SECONDS,
    PARTNERS_MAX,
    PEER_PROBES_MAX,
    PROBES_MAX,
    SAMPLES_MAX,
    LinkProbes,
    ProbeLimits,
)
from partition.plan.observed import (
    LINKS_MAX,
    OBSERVED_BYTES_MAX,
    RELAYED_BYTES_PER_SECOND,
    RELAYED_NANOSECONDS,
    STAGES_MAX,
    Knowledge,
    LinkRow,
    Observed,
    StageRow,
    decode_observed,
    encode_observed,
)
from partition.plan.problem import Link

A, B, C, D = (PeerId(bytes([number]) * 32) for number in range(1, 5))
PEERS = [PeerId(bytes([number]) * 32) for number in range(1, 60)]


def saw(*links: tuple[PeerId, int, int], stages: tuple[tuple[PeerId, int], ...] = ()) -> Observed:
    return Observed(
        tuple(LinkRow(peer, sent, taken, 1_000) for peer, sent, taken in links),
        tuple(StageRow(peer, rate) for peer, rate in stages),
    )


# --- trust in measurements ---------------------------------------------------------------------------


def test_the_lower_of_the_measurements_at_both_ends_is_used() -> None:
    known = Knowledge(C, {}, {A: saw((B, 10**9, 10**9)), B: saw((A, 5 * 10**6, 10**6))})
    found = known.links([A, B])
    assert found[A, B] == Link(10**6, 1_000)
    assert found[B, A] == Link(5 * 10**6, 1_000)


def test_the_planners_own_measurements_take_precedence() -> None:
    known = Knowledge(A, {}, {A: saw((B, 10**7, 10**7)), B: saw((A, 1, 1))})
    assert known.links([A, B]) == {(A, B): Link(10**7, 1_000), (B, A): Link(10**7, 1_000)}


def test_an_unmeasured_link_is_as_fast_as_its_slower_end() -> None:
    known = Knowledge(None, {}, {C: saw((A, 10**6, 2 * 10**6), (B, 10**8, 10**8))})
    assert known.links([A, B])[A, B] == Link(2 * 10**6, 1_000)
    assert known.links([A, D]) == {}


def test_a_peer_that_understates_its_links_harms_no_others() -> None:
    honest = {A: saw((B, 10**8, 10**8), (D, 10**8, 10**8)), B: saw((A, 10**8, 10**8))}
    lying = honest | {D: saw((A, 1, 1), (B, 1, 1))}
    pairs = (A, B), (B, A)
    for pair in pairs:
        assert Knowledge(C, {}, lying).links([A, B, D])[pair] == Knowledge(C, {}, honest).links([A, B])[pair]


def test_a_rate_measured_by_others_is_limited_by_the_peers_claim() -> None:
    observed = {A: saw(stages=((D, 10**9),)), B: saw(stages=((D, 3 * 10**9),)), D: saw(stages=((A, 5),))}
    assert Knowledge(None, {}, observed).flops_per_second(D, 10**10) == 10**9
    assert Knowledge(B, {}, observed).flops_per_second(D, 10**10) == 3 * 10**9
    assert Knowledge(B, {}, observed).flops_per_second(D, 10**8) == 10**8
    assert Knowledge(B, {}, observed).flops_per_second(C, 7) == 7


def test_a_record_about_oneself_or_with_a_duplicate_peer_is_refused() -> None:
    for record in (
        saw((A, 1, 1)),
        saw(stages=((A, 1),)),
        saw((B, 1, 1), (B, 2, 2)),
        saw(stages=((B, 1), (B, 1))),
    ):
        with pytest.raises(RemoteProtocolError):
            decode_observed(encode(record), A)
    with pytest.raises(RemoteProtocolError):
        decode_observed(encode(((b"short", 1, 1, 1), ())), A)


def test_a_full_record_fits_the_table_of_records() -> None:
    links = tuple(LinkRow(peer, 10**12, 10**12, 10**10) for peer in PEERS[:LINKS_MAX])
    stages = tuple(StageRow(peer, 10**18) for peer in PEERS[:STAGES_MAX])
    data = encode_observed(Observed(links, stages))
    assert len(data) <= OBSERVED_BYTES_MAX
    assert decode_observed(data, PEERS[-1]) == Observed(links, stages)


# --- schedule of measurements -----------------------------------------------------------------------


def measured(core: LinkProbes, candidates: list[PeerId], seconds: float, rate: float = 1e8) -> list[PeerId]:
    """Let this much time pass. Return the peers that were probed, each with its success."""
    now, asked = 0.0, []
    while core.deadline < seconds:
        now = core.deadline
        peer = core.next(now, candidates)
        if peer is not None:
            asked.append(peer)
            core.probed(now, peer, rate, rate / 2, 0.002)
    return asked


def test_every_neighbour_is_measured_soon_and_seldom_again() -> None:
    core = LinkProbes(Random(1), 0.0)
    asked = measured(core, PEERS[:5], 120)
    assert set(asked[:5]) == set(PEERS[:5])
    assert len(asked) == 15  # until each has three samples
    rows = core.rows(120.0)
    assert [(row.sent, row.taken, row.nanoseconds) for row in rows] == [(10**8, 5 * 10**7, 10**6)] * 5
    later = measured(core, PEERS[:5], 120 + 2.1 * AGAIN_SECONDS)
    assert 5 <= len(later) <= 15


def test_among_many_peers_the_nearest_and_a_few_far_ones_are_measured() -> None:
    core = LinkProbes(Random(1), 0.0)
    asked = set(measured(core, PEERS, 300))
    assert len(asked) == PARTNERS_MAX
    assert set(PEERS[:6]) <= asked
    assert PEERS[-1] in asked


def test_one_disturbed_probe_changes_nothing() -> None:
    core = LinkProbes(Random(1), 0.0)
    core.next(5.0, [A])
    for rate in (10**7, 10**5, 1.1e7):
        core.probed(5.0, A, rate, rate, None)
    (row,) = core.rows(5.0)
    assert (row.sent, row.taken) == (10**7, 10**7)


def test_frames_raise_an_estimate_only_on_a_saturated_link() -> None:
    core = LinkProbes(Random(1), 0.0)
    core.next(5.0, [A])
    core.probed(5.0, A, 1e7, 1e7, None)
    core.framed(6.0, A, 1e9, is_saturated=False)
    assert core.rows(6.0)[0].sent == 10**7
    core.framed(6.0, A, 2e6, is_saturated=False)
    assert core.rows(6.0)[0].sent == 2 * 10**6
    core.framed(6.0, A, 5e7, is_saturated=True)
    assert core.rows(6.0)[0].sent == 5 * 10**7
    assert core.rows(1e5)[0].sent == 10**7


def test_a_refusing_peer_is_asked_again_after_growing_pauses() -> None:
    core = LinkProbes(Random(1), 0.0)
    asked, now = [], 0.0
    while now < 3_600:
        now = core.deadline
        if (peer := core.next(now, [A])) is not None:
            asked.append(now)
            core.failed(now, peer, 30.0)
    assert asked[1] - asked[0] >= 30
    assert len(asked) < 20


def test_probes_are_limited_for_each_peer_and_for_all() -> None:
    limits = ProbeLimits(0.0)
    assert limits.refusal_seconds(0.0, A, is_busy=True) == BUSY_SECONDS
    served = [limits.refusal_seconds(0.0, A, is_busy=False) == 0 for _ in range(20)]
    assert served.count(True) == PEER_PROBES_MAX
    others = [limits.refusal_seconds(0.0, peer, is_busy=False) == 0 for peer in PEERS[1:]]
    assert others.count(True) == PROBES_MAX - PEER_PROBES_MAX
    limits = ProbeLimits(0.0)
    limits.is_serving = True
    assert limits.refusal_seconds(0.0, A, is_busy=False) > 0


@given(st.floats(allow_nan=False), st.floats(allow_nan=False))
def test_any_measurements_make_a_valid_record(sent: float, taken: float) -> None:
    core = LinkProbes(Random(1), 0.0)
    core.next(5.0, [A])
    core.probed(5.0, A, sent, taken, 1e9)
    core.framed(5.0, A, sent, is_saturated=True)
    observed = Observed(core.rows(5.0))
    assert decode_observed(encode_observed(observed), B) == observed


# --- paths -------------------------------------------------------------------------------------------


def test_an_unmeasured_link_between_hidden_peers_counts_as_relayed() -> None:
    rows = {C: saw((A, 10**8, 10**8), (B, 10**8, 10**8))}
    hidden = frozenset((A, B, D))
    assert Knowledge(None, {}, rows).links([A, B])[A, B].bytes_per_second == 10**8
    found = Knowledge(None, {}, rows, hidden).links([A, B, C, D])
    assert found[A, B].bytes_per_second == RELAYED_BYTES_PER_SECOND
    assert found[A, C].bytes_per_second == 10**8
    assert found[A, D] == Link(RELAYED_BYTES_PER_SECOND, RELAYED_NANOSECONDS)
    measured = rows | {A: saw((B, 5 * 10**7, 5 * 10**7))}
    assert Knowledge(None, {}, measured, hidden).links([A, B])[A, B].bytes_per_second == 5 * 10**7


def test_a_link_whose_path_changes_is_measured_again() -> None:
    probes = LinkProbes(Random(1), 0.0)
    assert probes.next(probes.deadline, [A]) == A
    for number in range(SAMPLES_MAX):
        probes.probed(10.0 + number, A, 10**5, 10**5, 0.1)
    assert probes.next(20.0, [A]) is None
    probes.rerouted(20.0, A)
    assert probes.rows(20.0) == ()
    assert probes.next(20.0, [A]) == A
    probes.probed(21.0, A, 10**8, 10**8, 0.01)
    assert probes.sent_rate(A) == 10**8
