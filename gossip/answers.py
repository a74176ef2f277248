"""Measurements taken from the answers of probed members: round trips, coordinates, clocks, lateness.

Each ping has its own number, so an answer measures exactly the ping that it answers. Only a target's own
answers are measured. An answer over a stream only yields the clock, because the stream may have been opened
just for it. Clocks are read only when a member is probed in its regular turn: this peer alone chooses that
order, so no other peer can get many of its friends probed first.
"""

from random import Random

from crypto.identity import PeerId
from gossip.clocks import PeerClocks
from gossip.coordinates import Coordinates
from gossip.member import MemberDegraded, MemberRecovered
from gossip.messages import Ack
from gossip.probes import FurtherPing, Probe
from gossip.punctuality import ProbeAnswer
from gossip.settings import SwimSettings
from gossip.shares import HostOf, network_of
from gossip.table import MemberTable


class AnswerMeasures:
    """The measurements of one peer. `table` keeps punctuality and slow members."""

    __slots__ = ("_settings", "_table", "clocks", "coordinates", "host_of")

    def __init__(self, table: MemberTable, settings: SwimSettings, rng: Random) -> None:
        self._table = table
        self._settings = settings
        self.coordinates = Coordinates(rng)
        self.clocks = PeerClocks(table.is_live)
        self.host_of: HostOf | None = None

    def take(self, now: float, ack: Ack, probe: Probe, further: FurtherPing | None) -> None:
        """Measure a probe whose target has answered by itself, either to its first ping or to a further
        one."""
        target, seconds = probe.target, now - (probe.sent_at if further is None else further.sent_at)
        if ack.wall is not None and probe.is_in_turn:
            host = None if self.host_of is None else self.host_of(target)
            place = None if host is None else network_of(host)
            self.clocks.learn(now, target, ack.wall, seconds, place)
        if further is not None and further.by_stream:
            return
        self.take_late(now, target, seconds)
        if ack.here is not None:
            self.coordinates.learn(target, ack.here, seconds)

    def take_late(self, now: float, target: PeerId, seconds: float) -> None:
        """Record that an answer of `target` took `seconds`, perhaps longer than its probe lasted."""
        if self._table.is_live(target):
            self._table.trips.learn(now, target, seconds)

    def judge(self, now: float, sender: PeerId, probe: Probe) -> MemberDegraded | MemberRecovered | None:
        """Record that the first ping of a probe was answered, by its target or by a relay. Return an event if
        the target becomes, or is no longer, marked as degraded."""
        answer = ProbeAnswer.IN_TIME
        if sender != probe.target:
            answer = ProbeAnswer.RELAYED
        elif now - probe.sent_at >= self._settings.probe_timeout_seconds:
            answer = ProbeAnswer.LATE  # even if this target may take that long
        punctuality = self._table.punctuality
        if answer is ProbeAnswer.IN_TIME and not len(punctuality):
            return None
        return punctuality.note(probe.target, answer, now - probe.sent_at)
