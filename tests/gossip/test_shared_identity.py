"""Two processes with one key, as of a copied data folder: which goes, and what is no such thing."""

from random import Random

import pytest

from gossip.member import MemberDown, RivalFound, Status
from gossip.messages import ByStream, Message
from gossip.settings import Settings
from gossip.swim import Sends, Swim
from tests.gossip.swarm import HashSigner, peer_of, profile_of

EARLY, LATE = 1_000_000, 2_000_000
"""Unix milliseconds of two starts."""
SECONDS = 30.0
KEY, OTHERS = 0, (1, 2)


class Swarm:
    """Members 1 and 2, and any number of processes with the key of member 0, by the names of their machines.

    Who writes to that peer reaches the machine from which it heard last.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.cores: dict[str, Swim] = {}
        self.events: dict[str, list[object]] = {}
        self.heard_from: dict[tuple[str, int], str] = {}
        for number in OTHERS:
            self.start(str(number), number, EARLY)

    def start(self, name: str, number: int, started: int, instance: bytes = b"-start") -> Swim:
        rng = Random(len(self.events))
        settings = Settings.local()
        profile = profile_of(len(self.events))
        signer = HashSigner(peer_of(number))
        core = Swim(signer, profile, settings, rng, started, self.now, instance=instance)
        self.cores[name], self.events[name] = core, []
        self.send(name, core.join(self.now, [peer_of(OTHERS[0])]))
        return core

    def send(self, name: str, sends: Sends) -> None:
        waiting: list[tuple[str, Sends]] = [(name, sends)]
        while waiting:
            teller, told = waiting.pop(0)
            self.events[teller] += self.cores[teller].events
            self.cores[teller].events.clear()
            for peer, sent in told:
                message = sent.message if isinstance(sent, ByStream) else sent
                waiting += self.deliver(teller, peer, message)

    def deliver(self, teller: str, peer: bytes, message: Message) -> list[tuple[str, Sends]]:
        sender = self.cores[teller].peer
        if sender == peer_of(KEY):
            self.heard_from[teller, KEY] = teller
            for number in OTHERS:
                if peer == peer_of(number):
                    self.heard_from[str(number), KEY] = teller
        names = [each for each, core in self.cores.items() if core.peer == peer]
        if peer == peer_of(KEY):
            names = [each for each in names if each == self.heard_from.get((teller, KEY))]
        return [(each, self.cores[each].receive(self.now, sender, message)) for each in names]

    def run(self, seconds: float) -> None:
        until = self.now + seconds
        while True:
            name = min(self.cores, key=lambda each: self.cores[each].deadline)
            if self.cores[name].deadline > until:
                break
            self.now = max(self.now, self.cores[name].deadline)
            self.send(name, self.cores[name].wake(self.now))
        self.now = until

    def shared(self, name: str) -> list[RivalFound]:
        return [event for event in self.events[name] if isinstance(event, RivalFound)]

    def run_until_one_goes(self, *names: str) -> str:
        for _ in range(int(SECONDS * 10)):
            self.run(0.1)
            gone = [name for name in names if any(not each.is_younger for each in self.shared(name))]
            if gone:
                self.run(0.5)  # what it has said goes round
                del self.cores[gone[0]]
                return gone[0]
        raise AssertionError("none went")


@pytest.mark.parametrize(
    ("first", "second", "goes"),
    [((EARLY, b"aaaaaa"), (LATE, b"aaaaaa"), "copy"), ((LATE, b"aaaaaa"), (EARLY, b"aaaaaa"), "original"),
     ((EARLY, b"aaaaaa"), (EARLY, b"bbbbbb"), "copy")],
    ids=["copy-began-later", "clock-of-copy-behind", "at-the-same-time"],
)  # fmt: skip
def test_of_two_with_one_key_the_younger_goes_and_the_elder_stays(
    first: tuple[int, bytes], second: tuple[int, bytes], goes: str
) -> None:
    swarm = Swarm()
    swarm.start("original", KEY, *first)
    swarm.run(5.0)
    swarm.start("copy", KEY, *second)
    assert swarm.run_until_one_goes("original", "copy") == goes
    (stays,) = {"original", "copy"} - {goes}
    swarm.run(SECONDS)
    told = swarm.shared(stays)
    assert [each.is_younger for each in told] == [True]
    for number in map(str, OTHERS):
        member = swarm.cores[number].member(peer_of(KEY))
        assert member is not None
        assert member.status is Status.ALIVE
        own = swarm.cores[stays].member(peer_of(KEY))
        assert own is not None
        assert member.name == own.name
        assert not any(isinstance(event, MemberDown) for event in swarm.events[number])


@pytest.mark.parametrize("again", [LATE, EARLY - 1], ids=["later", "clock-set-back"])
def test_an_earlier_life_of_a_node_is_no_other_node(again: int) -> None:
    swarm = Swarm()
    swarm.start("machine", KEY, EARLY, b"aaaaaa")
    swarm.run(5.0)
    del swarm.cores["machine"]
    swarm.start("machine", KEY, again, b"bbbbbb")
    swarm.run(SECONDS)
    assert swarm.shared("machine") == []
    assert swarm.cores["1"].status(peer_of(KEY)) is Status.ALIVE
