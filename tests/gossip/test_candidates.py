"""Candidates are peers that other peers name. Tests of the cost of a long list of candidates, and of which
candidates become members."""

from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crypto.contact import Address
from crypto.errors import RemoteProtocolError
from crypto.facts import Fact
from crypto.identity import PeerId
from gossip.candidates import PROBED_AT_ONCE_MAX, PROBED_MAX, TRIES_MAX, Candidate, Candidates
from gossip.intake import CHECK_COST, JOBS_MAX, SLICE_COST_MAX
from gossip.member import CandidateFound, FactsRefused, MemberUp, Profile, Status
from gossip.messages import Ack, AliveBody, Gossip, LeftBody, Ping, Sync, announced, sign_body
from gossip.settings import SwimSettings
from gossip.swim import Sends, Swim
from tests.gossip.swarm import HashSigner, Swarm, peer_of, profile_of

ME, LIAR, HONEST, NEWCOMER = 0, 1, 2, 3
INVENTED = range(100, 2_000)
CHECKS_MAX = SLICE_COST_MAX // CHECK_COST


class CountingSigner(HashSigner):
    """A signer that counts the signatures that it checks."""

    checked = 0

    def check(self, purpose: str, fact: Fact) -> PeerId:
        self.checked += 1
        return super().check(purpose, fact)


def alive(number: int, incarnation: int = 1) -> Fact:
    addresses = (f"/ip4/10.{number // 250}.{number % 250}.1/tcp/9747",)
    return sign_body(HashSigner(peer_of(number)), AliveBody(incarnation, f"n{number}", addresses, b""))


class Peer:
    """A core that lists a liar and an honest member. `pinged` contains the candidates that the core pinged,
    in order. The candidates in `there` answer. `most` is the largest number of signatures checked in one call
    of the core.
    """

    def __init__(self, there: tuple[int, ...] = (LIAR, HONEST), settings: SwimSettings | None = None) -> None:
        self.signer = CountingSigner(peer_of(ME))
        self.core = Swim(self.signer, profile_of(ME), settings or SwimSettings(), Random(1), 1, 0.0)
        self.there = {peer_of(number) for number in there}
        self.pinged: list[PeerId] = []
        self.most = 0
        self.now = 0.0
        for number in (LIAR, HONEST):
            self.hear(number, Gossip((alive(number),)))
        self.core.events.clear()
        self.most = 0

    def hear(self, sender: int, message: Sync | Gossip | Ping) -> None:
        before = self.signer.checked
        sends = self.core.receive(self.now, peer_of(sender), message)
        self.most = max(self.most, self.signer.checked - before)
        self.answer(sends)

    def answer(self, sends: Sends) -> None:
        for receiver, sent in sends:
            if isinstance(sent, Ping):
                self.pinged.append(receiver)
                assert self.core._candidates.probed <= PROBED_MAX
                if receiver in self.there:
                    self.answer(self.core.receive(self.now, receiver, Ack(sent.number)))

    def run(self, seconds: float) -> None:
        until = self.now + seconds
        while self.core.deadline <= until:
            self.now = max(self.now, self.core.deadline)
            before = self.signer.checked
            sends = self.core.wake(self.now)
            self.most = max(self.most, self.signer.checked - before)
            assert len([sent for _, sent in sends if isinstance(sent, Ping)]) <= PROBED_AT_ONCE_MAX + 8
            self.answer(sends)
        self.now = until

    def status(self, number: int) -> Status | None:
        return self.core.status(peer_of(number))


def test_invented_members_are_verified_in_slices_and_never_listed() -> None:
    peer = Peer(settings=SwimSettings.local())
    peer.hear(LIAR, Sync(False, tuple(alive(number) for number in INVENTED)))
    peer.run(60.0)
    assert peer.signer.checked >= len(INVENTED)
    assert peer.most <= CHECKS_MAX + 1
    assert peer.core.live == 3
    # Each invented peer was pinged for a while, and is forgotten.
    asked = Counter(peer.pinged)
    assert max(asked[peer_of(number)] for number in INVENTED) == TRIES_MAX
    assert len(peer.core._candidates) == 0


def test_an_honest_newcomer_is_listed_while_a_liar_introduces_thousands() -> None:
    peer = Peer(there=(LIAR, HONEST, NEWCOMER))
    peer.hear(LIAR, Sync(False, tuple(alive(number) for number in INVENTED)))
    peer.run(0.5)
    peer.hear(HONEST, Gossip((alive(NEWCOMER),)))
    peer.run(1.0)
    assert peer.status(NEWCOMER) is Status.ALIVE
    assert len(peer.core._candidates) > len(INVENTED) // 2


def test_an_honest_list_of_hundreds_is_listed_within_seconds() -> None:
    known = range(10, 610)
    peer = Peer(there=(LIAR, HONEST, *known))
    peer.hear(HONEST, Sync(False, tuple(alive(number) for number in known)))
    peer.run(2.0)
    assert peer.core.live == 603
    assert peer.most <= CHECKS_MAX + 1


def test_a_peer_named_by_others_is_listed_only_once_it_answers() -> None:
    peer = Peer()
    peer.hear(HONEST, Gossip((alive(10), alive(11))))
    assert [peer.status(number) for number in (10, 11)] == [None, None]
    found = [event for event in peer.core.events if isinstance(event, CandidateFound)]
    assert [(event.peer, event.introducer) for event in found] == [
        (peer_of(number), peer_of(HONEST)) for number in (10, 11)
    ]
    peer.hear(10, Ping(7))
    peer.hear(12, Gossip((alive(12),)))
    assert [peer.status(number) for number in (10, 11, 12)] == [Status.ALIVE, None, Status.ALIVE]
    through = {event.peer: event.found_through for event in peer.core.events if isinstance(event, MemberUp)}
    assert through == {peer_of(10): peer_of(HONEST), peer_of(12): peer_of(12)}


def test_a_candidate_learns_the_facts_of_the_asking_peer() -> None:
    peer = Peer()
    [(_, ping)] = peer.core.receive(0.0, peer_of(HONEST), Gossip((alive(10),)))
    assert isinstance(ping, Ping)
    other = Swim(HashSigner(peer_of(10)), profile_of(10), SwimSettings(), Random(2), 1, 0.0)
    sends = other.receive(0.0, peer_of(ME), ping)
    assert [type(sent) for _, sent in sends] == [Ack]
    assert other.status(peer_of(ME)) is Status.ALIVE


def test_a_candidate_that_left_is_not_pinged_again() -> None:
    peer = Peer()
    peer.hear(HONEST, Gossip((alive(10),)))
    peer.hear(HONEST, Gossip((sign_body(HashSigner(peer_of(10)), LeftBody(1)),)))
    assert len(peer.core._candidates) == 0
    peer.run(5.0)
    assert peer.pinged.count(peer_of(10)) == 1


def test_a_forged_fact_rejects_the_rest_of_its_list() -> None:
    facts = [alive(number) for number in range(10, 200)]
    forged = Fact(facts[100].author, facts[100].body, bytes(64))
    peer = Peer()
    peer.hear(LIAR, Sync(False, (*facts[:100], forged, *facts[101:])))
    peer.run(1.0)
    refused = [event for event in peer.core.events if isinstance(event, FactsRefused)]
    assert [event.sender for event in refused] == [peer_of(LIAR)]
    assert peer_of(150) not in peer.pinged
    with pytest.raises(RemoteProtocolError):
        peer.core.receive(peer.now, peer_of(LIAR), Sync(False, (forged,)))


def test_pending_lists_are_bounded_and_one_per_sender() -> None:
    peer = Peer()
    for sender in (*range(3_000, 3_000 + 3 * JOBS_MAX), 3_000, 3_000):
        peer.hear(sender, Sync(False, tuple(alive(number) for number in range(10, 200))))
        assert len(peer.core._beliefs.intake) <= JOBS_MAX


def test_one_source_gets_only_its_share_of_a_filling_list() -> None:
    told = range(10, 400)
    peer = Peer(there=(LIAR, HONEST, *told), settings=SwimSettings(members_max=300))
    for first in range(10, 400, 30):
        peer.hear(LIAR, Sync(False, tuple(alive(number) for number in range(first, first + 30))))
        peer.run(1.0)
    assert peer.core.live == 150
    peer.hear(HONEST, Sync(False, tuple(alive(number) for number in range(500, 520))))
    peer.there |= {peer_of(number) for number in range(500, 520)}
    peer.run(2.0)
    assert peer.core.live == 170


def test_a_swarm_lists_a_newcomer_that_few_can_reach_directly() -> None:
    swarm = Swarm(8, SwimSettings.local())
    swarm.run_until(swarm.converged, at_most=4)
    swarm.blocked = lambda a, b: {a, b} == {3, 8}
    swarm.start(8, join=0)
    swarm.run_until(swarm.converged, at_most=5)


moves = st.lists(
    st.tuples(st.sampled_from(["put", "next", "retry", "pop"]), st.integers(0, 40), st.integers(0, 3)),
    max_size=120,
)


@given(moves)
def test_the_table_of_candidates_is_bounded_and_its_counts_are_right(
    sequence: list[tuple[str, int, int]],
) -> None:
    candidates = Candidates(20)
    for move, number, introducer in sequence:
        peer, teller = peer_of(number), peer_of(1_000 + introducer)
        match move:
            case "put" if peer not in candidates and candidates.takes(teller):
                before = Counter(row.introducer for row in candidates.rows.values())
                profile = Profile("x", (Address("ip4", "10.0.0.1", 1),))
                body = AliveBody(1, "x", (), b"")
                said = announced(alive(number), profile, body)
                candidates.put(Candidate(said, teller, passed_on=True))
                after = Counter(row.introducer for row in candidates.rows.values())
                if sum(before.values()) == 20:
                    [loser] = [other for other in before if after[other] < before[other]]
                    assert before[loser] == max(before.values())
            case "next":
                candidates.next()
            case "retry":
                candidates.retry(peer)
            case "pop":
                candidates.pop(peer)
        rows = candidates.rows.values()
        assert len(candidates) <= 20
        assert candidates.probed == sum(row.is_probed for row in rows) <= PROBED_MAX
        assert candidates._counts == Counter(row.introducer for row in rows)
        waiting = {peer for told in candidates._waiting.values() for peer in told}
        assert waiting == {row.peer for row in rows if not row.is_probed}
        assert all(candidates._waiting.values())
