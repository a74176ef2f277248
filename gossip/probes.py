"""Pings in flight: our own probes, and the pings we relay for others (SWIM section 3.1).

A probe begins with a ping. If it is unanswered at `timeout_at`, relays are asked; if it is still unanswered
at `end_at`, it has failed. A relay that cannot reach the target reports it (Lifeguard's Nack). If the relays
are silent too, the fault may be the prober's own.
"""

from dataclasses import dataclass
from math import inf
from typing import Literal

from crypto.identity import PeerId

RELAYS_MAX = 256
"""Maximum number of relayed pings in flight. An honest peer has one or two; further requests are not
answered."""
OVERDUE_MAX = 256
"""Maximum number of pings of failed probes whose answers may still come. They cover minutes if a single
member is slow, and seconds in a swarm in which no member answers."""
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
    """The reason for the probe. hint: others accuse the target. suspect: the target is suspected here.
    candidate: the target may not exist. dead: the target counts as dead, but the network may have healed."""
    is_in_turn: bool = False
    """Whether the target was the next of the round, an order that no other peer can influence."""

    def excuse(self, seconds: float) -> None:
        """Extend the probe by the time of this peer's stall, but in total by at most `excusable_seconds`."""
        given = min(seconds, self.excusable_seconds)
        self.excusable_seconds -= given
        self.timeout_at += given
        self.end_at += given


@dataclass(frozen=True, slots=True)
class Relay:
    """A ping of `target` on behalf of `requester`, whose probe has `number`."""

    requester: PeerId
    number: int
    target: PeerId
    nack_at: float


@dataclass(frozen=True, slots=True)
class FurtherPing:
    """A further ping of the probe `number`. An answer to it measures the time of this ping."""

    number: int
    sent_at: float
    by_stream: bool


@dataclass(frozen=True, slots=True)
class Overdue:
    """A ping of a failed probe. Its answer may still come from a distant member."""

    target: PeerId
    sent_at: float


class InFlightProbes:
    """All probes and relayed pings, keyed by the number of the ping we sent.

    An answer counts only if it has the right number and comes from the right peer.
    """

    __slots__ = ("_number", "copies", "overdue", "probes", "relays")

    def __init__(self, first_number: int) -> None:
        self.probes: dict[int, Probe] = {}
        self.copies: dict[int, FurtherPing] = {}
        self.overdue: dict[int, Overdue] = {}
        self.relays: dict[int, Relay] = {}  # in the order of nack_at, because all have the same patience
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
        """Add a probe. Return the number for its ping."""
        number = self._next_number()
        self.probes[number] = probe
        return number

    def add_copy(self, number: int, now: float, *, by_stream: bool = False) -> int:
        """Add a further ping to the probe `number`. Return the number for that ping."""
        probe, again = self.probes[number], self._next_number()
        probe.copies += (again,)
        self.copies[again] = FurtherPing(number, now, by_stream)
        return again

    def take(self, number: int) -> Probe:
        """Remove a finished probe, with all its pings."""
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
        """Add a relayed ping. Return its number; None if there are too many."""
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
