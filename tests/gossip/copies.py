"""Processes that share a key, together with a few other members, in virtual time.

Datagrams follow `crypto.sessions`: a member sends to the process with which it last shook hands, and receives
from every process. A process that hears nothing shakes hands again, and so does one whose core reports that
it has outlived a rival. A stream goes to any running process. This file replaces `node.services.lives`, which
dials the address of another reported life (process with the same identity), after which both know each other.
"""

import heapq
import itertools
from collections.abc import Callable
from functools import partial
from math import inf
from random import Random

from crypto.contact import Address
from crypto.encoding import encode
from crypto.identity import PeerId
from crypto.sessions.state import HOLD_SECONDS, SILENCE_SECONDS
from gossip.member import Event, MemberDown, OtherLifeHeard, Profile, RivalFound, RivalOutlived, Status
from gossip.messages import ByStream, Message, life_of
from gossip.settings import SwimSettings
from gossip.swim import Sends, Swim
from node.services.lives import LOOK_PAUSES_SECONDS
from node.services.membership import LEAVE_SECONDS
from tests.gossip.swarm import DATAGRAM_BYTES_MAX, HashSigner, peer_of

KEY = peer_of(0)
"""The peer with several processes."""
UNPROVEN_LOSS = 0.7
"""The share of packets lost soon after a peer's handshake from a different address. Until the newer address
has answered a challenge, packets wait or go to either address (`crypto.sessions.state`).
"""
STARTED = 1_000_000
"""Unix milliseconds at which virtual time begins."""


class Machine:
    """A process and its sessions."""

    def __init__(self, name: str, peer: PeerId, core: Swim, life: bytes, address: Address) -> None:
        self.name = name
        self.peer = peer
        self.core = core
        self.life = life
        self.address = address
        self.events: list[Event] = []
        self.stops_at = inf
        # The process with which each peer has its session.
        self.sessions: dict[PeerId, str] = {}
        # When the session moved to a different process, and since when packets to that process are
        # unanswered.
        self.moved_at: dict[PeerId, float] = {}
        self.unanswered: dict[PeerId, float] = {}

    def rivals(self) -> list[RivalFound]:
        return [event for event in self.events if isinstance(event, RivalFound)]

    def lost(self) -> list[MemberDown]:
        return [event for event in self.events if isinstance(event, MemberDown)]

    def listed(self, peer: PeerId) -> tuple[str, Status] | None:
        """Return the name and status under which this process lists `peer`."""
        member = self.core.member(peer)
        return None if member is None else (member.name, member.status)


class Swarm:
    """Members named "1", "2" and so on, and processes with the key KEY, which may have any names. One seed
    determines everything."""

    def __init__(self, seed: int, settings: SwimSettings, *, others: int = 2) -> None:
        self.rng = Random(seed)
        self.settings = settings
        self.now = 0.0
        self.running: dict[str, Machine] = {}
        self.sent: list[Message] = []
        self.numbers = itertools.count()
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        for number in range(1, others + 1):
            self.start(str(number), peer_of(number), *(["1"] if number > 1 else []))

    def start(
        self, name: str, peer: PeerId, *through: str, started: int | None = None, instance: bytes = b""
    ) -> Machine:
        number = next(self.numbers)
        address = Address("ip4", "127.0.0.1", 1_000 + number)
        incarnation = STARTED + int(self.now * 1000) if started is None else started
        instance = instance or number.to_bytes(6, "big")
        rng = Random(self.rng.random())
        profile = Profile(name, (address,))
        core = Swim(HashSigner(peer), profile, self.settings, rng, incarnation, self.now, instance=instance)
        machine = Machine(name, peer, core, life_of(incarnation, instance), address)
        self.running[name] = machine
        self._arm(machine)
        for seed in through:
            join = partial(self._join, machine, self.running[seed].peer)
            self._later(self.rng.uniform(0.0, 0.05), machine, join)
        for seconds in (0.7, 2.0):
            # A node's profile changes once the node has measured its machine.
            said = Profile(name, (address,), bytes(f"{seconds}", "ascii"))
            self._later(seconds, machine, partial(self._update, machine, said))
        return machine

    def _join(self, machine: Machine, peer: PeerId) -> Sends:
        return machine.core.join(self.now, [peer])

    def _update(self, machine: Machine, profile: Profile) -> Sends:
        return machine.core.update(self.now, profile)

    def stop(self, name: str) -> None:
        """Kill a process as by SIGKILL."""
        del self.running[name]

    def run(self, seconds: float) -> None:
        until = self.now + seconds
        while self._heap and self._heap[0][0] <= until:
            self.now, _, act = heapq.heappop(self._heap)
            act()
        self.now = until

    def run_until(self, condition: Callable[[], bool], at_most: float) -> float | None:
        """Run until the condition holds. Return how many seconds that took; None if the condition never
        held."""
        begun = self.now
        while not condition():
            if self.now - begun > at_most:
                return None
            self.run(0.05)
        return self.now - begun

    # The transport.

    def _push(self, seconds: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (self.now + seconds, next(self._order), act))

    def _runs(self, machine: Machine) -> bool:
        return self.running.get(machine.name) is machine

    def _later(self, seconds: float, machine: Machine, act: Callable[[], Sends]) -> None:
        def go() -> None:
            if self._runs(machine):
                self._send(machine, act())

        self._push(seconds, go)

    def _arm(self, machine: Machine) -> None:
        deadline = machine.core.deadline
        if deadline < inf:

            def wake() -> None:
                if self._runs(machine) and machine.core.deadline <= self.now:
                    self._send(machine, machine.core.wake(self.now))

            self._push(max(0.0, deadline - self.now), wake)

    def _send(self, machine: Machine, sends: Sends) -> None:
        events = machine.core.events[:]
        machine.core.events.clear()
        for event in events:
            machine.events.append(event)
            self._heed(machine, event)
        for peer, sent in sends:
            message = sent.message if isinstance(sent, ByStream) else sent
            self.sent.append(message)
            seconds = self.rng.uniform(0.0005, 0.01)
            if isinstance(sent, ByStream) or len(encode(message)) > DATAGRAM_BYTES_MAX:
                there = [each for each in self.running.values() if each.peer == peer]
                if there:
                    self._deliver(3 * seconds, machine, self.rng.choice(there), message)
            else:
                self._send_datagram(seconds, machine, peer, message)
        self._arm(machine)

    def _send_datagram(self, seconds: float, machine: Machine, peer: PeerId, message: Message) -> None:
        since = machine.unanswered.setdefault(peer, self.now)
        held = machine.sessions.get(peer)
        if held is None or self.now - since > SILENCE_SECONDS:
            # A handshake, sent to the last known address of the other peer, or to the address it claimed.
            known = machine.core.member(peer)
            said = [each.of(None) for each in known.addresses] if known is not None and held is None else []
            there = [each for each in self.running.values() if each.peer == peer]
            there = [each for each in there if each.name == held or each.address in said] or there
            if not there or (held is not None and held not in self.running):
                return
            target, seconds = there[0], 3 * seconds
            machine.sessions[peer] = target.name
            machine.unanswered[peer] = self.now

            def shake_hands() -> None:
                if target.sessions.get(machine.peer, machine.name) != machine.name:
                    target.moved_at[machine.peer] = self.now
                target.sessions[machine.peer] = machine.name

            self._push(seconds * 0.9, shake_hands)
        elif held in self.running:
            target = self.running[held]
        else:
            return
        is_unproven = self.now - machine.moved_at.get(peer, -inf) < HOLD_SECONDS
        if not (is_unproven and self.rng.random() < UNPROVEN_LOSS):
            self._deliver(seconds, machine, target, message)

    def _deliver(self, seconds: float, machine: Machine, target: Machine, message: Message) -> None:
        def arrive() -> None:
            if self._runs(target):
                target.unanswered.pop(machine.peer, None)
                self._send(target, target.core.receive(self.now, machine.peer, message))

        self._push(seconds, arrive)

    # The work of the program around the core.

    def _heed(self, machine: Machine, event: Event) -> None:
        match event:
            case OtherLifeHeard():
                said = [address.of(None) for address in event.addresses]
                elsewhere = [address for address in said if address != machine.address]
                self._look(machine, elsewhere, 0)
            case RivalOutlived():
                machine.sessions.clear()
            case RivalFound(is_younger=False):
                self._yield(machine)

    def _look(self, machine: Machine, addresses: list[Address], tries: int) -> None:
        def look() -> None:
            if not self._runs(machine):
                return
            for other in [*self.running.values()]:
                if other.peer == machine.peer and other.address in addresses:
                    self._meet(machine, other)
                    self._meet(other, machine)
                    return
            if tries < len(LOOK_PAUSES_SECONDS):
                self._push(LOOK_PAUSES_SECONDS[tries], lambda: self._look(machine, addresses, tries + 1))

        self._push(self.rng.uniform(0.005, 0.05), look)

    def _meet(self, machine: Machine, other: Machine) -> None:
        member = other.core.member(other.peer)
        assert member is not None
        self._send(machine, machine.core.meet_life(self.now, other.life, member.incarnation))
        if other.life < machine.life:
            self._yield(machine)

    def _yield(self, machine: Machine) -> None:
        if machine.stops_at == inf:
            machine.stops_at = self.now + LEAVE_SECONDS

            def stop() -> None:
                if self._runs(machine):
                    self.stop(machine.name)

            self._push(LEAVE_SECONDS, stop)
