"""SWIM membership with Lifeguard, as a sans-IO core: messages and timers in, messages and events out.

Papers: Das, Gupta and Motivala 2002 (SWIM); Dadgar, Phillips and Currey 2018 (Lifeguard). The separate gossip
timer, the push-pull sync and the default values come from memberlist. `gossip.state_table` defines what facts
mean, `gossip.settings` the values.

Each probe interval one member is pinged. All members are pinged in turn, in a new random order each round. A
member that does not answer is pinged again directly, over a stream (as in memberlist, for networks that pass
no datagrams), and through relays. If all of these fail the member is suspected, and gossip spreads the
suspicion to peers whose probes fail too. A suspect that answers, or refutes with a higher incarnation, is
alive; otherwise it is declared dead. An unknown peer or a dead member that sends something is asked for its
facts. An unknown peer that others name is pinged before it is listed (`gossip.candidates`).

With `place`, a function from peers to the key space, the core lists only the neighbourhood of its own key, as
in a public swarm. In that case it answers probes from outside, but passes on only facts from inside.

Not here: admission (the swarm key belongs to the network, tickets to the run), and the comparison and
exchange of lists (`gossip.push_pull`).
"""

from collections.abc import Sequence
from random import Random

from crypto.errors import LocalProtocolError, RemoteProtocolError
from crypto.facts import Fact, Signer
from crypto.identity import PeerId
from gossip.answers import AnswerMeasures
from gossip.broadcasts import TOPICS_MAX
from gossip.clocks import PEERS_KEPT_MAX as CLOCKS_KEPT_MAX
from gossip.gossip_rounds import GossipRounds
from gossip.hints import HINTS_MAX
from gossip.intake import JOBS_MAX, SLICE_PAUSE_SECONDS
from gossip.member import Event, Profile, Status, SwarmMember
from gossip.messages import (
    INSTANCE_BYTES,
    Ack,
    Compare,
    Message,
    Nack,
    Ping,
    PingRequest,
    ScopedCompare,
    ScopedSync,
    StreamPing,
    Sync,
    life_of,
)
from gossip.prober import Prober
from gossip.probes import OVERDUE_MAX, RELAYS_MAX
from gossip.push_pull import Exchange
from gossip.push_pull import Sends as Sends
from gossip.settings import SwimSettings
from gossip.shares import HostOf
from gossip.state_table import MembershipState
from gossip.stream_answers import ASKERS_MAX, StreamAnswers
from gossip.view import Place, Scope

PROTOCOL = "/peerloom/swim/1"

_SYNCS = (Sync, ScopedSync)
_COMPARISONS = (Compare, ScopedCompare)


class Swim:
    """One peer's membership core. `receive`, `wake`, `deadline` and `events` work as in every core; messages
    that other methods return must be sent too.

    `incarnation` must be higher than before any restart of this peer id (Unix milliseconds are). If it is
    not, the core rises above the old one once it learns of it. With the random bytes `instance`, the first
    incarnation names this start of the process, so that two processes with one key notice (`RivalFound`).
    """

    __slots__ = (
        "_beliefs", "_broadcast_at", "_candidates", "_exchange", "_flight", "_gossip", "_left", "_measures",
        "_prober", "_settings", "_slice_at", "_stream_answers", "_table", "_tick_at", "clocks", "coordinates",
        "deadline", "events", "peer", "punctuality", "scope", "wall_offset",
    )  # fmt: skip

    def __init__(
        self,
        signer: Signer,
        profile: Profile,
        settings: SwimSettings,
        rng: Random,
        incarnation: int,
        now: float,
        *,
        place: Place | None = None,
        instance: bytes = bytes(INSTANCE_BYTES),
    ) -> None:
        self.events: list[Event] = []
        self.peer = signer.peer
        self._settings = settings
        self.scope = Scope(
            signer.peer,
            place,
            members_min=settings.scope_members_min,
            members_max=settings.scope_members_max,
        )
        self._beliefs = MembershipState(
            signer,
            profile,
            settings,
            rng,
            incarnation,
            now,
            self.events,
            self.scope,
            life_of(incarnation, instance),
        )
        self._table = self._beliefs.table
        self._candidates = self._beliefs.candidates
        self._measures = AnswerMeasures(self._table, settings, rng)
        self.coordinates, self.clocks = self._measures.coordinates, self._measures.clocks
        self.wall_offset: float | None = None
        """How far this machine's wall clock is ahead of `now`, set by the driver of this core. None: acks
        carry no time."""
        self.punctuality = self._table.punctuality
        self._prober = Prober(self._beliefs, self._measures, settings, self.events, rng.getrandbits(31))
        self._flight = self._prober.flight
        self._stream_answers = StreamAnswers(self._table.is_live, settings.probe_interval_seconds)
        # Random phases, so that peers started together do not probe and sync in step.
        self._tick_at = now + rng.random() * settings.probe_interval_seconds
        sync_at = now + (0.5 + rng.random()) * settings.sync_interval_seconds
        self._exchange = Exchange(self._beliefs, self.scope, settings, rng, self.events, sync_at)
        self._gossip = GossipRounds(self._beliefs, settings)
        self._broadcast_at = float("inf")
        self._slice_at = 0.0
        self._left = False
        self.deadline = 0.0
        """The time of the next `wake`, in monotonic seconds; inf for never."""
        self._plan()

    @property
    def members(self) -> tuple[SwarmMember, ...]:
        """All listed members by peer id, including this peer and the members that are dead or have left."""
        return self._table.snapshot()

    @property
    def statuses(self) -> dict[PeerId, Status]:
        """The status of every listed member, including this peer: a hundred times cheaper than `members`."""
        return {row.peer: row.status for row in self._table.rows.values()}

    def member(self, peer: PeerId) -> SwarmMember | None:
        """Return the listed member; None if it is not listed."""
        row = self._table.rows.get(peer)
        return None if row is None else row.snapshot()

    def status(self, peer: PeerId) -> Status | None:
        """Return only the status of a member."""
        row = self._table.rows.get(peer)
        return None if row is None else row.status

    @property
    def live(self) -> int:
        """The number of members listed as live, including this peer."""
        return self._table.live

    @property
    def sizes(self) -> dict[str, tuple[int, int]]:
        """The tables that other peers can make grow: the size and limit of each."""
        most = self._settings.members_max
        return {
            "members": (len(self._table.rows), most),
            "news": (len(self._beliefs.queue), most * (2 + self._settings.confirmations + TOPICS_MAX)),
            "candidates": (len(self._candidates), most),
            "intake": (len(self._beliefs.intake), JOBS_MAX),
            "hints": (len(self._beliefs.hints), HINTS_MAX),
            "relays": (len(self._flight.relays), RELAYS_MAX),
            "marks": (len(self.punctuality), most),
            "clocks": (len(self.clocks), CLOCKS_KEPT_MAX),
            "slow members": (len(self._table.trips), most),
            "stream askers": (len(self._stream_answers), ASKERS_MAX),
            "overdue pings": (len(self._flight.overdue), OVERDUE_MAX),
            "broadcasters": (len(self._beliefs.broadcasts), most),
        }

    # Calls of this node

    def join(self, now: float, peers: Sequence[PeerId]) -> Sends:
        """Exchange lists with `peers` (at most 16). Retry, at growing intervals, until one answers."""
        self._refuse_if_left("join")
        sends = self._exchange.join(now, peers)
        self._plan()
        return sends

    def acquaint(self, now: float, teller: PeerId, facts: Sequence[Fact]) -> None:
        """List the subjects of these facts immediately, as if `teller` had named them, because local code
        knows that they exist. Raises RemoteProtocolError."""
        self._beliefs.acquaint(now, teller, facts)
        self._exchange.narrow_if_crowded(now)
        self._plan()

    def update(self, now: float, profile: Profile) -> Sends:
        """Announce a new name, new addresses or new metadata."""
        self._refuse_if_left("update")
        self._beliefs.announce(profile)
        self._gossip.arm(now)
        self._plan()
        return []

    def meet_life(self, now: float, life: bytes, incarnation: int) -> Sends:
        """Handle local code's report that a different life of this key runs, with its incarnation. The elder
        announces itself with a higher incarnation; the younger stops announcing itself."""
        self._refuse_if_left("meet_life")
        self._beliefs.lives.meet(now, life, incarnation)
        self._gossip.arm(now)
        self._plan()
        return []

    def broadcast(self, now: float, topic: bytes, data: bytes) -> Sends:
        """Broadcast data to all members, in place of the previous one with this topic (`gossip.broadcasts`).

        Raises LocalProtocolError: the topic or the data is too long, or too many topics are queued.
        """
        self._refuse_if_left("broadcast")
        self._beliefs.broadcast(now, topic, data)
        self._gossip.arm(now)
        self._broadcast_at = self._beliefs.broadcasts.due(now)
        self._plan()
        return []

    def leave(self, now: float) -> Sends:
        """Announce this peer's departure to as many members as receive a fact. Drive the core a moment
        longer, so that gossip reaches the others; from now on it only answers pings."""
        if self._left:
            return []
        fact = self._beliefs.leave(now)
        self._left = True
        self._flight.clear()
        self._candidates.clear()
        self._beliefs.intake.clear()
        self._tick_at = self._exchange.due = self._broadcast_at = float("inf")
        self._gossip.arm(now)
        self._plan()
        return self._gossip.say_goodbye(fact)

    def hint_suspect(self, now: float, peer: PeerId) -> Sends:
        """Probe `peer` immediately, for example because a stream to it broke. A hint is not a verdict."""
        row = self._table.rows.get(peer)
        if self._left or row is None or not row.live or peer == self.peer or self._flight.probing(peer):
            return []
        sends = self._prober.probe(now, row)
        self._plan()
        return sends

    def locate(self, host_of: HostOf) -> None:
        """Set the function that returns the source host of a peer's packets."""
        self._beliefs.shares.host_of = self._measures.host_of = host_of

    def hint_closed(self, now: float, peer: PeerId) -> None:
        """Record that the process of `peer` is gone, as its host reports: a suspicion may end soon."""
        if not self._left:
            self._beliefs.close(now, peer)
            self._plan()

    # Messages of others

    def receive(self, now: float, sender: PeerId, message: Message) -> Sends:
        """Handle one message. Raises RemoteProtocolError for a message that no correct peer sends."""
        if sender == self.peer:
            raise RemoteProtocolError("a membership message from ourselves")
        if not self.scope.may_list(sender):
            raise RemoteProtocolError("a member without the swarm's proof of work")
        if self._left:
            if isinstance(message, Ping | StreamPing):
                ack = Ack(message.number, self._beliefs.facts_for(sender))
                return [(sender, self._stream_answers.choose(now, sender, message, ack))]
            return []
        if not (self._beliefs.queue.waits or self._beliefs.displaced.waits or self._candidates.rows):
            # The most common case by far: neither side has news.
            if type(message) is Ping and not message.facts:
                self._beliefs.misled = None
                row = self._table.rows.get(sender)
                if row is not None and row.verdict is None:  # otherwise it must receive facts or be asked
                    return [(sender, Ack(message.number, (), self.coordinates.here, self._wall(now)))]
                return self._answer(now, sender, message)  # nothing becomes due by this
            if type(message) is Ack and not message.facts:
                self._beliefs.misled = None
                sends = self._prober.take_ack(now, sender, message)
                self._plan()
                return sends
        try:
            return self._take(now, sender, message)
        finally:
            self._plan()

    def _take(self, now: float, sender: PeerId, message: Message) -> Sends:
        if sender in self._candidates.rows:
            self._beliefs.admit(now, sender)
        if isinstance(message, _SYNCS):
            self._exchange.check_scope(message)
            was_idle = not self._beliefs.intake
            sends = self._exchange.receive_sync(now, sender, message)
            if was_idle and self._beliefs.intake:
                self._slice_at = now + SLICE_PAUSE_SECONDS
        else:
            if isinstance(message, _COMPARISONS):
                self._exchange.check_scope(message)
            self._beliefs.learn(now, sender, message.facts)
            sends = self._answer(now, sender, message)
        if message.facts or self._candidates.rows:
            self._exchange.narrow_if_crowded(now)
        return sends + self._probe_told(now)

    def _answer(self, now: float, sender: PeerId, message: Message) -> Sends:
        match message:
            case Ping() | StreamPing():
                facts = self._beliefs.facts_for(sender)
                ack = Ack(message.number, facts, self.coordinates.here, self._wall(now))
                answer: Sends = [(sender, self._stream_answers.choose(now, sender, message, ack))]
                return answer if self._table.is_live(sender) else answer + self._greet(now, sender)
            case Ack():
                return self._prober.take_ack(now, sender, message)
            case PingRequest():
                # We do not ping for peers that are not members, but such a peer may list us nevertheless.
                is_known = self._table.is_live(sender) or not self.scope.holds(sender)
                relayed = self._prober.relay(now, sender, message) if is_known else []
                return relayed or self._greet(now, sender)
            case Compare() | ScopedCompare():
                return self._exchange.receive_compare(sender, message)
            case Nack():
                self._prober.take_nack(sender, message)
        return []

    def _greet(self, now: float, sender: PeerId) -> Sends:
        """Greet a peer that is not listed as alive and has asked something."""
        if self._table.status(sender) is Status.DEAD:
            return self._prober.probe_dead(now, 1, sender)
        return self._exchange.greet(sender)

    def _wall(self, now: float) -> int | None:
        """Return this machine's wall clock, in Unix milliseconds."""
        return None if self.wall_offset is None else max(0, int((now + self.wall_offset) * 1000))

    # Timers

    def wake(self, now: float) -> Sends:
        """Do everything that has become due."""
        late = now - self.deadline
        if late > self._settings.stall_seconds:
            # We stalled ourselves: answers may be unread, so no member is at fault for that time.
            self._beliefs.excuse(late)
            self._flight.excuse(late)
        sends: Sends = []
        flight = self._flight
        if (flight.probes or flight.relays) and flight.deadline <= now:
            sends = self._prober.wake(now)
        if self._beliefs.suspicion_deadline <= now:
            for row, is_last in self._beliefs.bury_expired(now):
                sends += self._prober.probe(now, row, "suspect", relayed=not is_last)
        if self._tick_at <= now:
            sends += self._tick(now)
        if self._exchange.due <= now:
            sends += self._exchange.sync(now)
        if self._broadcast_at <= now:
            self._beliefs.tell_due(now)
            self._broadcast_at = self._beliefs.broadcasts.due(now)
        if self._beliefs.lives.again_at <= now:
            sends += self._exchange.announce_again(now)
        if self._gossip.due <= now:
            sends += self._gossip.send(now)
        if self._beliefs.intake.jobs and self._slice_at <= now:
            self._beliefs.learn_on(now)
            self._slice_at = now + SLICE_PAUSE_SECONDS
            self._exchange.narrow_if_crowded(now)
        sends += self._probe_told(now)
        self._plan()
        return sends

    def _probe_told(self, now: float) -> Sends:
        """Probe the members that others named: candidates and accused members."""
        sends = self._prober.probe_told(now)
        self._gossip.arm(now)
        return sends

    def _tick(self, now: float) -> Sends:
        self._tick_at = now + self._settings.probe_interval_seconds * self._beliefs.health.multiplier
        self._beliefs.refutations.next_interval()
        if self._beliefs.lives.is_silent:
            self._tick_at = self._exchange.due = float("inf")
            return []
        self._exchange.next_interval(now)
        told: Sends = [*self._beliefs.displaced.next_interval(now, self._table.rows)]
        if (accused := self._prober.probe_accused(now)) is not None:
            return [*accused, *told]
        return [*told, *self._prober.probe_next(now)]

    def _plan(self) -> None:
        """Compute the deadline after every call, because it is read far more often than it changes."""
        # Comparing one by one is several times faster than min() or a loop.
        due, exchange, beliefs, flight = self._tick_at, self._exchange, self._beliefs, self._flight
        if exchange.due < due:
            due = exchange.due
        if self._gossip.due < due:
            due = self._gossip.due
        if self._broadcast_at < due:
            due = self._broadcast_at
        if beliefs.suspicion_deadline < due:
            due = beliefs.suspicion_deadline
        if beliefs.lives.again_at < due:
            due = beliefs.lives.again_at
        if beliefs.intake.jobs and self._slice_at < due:
            due = self._slice_at
        if self._candidates.rows and self._candidates.is_due and self._prober.candidates_at < due:
            due = self._prober.candidates_at
        if (flight.probes or flight.relays) and (in_flight := flight.deadline) < due:
            due = in_flight
        self.deadline = due

    def _refuse_if_left(self, order: str) -> None:
        if self._left:
            raise LocalProtocolError(f"{order} after leave; create a new core to join again")
