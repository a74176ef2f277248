"""Suspicion times, local health, settings, and the queue of facts."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crypto.facts import Fact
from gossip.dissemination import (
    ALL_CHANGES_MAX,
    CHANGE_INTERVALS,
    CHANGED_SENDS,
    SENDS_MAX,
    Changes,
    Dissemination,
)
from gossip.messages import FACTS_MAX, DeadBody, SuspectBody, fact_bytes, sign_body
from gossip.settings import PRESETS, SwimSettings
from gossip.suspicion import LocalHealth, Suspicion
from tests.gossip.swarm import HashSigner, peer_of


def test_only_independent_accusers_shorten_a_suspicion() -> None:
    suspicion = Suspicion(10.0, peer_of(1), 2.0, 12.0, wanted=3)
    deadlines = [suspicion.deadline]
    for accuser in (2, 3, 4):
        assert suspicion.wants(peer_of(accuser))
        suspicion.confirm(peer_of(accuser))
        assert not suspicion.wants(peer_of(accuser))
        deadlines.append(suspicion.deadline)
    # 12 - 10 * log(c + 1) / log(4), for c = 0..3
    assert deadlines == pytest.approx([22.0, 17.0, 22.0 - 7.9248, 12.0], abs=1e-4)
    assert not suspicion.wants(peer_of(5))


def test_an_unconfirmable_suspicion_lasts_the_shortest_time() -> None:
    suspicion = Suspicion(10.0, peer_of(1), 2.0, 12.0, wanted=0)
    assert suspicion.deadline == 12.0
    assert not suspicion.wants(peer_of(2))


def test_a_suspicions_deadline_is_extended_by_lost_time_up_to_a_limit() -> None:
    suspicion = Suspicion(10.0, peer_of(1), 2.0, 3.0, wanted=0)
    suspicion.excuse(0.5)
    assert suspicion.deadline == 12.5
    suspicion.excuse(100.0)
    assert suspicion.deadline == 15.0


def test_local_health_stays_between_one_and_eight() -> None:
    health = LocalHealth(7)
    health.better()
    assert health.multiplier == 1
    health.worsen(3)
    assert health.multiplier == 4
    health.worsen(30)
    assert health.multiplier == 8
    health.better()
    assert health.multiplier == 7


@pytest.mark.parametrize("name", ["local", "host", "lan", "wan"])
def test_presets_give_the_expected_bounds_and_intervals(name: str) -> None:
    settings = PRESETS[name]
    shortest, longest = settings.suspicion_bounds_seconds(5)
    assert 0 < shortest <= longest
    assert settings.retransmits(1) == 4
    assert settings.retransmits(600) == 12
    assert settings.sync_period_seconds(32) == settings.sync_interval_seconds
    assert settings.sync_period_seconds(128) == 3 * settings.sync_interval_seconds


@pytest.mark.parametrize(
    "wrong",
    [
        {"probe_timeout_seconds": 0.5},
        {"probe_interval_seconds": float("nan")},
        {"suspicion_multiplier": 1.0},
        {"gossip_interval_seconds": 2.0},
        {"gossip_fanout": 0},
        {"gossip_to_dead_seconds": 700.0},
        {"sync_interval_seconds": 0.1},
        {"stall_seconds": 1.0},
        {"facts_bytes_max": 700},
        {"members_max": 2_001},
    ],
)
def test_settings_that_contradict_each_other_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="SWIM settings"):
        SwimSettings(**wrong)


def suspect(subject: int, accuser: int) -> Fact:
    return sign_body(HashSigner(peer_of(accuser)), SuspectBody(peer_of(subject), 1, 0))


def test_a_fact_is_sent_a_bounded_number_of_times() -> None:
    queue = Dissemination()
    queue.put(peer_of(1), suspect(1, 2))
    assert [len(queue.take(3, 850)) for _ in range(5)] == [1, 1, 1, 0, 0]
    assert len(queue) == 0


def test_a_newer_fact_replaces_the_older_and_keeps_a_confirmation() -> None:
    queue = Dissemination()
    queue.put(peer_of(1), suspect(1, 2))
    queue.put(peer_of(1), suspect(1, 3), beside=True)
    queue.put(peer_of(1), suspect(1, 3), beside=True)
    assert set(queue.take(9, 850)) == {suspect(1, 2), suspect(1, 3)}
    dead = sign_body(HashSigner(peer_of(2)), DeadBody(peer_of(1), 1, 0))
    queue.put(peer_of(1), dead)
    assert queue.take(9, 850) == (dead,)
    queue.drop(peer_of(1))
    assert len(queue) == 0


def test_new_facts_precede_those_already_sent() -> None:
    queue = Dissemination()
    queue.put(peer_of(1), suspect(1, 9))
    queue.take(9, 850)
    queue.put(peer_of(2), suspect(2, 9))
    queue.put(peer_of(3), suspect(3, 9))
    assert queue.take(9, 850) == (suspect(3, 9), suspect(2, 9), suspect(1, 9))


def test_facts_that_must_be_sent_first_count_as_sent() -> None:
    queue = Dissemination()
    queue.put(peer_of(1), suspect(1, 9))
    queue.put(peer_of(2), suspect(2, 9))
    assert queue.take(1, 850, [suspect(1, 9), suspect(3, 9)]) == (
        suspect(1, 9),
        suspect(3, 9),
        suspect(2, 9),
    )
    assert len(queue) == 0


@given(st.lists(st.integers(0, 60)), st.integers(110, 10_000), st.integers(1, 5))
def test_a_message_keeps_its_size_limit_and_every_fact_is_sent(
    subjects: list[int], bytes_max: int, transmits_max: int
) -> None:
    queue = Dissemination()
    for subject in subjects:
        queue.put(peer_of(subject), suspect(subject, 99))
    room = max(bytes_max, fact_bytes(suspect(0, 99)))
    sent: dict[Fact, int] = {}
    while len(queue):
        facts = queue.take(transmits_max, room)
        assert 0 < len(facts) <= FACTS_MAX
        assert sum(fact_bytes(fact) for fact in facts) <= room
        for fact in facts:
            sent[fact] = sent.get(fact, 0) + 1
    assert sent == {suspect(subject, 99): transmits_max for subject in subjects}


def test_a_members_first_changes_are_all_sent_and_many_are_limited() -> None:
    changes = Changes(1.0, 100, 0.0)
    assert [changes.sends(peer_of(1), 0.0) for _ in range(3)] == [SENDS_MAX, CHANGED_SENDS, 0]
    crowd = [changes.sends(peer_of(number), 0.0) for number in range(10, 40) for _ in range(2)]
    assert crowd.count(SENDS_MAX) < ALL_CHANGES_MAX
    assert sum(min(sends, 12) for sends in crowd) < 5 * 30
    assert changes.sends(peer_of(1), 2 * CHANGE_INTERVALS) == SENDS_MAX
