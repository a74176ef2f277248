"""The probes of a membership core: direct pings, pings through relays, and pings over streams.

This follows SWIM section 3.1, with Lifeguard's Nacks: the course of one probe from its ping to its answer or
failure, and the choice of its target. `gossip.swim` decides when to probe.
"""

from crypto.identity import PeerId
from gossip.answers import AnswerMeasures
from gossip.candidates import PROBED_AT_ONCE_MAX
from gossip.intake import SLICE_PAUSE_SECONDS
from gossip.member import CandidateFound, Event, Status
from gossip.messages import Ack, ByStream, Gossip, Nack, Ping, PingRequest, StreamPing
from gossip.probes import RELAY_PATIENCE, InFlightProbes, Kind, Probe, Relay
from gossip.push_pull import Sends as Sends
from gossip.settings import SwimSettings
from gossip.state_table import MembershipState
from gossip.table import MemberRow

DEAD_PROBED = 4
"""Number of dead members to probe once one of them has answered."""
DEAD_PROBED_MAX = 32


class Prober:
    """The probes of one core. `beliefs` holds its members, `measures` evaluates their answers; `first_number`
    is random."""

    __slots__ = ("_beliefs", "_events", "_measures", "_settings", "_table", "candidates_at", "flight")

    def __init__(
        self,
        beliefs: MembershipState,
        measures: AnswerMeasures,
        settings: SwimSettings,
        events: list[Event],
        first_number: int,
    ) -> None:
        self._beliefs = beliefs
        self._measures = measures
        self._table = beliefs.table
        self._settings = settings
        self._events = events
        self.flight = InFlightProbes(first_number)
        self.candidates_at = 0.0
        """The time at which the next candidates may be probed."""

    def wake(self, now: float) -> Sends:
        """Do what is due: discard expired relayed pings, ask relays, and fail unanswered probes."""
        return self._wake_relays(now) + self._wake_probes(now)

    def relay(self, now: float, sender: PeerId, request: PingRequest) -> Sends:
        """Ping a member for another one, or report immediately that the member does not answer."""
        target = PeerId(request.target)
        if target == self._beliefs.peer or target not in self._table.rows:
            return []
        if not self._table.is_live(target):
            # The target is probably silent, so report that immediately: if a relay says nothing, its prober
            # doubts itself.
            return [(sender, Nack(request.number, self._beliefs.facts_for(sender)))]
        patience = RELAY_PATIENCE * self._settings.probe_timeout_seconds
        number = self.flight.add_relay(Relay(sender, request.number, target, now + patience))
        return [] if number is None else [(target, Ping(number, self._beliefs.facts_for(target)))]

    def take_ack(self, now: float, sender: PeerId, ack: Ack) -> Sends:
        """Handle an answer to a probe, to a further ping of it, or to a relayed ping."""
        number = ack.number
        copy = self.flight.copies.get(number)
        if copy is not None:
            number = copy.number
        probe = self.flight.probes.get(number)
        if probe is not None and (sender == probe.target or sender in probe.relays):
            self.flight.take(number)
            if sender == probe.target:
                self._measures.take(now, ack, probe, copy)
            if probe.kind == "candidate":
                self._beliefs.admit(now, probe.target)
            elif probe.kind != "dead" and copy is None and not self._beliefs.health.score:
                marked = self._measures.judge(now, sender, probe)
                if marked is not None:
                    self._events.append(marked)
            self._beliefs.health.better()
            self._table.answered(probe.target)
            if probe.kind == "dead":
                self._beliefs.revive(now, probe.target)
                return self.probe_dead(now, DEAD_PROBED)
            if probe.kind == "hint" or probe.target in self._beliefs.suspicions:
                is_direct = sender == probe.target
                told = self._beliefs.clear(now, probe.target, is_direct=is_direct)
                return [(peer, Gossip((fact,))) for peer, fact in told]
        relays = self.flight.relays
        relay = relays.get(number) if relays else None
        if relay is not None and sender == relay.target:
            del self.flight.relays[number]
            return [(relay.requester, Ack(relay.number, self._beliefs.facts_for(relay.requester)))]
        return self._take_late(now, sender, number) if self.flight.overdue else []

    def _take_late(self, now: float, sender: PeerId, number: int) -> Sends:
        """Handle an answer to a failed probe: the member is alive, and the answer shows how far away it
        is."""
        late = self.flight.overdue.get(number)
        if late is None or late.target != sender:
            return []
        del self.flight.overdue[number]
        self._measures.take_late(now, sender, now - late.sent_at)
        if sender not in self._beliefs.suspicions:
            return []
        self._table.answered(sender)
        told = self._beliefs.clear(now, sender, is_direct=True)
        return [(peer, Gossip((fact,))) for peer, fact in told]

    def take_nack(self, sender: PeerId, nack: Nack) -> None:
        """Record a relay's report that it was reached itself, but could not reach the member."""
        probe = self.flight.probes.get(nack.number)
        if probe is not None and sender in probe.relays and sender not in probe.nacked:
            probe.nacked += (sender,)

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
                    # Ping directly once more: after a lost datagram, this peer need not rely on relays alone.
                    again = self.flight.add_copy(number, now)
                    sends.append((probe.target, Ping(again, facts)))
                # Some networks pass streams but no datagrams.
                again = self.flight.add_copy(number, now, by_stream=True)
                sends.append((probe.target, ByStream(StreamPing(again, facts))))
                for relay in probe.relays:
                    request = PingRequest(number, probe.target, self._beliefs.facts_for(relay))
                    sends.append((relay, request))
        return sends

    def _pick_relays(self, probe: Probe) -> tuple[PeerId, ...]:
        # If others have tried before, one more relay is enough.
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
            # A relay that sent a Nack proves that we are reachable. Relays that sent nothing are a reason to
            # doubt ourselves.
            self._beliefs.health.worsen(len(probe.relays) - len(probe.nacked) if probe.relays else 1)
        if row is not None:
            self._table.unanswered(probe.target, probe.sent_at)
        # If the incarnation has risen since the ping, the member is alive.
        if row is not None and row.live and row.incarnation == probe.incarnation:
            self._beliefs.accuse(now, row, sent_at=probe.sent_at)
        else:
            self._beliefs.hints.drop(probe.target)

    def probe_dead(self, now: float, count: int, peer: PeerId | None = None) -> Sends:
        """Probe some dead members, or `peer`, because the network may have healed. If one of them answers,
        others may too, so the next ones are probed faster."""
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
        """Ping a member. With `relayed`, do not ask relays if it does not answer."""
        peer = row.peer
        patience = self._beliefs.health.multiplier * self._table.trips.stretch(peer)
        end_seconds = self._settings.probe_interval_seconds * patience
        timeout_at = now + self._settings.probe_timeout_seconds * patience
        times = now, timeout_at, now + end_seconds, end_seconds
        probe = Probe(peer, row.incarnation, *times, relayed=relayed, kind=kind, is_in_turn=is_in_turn)
        number = self.flight.add_probe(probe)
        return [(peer, Ping(number, self._beliefs.facts_for(peer)))]

    def probe_next(self, now: float) -> Sends:
        """Probe the next member of the round, and a dead member."""
        row = self._table.next_target(self.flight.probing)
        sends = [] if row is None else self.probe(now, row, is_in_turn=True)
        return [*sends, *self.probe_dead(now, 1)]

    def probe_accused(self, now: float) -> Sends | None:
        """Probe the accused member that replaces the next one of the round, and a dead member. Return None if
        no member is accused."""
        accused = self._beliefs.hints.next_in_round(self._table.rows)
        if accused is None:
            return None
        return [*self.probe(now, accused, "hint"), *self.probe_dead(now, 1)]

    def probe_told(self, now: float) -> Sends:
        """Probe the members that others named: candidates and accused members."""
        sends: Sends = []
        if self._beliefs.candidates.rows and self.candidates_at <= now:
            sends = self._probe_candidates(now)
        if self._beliefs.hints.rows:
            sends += self._probe_hints(now)
        return sends

    def _probe_hints(self, now: float) -> Sends:
        """Probe accused members ourselves."""
        sends: Sends = []
        while (peer := self._beliefs.hints.next()) is not None:
            row = self._table.rows.get(peer)
            if row is None or not row.live:
                self._beliefs.hints.drop(peer)
            else:
                sends += self.probe(now, row, "hint")
        return sends

    def _probe_candidates(self, now: float) -> Sends:
        """Probe as many candidates as allowed. Each learns our identity from the probe, so it can list us
        without asking."""
        sends: Sends = []
        for _ in range(PROBED_AT_ONCE_MAX):
            candidate = self._beliefs.candidates.next()
            if candidate is None:
                return sends
            peer, said = candidate.peer, candidate.said
            if candidate.tries == 1:
                self._events.append(CandidateFound(peer, said.profile.addresses, candidate.introducer))
            timeout_seconds = self._settings.probe_timeout_seconds
            # Use relays only if the first try gets no answer: the introducer may have a path that we lack.
            is_direct = candidate.tries == 1
            end_seconds = timeout_seconds if is_direct else self._settings.probe_interval_seconds
            times = now, now + timeout_seconds, now + end_seconds, end_seconds
            probe = Probe(peer, said.incarnation, *times, relayed=is_direct, kind="candidate")
            sends.append((peer, Ping(self.flight.add_probe(probe), self._beliefs.me.facts)))
        self.candidates_at = now + SLICE_PAUSE_SECONDS
        return sends
