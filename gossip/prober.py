"""The pings of a membership core that look whether members live: direct ones, through relays, and by stream.

SWIM section 3.1, with Lifeguard's Nacks. Whom to probe in a round is `gossip.swim`'s to say; here is what one
probe takes from its ping to its failure, and which members that others speak of are probed.
"""

from crypto.identity import PeerId
from gossip.candidates import PROBED_AT_ONCE_MAX
from gossip.intake import SLICE_PAUSE_SECONDS
from gossip.member import CandidateFound, Event, Status
from gossip.messages import ByStream, Nack, Ping, PingRequest, StreamPing
from gossip.probes import RELAY_PATIENCE, InFlightProbes, Kind, Probe, Relay
from gossip.push_pull import Sends as Sends
from gossip.settings import SwimSettings
from gossip.state_table import MembershipState
from gossip.table import MemberRow

DEAD_PROBED_MAX = 32


class Prober:
    """The probes of one core. `beliefs` hold its members; `first_number` is drawn at random."""

    __slots__ = ("_beliefs", "_events", "_settings", "_table", "candidates_at", "flight")

    def __init__(
        self, beliefs: MembershipState, settings: SwimSettings, events: list[Event], first_number: int
    ) -> None:
        self._beliefs = beliefs
        self._table = beliefs.table
        self._settings = settings
        self._events = events
        self.flight = InFlightProbes(first_number)
        self.candidates_at = 0.0
        """When the next candidates may be probed."""

    def wake(self, now: float) -> Sends:
        """Give up relayed pings, ask relays, and take unanswered probes as failed, whatever is due."""
        return self._wake_relays(now) + self._wake_probes(now)

    def relay(self, now: float, sender: PeerId, request: PingRequest) -> Sends:
        """Ping a member for another one, or say at once that it does not answer."""
        target = PeerId(request.target)
        if target == self._beliefs.peer or target not in self._table.rows:
            return []
        if not self._table.is_live(target):
            # As good as silent, and said at once: a mute relay makes its prober doubt itself.
            return [(sender, Nack(request.number, self._beliefs.facts_for(sender)))]
        patience = RELAY_PATIENCE * self._settings.probe_timeout_seconds
        number = self.flight.add_relay(Relay(sender, request.number, target, now + patience))
        return [] if number is None else [(target, Ping(number, self._beliefs.facts_for(target)))]

    def _wake_relays(self, now: float) -> Sends:
        sends: Sends = []
        overdue = [number for number, relay in self.flight.relays.items() if relay.nack_at <= now]
        for number in overdue:
            relay = self.flight.relays.pop(number)
            sends.append((relay.requester, Nack(relay.number, self._beliefs.facts_for(relay.requester))))
        return sends

    def _wake_probes(self, now: float) -> Sends:
        sends: Sends = []
        for number, probe in list(self.flight.probes.items()):
            if probe.end_at <= now:
                self._fail(now, self.flight.fail(number))
            elif not probe.relayed and probe.timeout_at <= now:
                probe.relayed = True
                probe.relays = self._pick_relays(probe)
                facts = self._beliefs.facts_for(probe.target)
                if probe.kind != "candidate":
                    # Once more ourselves: what is lost on the way is no reason to ask others alone.
                    again = self.flight.add_copy(number, now)
                    sends.append((probe.target, Ping(again, facts)))
                # Some networks let no datagram through, and streams.
                again = self.flight.add_copy(number, now, by_stream=True)
                sends.append((probe.target, ByStream(StreamPing(again, facts))))
                for relay in probe.relays:
                    request = PingRequest(number, probe.target, self._beliefs.facts_for(relay))
                    sends.append((relay, request))
        return sends

    def _pick_relays(self, probe: Probe) -> tuple[PeerId, ...]:
        # Where others have tried before, one more is enough.
        count = self._settings.indirect_probes if probe.kind in ("round", "candidate") else 1
        return tuple(
            self._table.pick(count, lambda row: row.status is Status.ALIVE and row.peer != probe.target)
        )

    def _fail(self, now: float, probe: Probe) -> None:
        if probe.kind == "candidate":
            self._beliefs.candidates.retry(probe.target)
            return
        if probe.kind == "dead":
            return
        row = self._table.rows.get(probe.target)
        if probe.kind == "round":
            # Relays that said Nack prove that we are heard; mute ones are a reason to doubt ourselves.
            self._beliefs.health.worsen(len(probe.relays) - len(probe.nacked) if probe.relays else 1)
        if row is not None:
            self._table.unanswered(probe.target, probe.sent_at)
        # A higher incarnation since then is a sign of life.
        if row is not None and row.live and row.incarnation == probe.incarnation:
            self._beliefs.accuse(now, row, sent_at=probe.sent_at)
        else:
            self._beliefs.hints.drop(probe.target)

    def probe_dead(self, now: float, count: int, peer: PeerId | None = None) -> Sends:
        """Probe some members held for dead, or `peer`: the network may have healed. Where one answers others
        may, and so they are found ever faster."""
        sends: Sends = []
        in_flight = sum(probe.kind == "dead" for probe in self.flight.probes.values())
        for _ in range(min(count, DEAD_PROBED_MAX - in_flight)):
            row = self._table.next_dead() if peer is None else self._table.rows.get(peer)
            if row is None or self.flight.probing(row.peer):
                break
            sends += self.probe(now, row, "dead", relayed=True)
        return sends

    def probe(
        self,
        now: float,
        row: MemberRow,
        kind: Kind = "round",
        *,
        relayed: bool = False,
        is_in_turn: bool = False,
    ) -> Sends:
        """Ping a member; `relayed`: ask no relays if it does not answer."""
        peer = row.peer
        patience = self._beliefs.health.multiplier * self._table.trips.stretch(peer)
        end_seconds = self._settings.probe_interval_seconds * patience
        timeout_at = now + self._settings.probe_timeout_seconds * patience
        times = now, timeout_at, now + end_seconds, end_seconds
        probe = Probe(peer, row.incarnation, *times, relayed=relayed, kind=kind, is_in_turn=is_in_turn)
        number = self.flight.add_probe(probe)
        return [(peer, Ping(number, self._beliefs.facts_for(peer)))]

    def probe_hints(self, now: float) -> Sends:
        """Probe accused members ourselves."""
        sends: Sends = []
        while (peer := self._beliefs.hints.next()) is not None:
            row = self._table.rows.get(peer)
            if row is None or not row.live:
                self._beliefs.hints.drop(peer)
            else:
                sends += self.probe(now, row, "hint")
        return sends

    def probe_candidates(self, now: float) -> Sends:
        """Probe as many candidates as may be at once; each hears who asks, and so lists us without asking."""
        sends: Sends = []
        for _ in range(PROBED_AT_ONCE_MAX):
            candidate = self._beliefs.candidates.next()
            if candidate is None:
                return sends
            peer, said = candidate.peer, candidate.said
            if candidate.tries == 1:
                self._events.append(CandidateFound(peer, said.profile.addresses, candidate.introducer))
            timeout_seconds = self._settings.probe_timeout_seconds
            # Through relays only where it does not answer: its introducer may have a path that we lack.
            is_direct = candidate.tries == 1
            end_seconds = timeout_seconds if is_direct else self._settings.probe_interval_seconds
            times = now, now + timeout_seconds, now + end_seconds, end_seconds
            probe = Probe(peer, said.incarnation, *times, relayed=is_direct, kind="candidate")
            sends.append((peer, Ping(self.flight.add_probe(probe), self._beliefs.me.facts)))
        self.candidates_at = now + SLICE_PAUSE_SECONDS
        return sends
