"""Pings in flight: our own probes, and the pings we relay for others (SWIM section 3.1).

A probe is a ping. Unanswered at `timeout_at` it continues through relays, and unanswered at `end_at` it has
failed. A relay that cannot reach the target says so (Lifeguard's Nack); mute relays tell a prober that the
fault may be its own.
"""

from dataclasses import dataclass
from math import inf
from typing import Literal

from crypto.identity import PeerId

RELAYS_MAX = 256
"""Relayed pings at one time. An honest peer has one or two; further requests are not answered."""
OVERDUE_MAX = 256
"""Pings of failed probes whose answers may still come: those of minutes for a single slow member, of seconds
in a swarm where no member answers."""
RELAY_PATIENCE = 0.8
"""A relay sends a Nack after this share of the probe timeout, so that it reaches the prober in time."""


Kind = Literal["round", "hint", "suspect", "candidate", "dead"]


@dataclass(slots=True)
class Probe:
    """One probe of `target` in `incarnation`. Times are monotonic seconds."""

    target: PeerId
    incarnation: int
    sent_at: float
    timeout_at: float
    end_at: float
    excusable_seconds: float
    relays: tuple[PeerId, ...] = ()
    relayed: bool = False
    nacked: tuple[PeerId, ...] = ()
    copies: tuple[int, ...] = ()
    """The numbers of further pings of the same probe."""
    kind: Kind = "round"
    """The reason of the probe. hint: others accuse the target. suspect: it is suspected here. candidate: it
    may not exist. dead: it is held for dead, and the network may have healed."""
    is_in_turn: bool = False
    """Whether the target was the next of the round, an order that no other peer can influence."""

    def excuse(self, seconds: float) -> None:
        """Extend the probe by this peer's stall, by at most `excusable_seconds` in all."""
        given = min(seconds, self.excusable_seconds)
        self.excusable_seconds -= given
        self.timeout_at += given
        self.end_at += given


@dataclass(frozen=True, slots=True)
class Relay:
    """A ping of `target` for `requester`, whose probe has `number`."""

    requester: PeerId
    number: int
    target: PeerId
    nack_at: float


@dataclass(frozen=True, slots=True)
class FurtherPing:
    """A further ping of the probe `number`; an answer to it measures this ping's time."""

    number: int
    sent_at: float
    by_stream: bool


@dataclass(frozen=True, slots=True)
class Overdue:
    """A ping of a failed probe. Its answer may still come, from a distant member."""

    target: PeerId
    sent_at: float


class InFlightProbes:
    """All probes and relayed pings, by the number of the ping we sent.

    An answer counts only with the right number from the right peer.
    """

    __slots__ = ("_number", "copies", "overdue", "probes", "relays")

    def __init__(self, first_number: int) -> None:
        self.probes: dict[int, Probe] = {}
        self.copies: dict[int, FurtherPing] = {}
        self.overdue: dict[int, Overdue] = {}
        self.relays: dict[int, Relay] = {}  # in the order of nack_at, since the patience is constant
        self._number = first_number

    @property
    def deadline(self) -> float:
        deadline = inf
        for probe in self.probes.values():
            due = probe.end_at if probe.relayed else probe.timeout_at
            if due < deadline:
                deadline = due
        for relay in self.relays.values():
            return min(deadline, relay.nack_at)
        return deadline

    def add_probe(self, probe: Probe) -> int:
        """Add a probe; return the number for its ping."""
        number = self._next_number()
        self.probes[number] = probe
        return number

    def add_copy(self, number: int, now: float, *, by_stream: bool = False) -> int:
        """Add another ping to the probe `number`; return the number for that ping."""
        probe, again = self.probes[number], self._next_number()
        probe.copies += (again,)
        self.copies[again] = FurtherPing(number, now, by_stream)
        return again

    def take(self, number: int) -> Probe:
        """Remove a finished probe, with all of its pings."""
        probe = self.probes.pop(number)
        for again in probe.copies:
            del self.copies[again]
        return probe

    def fail(self, number: int) -> Probe:
        """Remove an unanswered probe. Its pings are remembered for a while."""
        copies = self.copies
        probe = self.probes[number]
        sent = [(number, probe.sent_at), *((again, copies[again].sent_at) for again in probe.copies)]
        for each, sent_at in sent:
            self.overdue[each] = Overdue(probe.target, sent_at)
        while len(self.overdue) > OVERDUE_MAX:
            del self.overdue[next(iter(self.overdue))]
        return self.take(number)

    def excuse(self, seconds: float) -> None:
        """Extend all probes by the time of our own stall."""
        for probe in self.probes.values():
            probe.excuse(seconds)

    def clear(self) -> None:
        """Forget all pings in flight."""
        for each in (self.probes, self.copies, self.overdue, self.relays):
            each.clear()

    def add_relay(self, relay: Relay) -> int | None:
        """Add a relayed ping; return its number, or None with too many of them."""
        if len(self.relays) >= RELAYS_MAX:
            return None
        number = self._next_number()
        self.relays[number] = relay
        return number

    def probing(self, peer: PeerId) -> bool:
        return bool(self.probes) and peer in [probe.target for probe in self.probes.values()]

    def _next_number(self) -> int:
        self._number = (self._number + 1) % 2**32
        return self._number
