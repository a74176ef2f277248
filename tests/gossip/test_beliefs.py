"""Tests of facts: which peer may state a fact about which other peer, and that a forged fact has no effect.
Signatures are real."""

from collections.abc import Collection
from random import Random
from typing import Any

import pytest

from crypto.contact import Address
from crypto.errors import RemoteProtocolError
from crypto.facts import Fact, IdentitySigner
from crypto.identity import Identity, PeerId
from gossip.hints import DOUBTED_INTERVALS
from gossip.member import (
    MemberDown,
    MemberLeft,
    MemberRefuted,
    MemberSuspected,
    Profile,
    SelfAccused,
    Status,
)
from gossip.messages import (
    INCARNATION_JUMP_MAX,
    Ack,
    AliveBody,
    Body,
    DeadBody,
    Gossip,
    LeftBody,
    Ping,
    SuspectBody,
    Sync,
    alive_body,
    sign_body,
)
from gossip.refutations import REFUTATION_INTERVALS, REFUTATIONS_MAX
from gossip.settings import SwimSettings
from gossip.suspicion import ACCUSERS_MAX, LEAK_INTERVALS, REFUTED_MAX, Credit
from gossip.swim import Sends, Swim

ME, ANN, BOB, EVE = (Identity(bytes([number]) * 32) for number in range(1, 5))


def say(author: Identity, body: Body, swarm: str = "test") -> Fact:
    return sign_body(IdentitySigner(author, swarm), body)


def alive(author: Identity, incarnation: int = 5, metadata: bytes = b"") -> Fact:
    return say(author, AliveBody(incarnation, "x", ("/ip4/10.0.0.1/tcp/9747",), metadata))


class Peer:
    """Return a core that knows Ann and Bob, and hears everything through Bob."""

    def __init__(self, **settings: Any) -> None:
        signer = IdentitySigner(ME, "test")
        self.core = Swim(signer, Profile("me", ()), SwimSettings(**settings), Random(1), 5, 0.0)
        self.now = 1.0
        self.answering: Collection[PeerId] = ()
        self.pinged: list[PeerId] = []
        self.told: list[tuple[PeerId, tuple[Fact, ...]]] = []
        self.hear(alive(ANN), sender=ANN)
        self.hear(alive(BOB))
        self.core.events.clear()

    def hear(self, *facts: Fact, sender: Identity = BOB) -> None:
        self.answer(self.core.receive(self.now, sender.peer, Gossip(facts)))

    def answer(self, sends: Sends) -> None:
        """Answer the pings to these peers."""
        for receiver, sent in sends:
            self.told.append((receiver, getattr(sent, "facts", ())))
            if isinstance(sent, Ping):
                self.pinged.append(receiver)
            if isinstance(sent, Ping) and receiver in self.answering:
                self.answer(self.core.receive(self.now, receiver, Ack(sent.number)))

    def wait(self, seconds: float = 30.0, answering: Collection[PeerId] = (BOB.peer,)) -> None:
        """Let time pass while these peers answer pings and send nothing else."""
        until, self.answering = self.now + seconds, answering
        while self.core.deadline <= until:
            self.now = self.core.deadline
            self.answer(self.core.wake(self.now))
        self.now = until

    def sync(self, *facts: Fact, sender: Identity = BOB) -> list[Any]:
        sends = self.core.receive(self.now, sender.peer, Sync(False, facts))
        self.answer(sends)
        return [message for _, message in sends]

    def status(self, identity: Identity) -> Status | None:
        return {member.peer: member.status for member in self.core.members}.get(identity.peer)

    @property
    def incarnation(self) -> int:
        return {member.peer: member.incarnation for member in self.core.members}[ME.peer]


def forge(fact: Fact, **changes: bytes) -> Fact:
    fields = {"author": fact.author, "body": fact.body, "signature": fact.signature, **changes}
    return Fact(**fields)


FORGED = [
    forge(alive(EVE), signature=bytes(64)),
    forge(alive(EVE), signature=b""),
    forge(alive(EVE), author=b"short"),
    forge(alive(EVE), body=b"\xc1"),
    forge(alive(EVE), body=bytes(1000)),
    forge(alive(ANN, 6), author=EVE.peer),
    forge(alive(EVE), author=ANN.peer, body=alive(ANN, 6).body),
    forge(alive(ANN, 6, b"a"), body=alive(ANN, 6, b"b").body),
    forge(say(EVE, SuspectBody(ANN.peer, 5, 0)), author=BOB.peer),
    forge(say(EVE, DeadBody(ANN.peer, 5, 0)), author=BOB.peer),
    forge(say(BOB, DeadBody(ME.peer, 5, 0)), signature=bytes(64)),
    forge(say(EVE, LeftBody(5)), author=ANN.peer),
    say(ANN, LeftBody(5), swarm="another"),
    say(EVE, AliveBody(5, "bell\a", (), b"")),
    say(EVE, AliveBody(5, "x", ("/ip4/nowhere/tcp/1",), b"")),
]


@pytest.mark.parametrize("fact", FORGED)
def test_a_forged_or_malformed_fact_is_refused_and_changes_nothing(fact: Fact) -> None:
    peer = Peer()
    before = peer.core.members
    with pytest.raises(RemoteProtocolError):
        peer.hear(fact)
    assert peer.core.members == before
    assert peer.core.events == []


NOT_BELIEVED = [
    pytest.param(say(EVE, DeadBody(ANN.peer, 5, 0)), id="dead, by a stranger"),
    pytest.param(say(EVE, SuspectBody(ANN.peer, 5, 0)), id="suspect, by a stranger"),
    pytest.param(say(EVE, DeadBody(ME.peer, 5, 0)), id="we are dead, by a stranger"),
    pytest.param(say(BOB, DeadBody(ANN.peer, 4, 0)), id="dead, in an earlier incarnation"),
    pytest.param(say(BOB, DeadBody(ANN.peer, 2**62, 0)), id="dead, in one it never announced"),
    pytest.param(say(BOB, SuspectBody(ANN.peer, 6, 0)), id="suspect, in one it never announced"),
    pytest.param(say(BOB, SuspectBody(ME.peer, 2**62, 0)), id="we are suspect, in one we never announced"),
    pytest.param(say(ANN, DeadBody(ANN.peer, 5, 0)), id="dead, by itself"),
    pytest.param(say(BOB, DeadBody(EVE.peer, 5, 0)), id="a stranger is dead"),
    pytest.param(say(EVE, LeftBody(9)), id="a stranger left"),
    pytest.param(say(ANN, LeftBody(4)), id="left, in an earlier incarnation"),
    pytest.param(alive(ANN, 4), id="alive, in an earlier incarnation"),
    pytest.param(alive(ANN, 5, b"other"), id="alive, twice in one incarnation"),
    pytest.param(alive(ME, 4), id="we, in an earlier incarnation"),
]


@pytest.mark.parametrize("fact", NOT_BELIEVED)
def test_a_validly_signed_but_inadmissible_fact_changes_nothing(fact: Fact) -> None:
    peer = Peer()
    before = peer.core.members
    peer.hear(fact)
    assert peer.core.members == before
    assert peer.core.events == []


def test_no_signature_is_checked_for_a_fact_that_changes_nothing() -> None:
    peer = Peer()
    peer.hear(forge(alive(ANN, 5), signature=bytes(64)))
    peer.hear(forge(say(BOB, DeadBody(EVE.peer, 5, 0)), signature=bytes(64)))


def test_left_overrides_dead_and_the_accuser_of_the_dead_is_named() -> None:
    peer = Peer()
    peer.hear(say(BOB, SuspectBody(ANN.peer, 5, 1_100)))
    peer.wait(1.1)
    assert peer.status(ANN) is Status.SUSPECT
    peer.hear(say(BOB, DeadBody(ANN.peer, 5, 2_300)))
    peer.hear(say(BOB, SuspectBody(ANN.peer, 5, 9)))
    peer.wait()
    assert peer.status(ANN) is Status.DEAD
    member = next(member for member in peer.core.members if member.peer == ANN.peer)
    assert (member.reason, member.accuser) == ("no ack for 2.3 s, says x", BOB.peer)
    peer.hear(say(ANN, LeftBody(5)))
    assert peer.status(ANN) is Status.LEFT
    kinds = [type(event) for event in peer.core.events if getattr(event, "peer", None) == ANN.peer]
    assert kinds == [MemberSuspected, MemberDown, MemberLeft]
    peer.hear(alive(ANN, 6))
    assert peer.status(ANN) is Status.ALIVE


@pytest.mark.parametrize("kinds", [(DeadBody,), (SuspectBody, DeadBody)], ids=["dead", "both"])
def test_a_member_that_answers_us_is_never_suspected_on_hearsay(kinds: Any) -> None:
    peer = Peer()
    peer.answering = {ANN.peer, BOB.peer}
    peer.hear(*(say(BOB, kind(ANN.peer, 5, 1_100)) for kind in kinds))
    peer.wait(answering={ANN.peer, BOB.peer})
    assert peer.status(ANN) is Status.ALIVE
    assert not [event for event in peer.core.events if isinstance(event, MemberSuspected)]


def test_an_accusation_is_forwarded_only_if_our_own_probe_fails() -> None:
    peer = Peer()
    accusation = say(BOB, SuspectBody(ANN.peer, 5, 0))
    peer.hear(accusation)
    peer.wait(0.9, answering={BOB.peer})
    # However, the accused member itself receives the accusation.
    assert {receiver for receiver, facts in peer.told if accusation in facts} == {ANN.peer}
    peer.wait(1.1, answering={BOB.peer})
    assert {receiver for receiver, facts in peer.told if accusation in facts} == {ANN.peer, BOB.peer}


def test_a_suspects_time_to_refute_has_a_minimum() -> None:
    peer = Peer()
    peer.hear(say(BOB, SuspectBody(ANN.peer, 5, 1_100)), say(BOB, DeadBody(ANN.peer, 5, 2_300)))
    settings = SwimSettings()
    shortest, _ = settings.suspicion_bounds_seconds(3)
    peer.wait(shortest - settings.probe_interval_seconds - 0.1)
    assert peer.status(ANN) is Status.SUSPECT


def test_a_suspect_that_answers_is_alive_without_a_new_incarnation() -> None:
    peer = Peer()
    peer.wait(3.0, answering={BOB.peer})
    assert peer.status(ANN) is Status.SUSPECT
    peer.wait(3.0, answering={ANN.peer, BOB.peer})
    assert peer.status(ANN) is Status.ALIVE
    assert MemberRefuted(ANN.peer, 5) in peer.core.events


def test_an_accuser_refuted_too_often_is_ignored_for_a_while() -> None:
    peer = Peer()
    asked = []
    for number in range(2 * int(REFUTED_MAX)):
        peer.pinged.clear()
        peer.answering = {ANN.peer, BOB.peer}
        peer.hear(say(BOB, SuspectBody(ANN.peer, 5, number)))
        asked.append(ANN.peer in peer.pinged or peer.core.sizes["hints"][0] == 1)
        # later than the time for which an answer saves a peer from the next probe
        peer.wait(10.0, peer.answering)
    assert asked == [True] * int(REFUTED_MAX) + [False] * int(REFUTED_MAX)
    peer.now += 3 * LEAK_INTERVALS
    peer.pinged.clear()
    peer.hear(say(BOB, SuspectBody(ANN.peer, 5, 99)))
    assert ANN.peer in peer.pinged


def test_an_accuser_with_recent_errors_costs_no_extra_message() -> None:
    peer = Peer()
    peer.answering = {ANN.peer, BOB.peer}
    peer.hear(say(BOB, SuspectBody(ANN.peer, 5, 1)))
    peer.wait(10.0, peer.answering)
    peer.told.clear()
    accusation = say(BOB, SuspectBody(ANN.peer, 5, 2))
    peer.hear(accusation)
    assert peer.told == []
    peer.wait(3 * DOUBTED_INTERVALS, peer.answering)
    assert peer.core.sizes["hints"][0] == 0
    assert not any(accusation in facts for _, facts in peer.told)
    assert len(peer.pinged) <= 2 + 10 + 3 * DOUBTED_INTERVALS


def test_many_accusations_at_once_exhaust_an_accusers_credit() -> None:
    peer = Peer()
    others = [Identity(bytes([number]) * 32) for number in range(40, 60)]
    for other in others:
        peer.hear(alive(other), sender=other)
    peer.pinged.clear()
    peer.answering = ()
    peer.hear(*(say(BOB, SuspectBody(other.peer, 5, 0)) for other in others))
    assert len(peer.pinged) == int(REFUTED_MAX)


def test_an_incarnation_jump_beyond_any_clock_is_refused() -> None:
    peer = Peer()
    for fact in (alive(ANN, 6 + INCARNATION_JUMP_MAX), alive(EVE, 1 + INCARNATION_JUMP_MAX)):
        with pytest.raises(RemoteProtocolError):
            peer.hear(fact, sender=ANN)
    peer.hear(alive(ANN, 1_800_000_000_000))  # a restart, by the wall clock
    assert peer.status(ANN) is Status.ALIVE


def test_new_incarnations_after_accusations_are_rate_limited() -> None:
    peer = Peer()
    for number in range(20):
        accuser = (ANN, BOB)[number % 2]
        peer.hear(say(accuser, SuspectBody(ME.peer, peer.incarnation, 0)), sender=accuser)
    assert peer.incarnation == 5 + REFUTATIONS_MAX
    peer.wait(REFUTATION_INTERVALS + 1, answering={ANN.peer, BOB.peer})
    peer.hear(say(ANN, SuspectBody(ME.peer, peer.incarnation, 0)))
    assert peer.incarnation == 6 + REFUTATIONS_MAX


def test_errors_are_counted_for_a_bounded_number_of_accusers() -> None:
    credit = Credit(30.0)
    for number in range(ACCUSERS_MAX + 50):
        credit.refuted(PeerId(number.to_bytes(32, "big")), float(number))
    assert len(credit) == ACCUSERS_MAX


def test_a_claim_about_us_is_refuted_once_per_incarnation() -> None:
    peer = Peer()
    peer.hear(say(BOB, DeadBody(ME.peer, 5, 700)))
    peer.hear(say(ANN, SuspectBody(ME.peer, 5, 700)))
    assert peer.incarnation == 6
    assert peer.core.events == [SelfAccused(BOB.peer, "no ack for 0.7 s, says x", 6)]


def test_a_restarted_node_exceeds_its_previous_incarnation() -> None:
    peer = Peer()
    peer.hear(alive(ME, 40))
    assert peer.incarnation == 41
    peer.hear(say(ME, LeftBody(41)))
    assert peer.incarnation == 42
    assert peer.status(ME) is Status.ALIVE


def test_a_dead_fact_in_a_sync_only_triggers_a_probe() -> None:
    peer = Peer()
    [ping] = peer.sync(say(BOB, DeadBody(ANN.peer, 5, 0)))
    assert type(ping).__name__ == "Ping"
    assert peer.status(ANN) is Status.ALIVE


def test_a_member_that_died_before_we_joined_is_not_listed() -> None:
    peer = Peer()
    peer.answering = {EVE.peer}
    peer.sync(alive(EVE, 7), say(BOB, DeadBody(EVE.peer, 7, 0)))
    assert peer.status(EVE) is None
    peer.sync(alive(EVE, 8), say(BOB, DeadBody(EVE.peer, 7, 0)))
    assert peer.status(EVE) is Status.ALIVE


def test_a_full_list_accepts_a_newcomer_only_after_a_departure() -> None:
    peer = Peer(members_max=3)
    peer.answering = {EVE.peer}
    peer.hear(alive(EVE))
    assert peer.status(EVE) is None
    peer.hear(say(ANN, LeftBody(5)))
    peer.hear(alive(EVE))
    assert peer.status(EVE) is Status.ALIVE
    assert peer.status(ANN) is None


def test_a_long_profile_is_shortened_by_its_last_addresses_to_fit() -> None:
    hosts = [f"host-{number}." + "long-name." * 8 + "example" for number in range(8)]
    addresses = tuple(Address("dns", host, 9747, PeerId(ME.peer)) for host in hosts)
    profile = Profile("\u00fc" * 40, addresses, bytes(300))
    body = alive_body(profile, INCARNATION_JUMP_MAX)
    assert 1 <= len(body.addresses) < 8
    assert all("/p2p/" not in address for address in body.addresses)
    peer = Peer()
    peer.hear(say(EVE, body), sender=EVE)
    member = next(member for member in peer.core.members if member.peer == EVE.peer)
    assert [str(address.of(None)) for address in member.addresses] == list(body.addresses)
    assert all(address.peer == EVE.peer for address in member.addresses)


@pytest.mark.parametrize(
    "arguments", [("n" * 41, (), b""), ("line\nbreak", (), b""), ("name", (), bytes(301))]
)
def test_an_oversized_profile_is_refused_at_once(arguments: Any) -> None:
    with pytest.raises(ValueError, match=r"printable|metadata"):
        Profile(*arguments)
