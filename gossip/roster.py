"""The participants of a named averaging run, and the progress of each: a sans-IO core.

Each participant reports to all others once a second, and immediately when it has something new. A newcomer
greets peers that may take part (members of the swarm, publishers of a DHT record); a participant answers with
its own report and the names of others. No peer keeps the list for the rest, and the list needs no agreement:
it shows which peers to ask into a group, and how full a global batch is. The counts in a report are its
author's claims, which `gossip.claims` bounds.

If more peers take part than a peer keeps, its list is incomplete. In that case it keeps those whose hashes
are nearest to its own, names to others the peers nearest to them (as in Kademlia), and estimates the total
from the distances. A network that crowds such a list loses participants first. Groups then form by
declarations in the DHT (`node.averaging.participation`).

In a closed run, a peer that is not admitted gets only a greeting, neither reports nor names, and its own
messages are ignored.

Not here: agreement on a group (`gossip.matchmaking`), and liveness in the swarm (`gossip.swim`), which
reports dead peers by `lost`.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from math import inf
from random import Random
from typing import Annotated, assert_never

import msgspec
from blake3 import blake3

from crypto.errors import RemoteProtocolError
from crypto.identity import PEER_ID_BYTES, PeerId
from gossip.claims import ClaimedCount, Count

PROTOCOL = "/peerloom/roster/1"
MESSAGE_BYTES_MAX = 1_232
PARTICIPANTS_MAX = 1_024
"""Maximum number of participants of one run that a peer keeps: more than it averages with in a day of small
groups."""
NAMES_MAX = 24
"""Maximum number of peers named in one answer, which must fit into a datagram."""
CANDIDATES_MAX = 2_048
CLAIMANTS_MAX = 64
"""Maximum number of peers that claim to take part in a closed run without being admitted. Each is asked for
its tickets at its first message, and greeted again once it is admitted."""
GREETED_AT_ONCE = 32
"""Maximum number of candidates greeted in one interval; the rest wait for the next intervals."""
GREETINGS = 3
"""How often a silent candidate is greeted before it is forgotten, because a datagram may be lost."""
INTERVAL_SECONDS = 1.0
PEERS_PER_SECOND = 64
"""Maximum number of reports that a peer sends per second. With more participants the interval grows."""
SOON_SECONDS = 0.05
"""Minimum time between two reports, no matter what has changed."""
DISTANCE_BITS = 64
"""The length of the hashes that define how near participants are to each other."""
NETWORK_MIN = 16
"""Number of participants of one network that always stay in a full list. Beyond that, the largest network
loses participants first, however near their ids are, because ids cost nothing but addresses do."""
WHOLE_SHARE = 0.75
"""A list that was full counts as whole again once it is at most this full."""
SILENT_SECONDS = 8.0
"""A participant that is silent for this long, or for eight intervals, counts as gone."""

Subject = Annotated[bytes, msgspec.Meta(min_length=PEER_ID_BYTES, max_length=PEER_ID_BYTES)]
Hash = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
Settings = Annotated[bytes, msgspec.Meta(max_length=16)]
Number = Annotated[int, msgspec.Meta(ge=0, lt=2**48)]
"""The number of a report. Numbers start at the wall clock in milliseconds; the limit is enough for 6,900
years."""


class Report(msgspec.Struct, frozen=True, array_like=True, tag="report"):
    """One participant's own report.

    `signature` is the hash of the averaged tensors, `claimed_step` the global step, `claimed_samples` the
    samples gathered for the next step, `claimed_rounds` the number of averaged rounds. `lineage` is a hash
    over the history of the state: peers at the same step with different lineages have drifted apart.
    `has_state`: others may fetch it. `number` counts the author's reports, so that a late one changes
    nothing. `asks` requests the receiver's report, and names. `settings` are short hashes of the
    hyperparameters of that step, for people; empty if peers may differ.
    """

    run: Hash
    signature: Hash
    number: Number
    claimed_step: Count
    claimed_samples: Count
    claimed_rounds: Count
    lineage: Hash
    has_state: bool = False
    asks: bool = False
    settings: Settings = b""

    @property
    def step(self) -> ClaimedCount:
        """The global step that the author claims."""
        return ClaimedCount(self.claimed_step)

    @property
    def samples(self) -> ClaimedCount:
        """The samples that the author claims to have gathered for the next step."""
        return ClaimedCount(self.claimed_samples)

    @property
    def rounds(self) -> ClaimedCount:
        """The number of rounds that the author claims to have averaged."""
        return ClaimedCount(self.claimed_rounds)


class Names(msgspec.Struct, frozen=True, array_like=True, tag="names"):
    """Names of other participants."""

    run: Hash
    peers: Annotated[tuple[Subject, ...], msgspec.Meta(max_length=NAMES_MAX)]


class Leave(msgspec.Struct, frozen=True, array_like=True, tag="leave"):
    """The sender leaves the run."""

    run: Hash


Message = Report | Names | Leave
NetworkOf = Callable[[PeerId], bytes | None]
Sends = list[tuple[PeerId, Message]]


@dataclass(frozen=True)
class Entered:
    """A peer takes part in a run."""

    run: bytes
    peer: PeerId


@dataclass(frozen=True)
class Left:
    """A peer was removed; `reason` is for people. If it `is_far`, it still takes part, but nearer peers are
    kept in its place."""

    run: bytes
    peer: PeerId
    reason: str
    is_far: bool = False


Event = Entered | Left


@dataclass
class _Participant:
    report: Report
    heard_at: float
    distance: int
    """The distance from this peer, by hash."""
    network: bytes | None
    """The network from which the peer sends; None if the peer counts alone."""


class Roster:
    """One run, as one participant sees it."""

    def __init__(
        self,
        me: PeerId,
        run: bytes,
        signature: bytes,
        rng: Random,
        now: float,
        number: int,
        admits: Callable[[PeerId], bool] | None = None,
        participants_max: int = PARTICIPANTS_MAX,
        network_of: NetworkOf = lambda _peer: None,
    ) -> None:
        """`number` must be above that of any report before a restart, such as the wall clock in milliseconds.
        In a closed run `admits` decides which peers may take part. `network_of` returns the network from
        which a peer sends; None if the peer counts alone."""
        self._admits = admits
        self._network_of = network_of
        self._networks: Counter[bytes | None] = Counter()
        self._participants_max = participants_max
        self._place = _place(run, me)
        self._is_crowded = False
        self.run = run
        self.signature = signature
        self._me = me
        self._rng = rng
        self._peers: dict[PeerId, _Participant] = {}
        self._candidates: dict[PeerId, int] = {}
        self._number = number
        self._own = Report(run, signature, number, 0, 0, 0, bytes(32))
        self._told_at = -inf
        self._tell_at = now
        self._greet_at = inf
        self.events: list[Event] = []

    @property
    def reports(self) -> Mapping[PeerId, Report]:
        """The latest report of each other participant that averages the same tensors and is admitted."""
        return {peer: report for peer, report in self.claims.items() if self.admits(peer)}

    @property
    def claims(self) -> Mapping[PeerId, Report]:
        """The latest report of each other peer that averages the same tensors, admitted or not."""
        return {
            p: known.report for p, known in self._peers.items() if known.report.signature == self.signature
        }

    @property
    def is_whole(self) -> bool:
        """Whether all known participants fit into the list."""
        return not self._is_crowded

    @property
    def count(self) -> int:
        """The number of participants, including this peer: counted if the list is whole, otherwise estimated
        from the distances in it."""
        counted = len(self._admitted) + 1
        if not self._is_crowded or not self._peers:
            return counted
        reach = max(known.distance for known in self._peers.values()) + 1
        return max(counted, len(self._peers) * (1 << DISTANCE_BITS) // reach)

    def admits(self, peer: PeerId) -> bool:
        """Return whether a peer may take part."""
        return self._admits is None or self._admits(peer)

    @property
    def _admitted(self) -> Collection[PeerId]:
        return self._peers.keys() if self._admits is None else [p for p in self._peers if self._admits(p)]

    def admitted(self, now: float, peer: PeerId) -> Sends:
        """Greet a peer that was just admitted: send it this peer's report, and ask for its own."""
        if peer not in self._peers:
            return self.introduce(now, [peer])
        return [(peer, self._next_report(asks=True))]

    def expel(self, peer: PeerId, reason: str) -> Sends:
        """Remove a peer that is no longer admitted."""
        self._forget(peer, reason)
        return []

    def takes_part(self, peer: PeerId) -> bool:
        """Return whether a peer is listed with the same tensors, and admitted."""
        return self.lists(peer) and self.admits(peer)

    def lists(self, peer: PeerId) -> bool:
        """Return whether a peer is among `claims`."""
        known = self._peers.get(peer)
        return known is not None and known.report.signature == self.signature

    @property
    def strangers(self) -> int:
        """The number of participants under this run's name that average different tensors."""
        return len(self._peers) - len(self.claims)

    @property
    def stranger_signatures(self) -> list[bytes]:
        """Return the signatures of the tensors that those participants average."""
        signatures = (known.report.signature for known in self._peers.values())
        return [signature for signature in signatures if signature != self.signature]

    @property
    def own(self) -> Report:
        """This peer's own report."""
        return self._own

    @property
    def own_step(self) -> int:
        """The global step of this peer."""
        return self._own.claimed_step

    @property
    def deadline(self) -> float:
        return min(self._tell_at, self._greet_at, self._expires_at)

    @property
    def _expires_at(self) -> float:
        return min((known.heard_at for known in self._peers.values()), default=inf) + self._silence_seconds

    @property
    def _interval_seconds(self) -> float:
        return max(INTERVAL_SECONDS, len(self._peers) / PEERS_PER_SECOND)

    @property
    def _silence_seconds(self) -> float:
        return max(SILENT_SECONDS, 8 * self._interval_seconds)

    def tell(
        self,
        now: float,
        *,
        step: int,
        samples: int,
        rounds: int,
        lineage: bytes,
        has_state: bool,
        settings: bytes = b"",
    ) -> Sends:
        """Update this peer's report. Changes that others may be waiting for are sent immediately, the rest
        with the next report."""
        before = self._own
        self._own = msgspec.structs.replace(
            before,
            claimed_step=step,
            claimed_samples=samples,
            claimed_rounds=rounds,
            lineage=lineage,
            has_state=has_state,
            settings=settings,
        )
        if self._own != before:
            self._tell_at = min(self._tell_at, max(now, self._told_at + SOON_SECONDS))
        return self.wake(now)

    def introduce(self, now: float, peers: Iterable[PeerId]) -> Sends:
        """Greet these peers, which may take part. Known peers are skipped."""
        for peer in peers:
            if peer == self._me or peer in self._peers or len(self._candidates) >= CANDIDATES_MAX:
                continue
            if not self._is_crowded or self._is_near(peer):
                self._candidates.setdefault(peer, 0)
        if self._candidates:
            self._greet_at = min(self._greet_at, now)
        return self.wake(now)

    def receive(self, now: float, sender: PeerId, message: Message) -> Sends:
        """Handle one message. Raises RemoteProtocolError if it belongs to a different run."""
        if message.run != self.run:
            raise RemoteProtocolError("a message of a different run")
        match message:
            case Report():
                return self._heard(now, sender, message)
            case Names(peers=peers):
                if sender in self._peers and self.admits(sender):  # only participants may name others
                    return self.introduce(now, (PeerId(peer) for peer in peers))
                return []
            case Leave():
                self._forget(sender, "left")
                return []
            case _:
                assert_never(message)

    def lost(self, peer: PeerId) -> None:
        """Remove a peer that membership reports as dead."""
        self._forget(peer, "lost")
        self._candidates.pop(peer, None)

    def leave(self) -> Sends:
        """Announce to all that this peer leaves the run."""
        return [(peer, Leave(self.run)) for peer in self._admitted]

    def wake(self, now: float) -> Sends:
        """Send reports and greetings, and remove silent peers, as due."""
        sends: Sends = []
        if now >= self._expires_at:
            silence = self._silence_seconds
            for peer in [p for p, known in self._peers.items() if known.heard_at + silence <= now]:
                self._forget(peer, "silent")
        if now >= self._tell_at:
            report = self._next_report()
            # One of them is asked for names, so that two peers that missed each other meet in the end.
            told = list(self._admitted)
            asked = {self._rng.choice(told)} if told else set()
            # Peers that have been silent for a while are asked too, because they may not list this peer.
            quiet = now - self._silence_seconds / 2
            asked |= {peer for peer, known in self._peers.items() if known.heard_at < quiet}
            asking = msgspec.structs.replace(report, asks=True)
            sends += [(peer, asking if peer in asked else report) for peer in told]
            self._told_at = now
            self._tell_at = now + self._interval_seconds
        if now >= self._greet_at:
            sends += self._greet(now)
        return sends

    def _next_report(self, *, asks: bool = False) -> Report:
        self._number += 1
        self._own = msgspec.structs.replace(self._own, number=self._number)
        return msgspec.structs.replace(self._own, asks=asks)

    def _greet(self, now: float) -> Sends:
        greeting = self._next_report(asks=True)
        chosen = list(self._candidates)[:GREETED_AT_ONCE]
        for peer in chosen:
            times = self._candidates.pop(peer) + 1
            if times < GREETINGS:
                self._candidates[peer] = times
        self._greet_at = now + INTERVAL_SECONDS if self._candidates else inf
        return [(peer, greeting) for peer in chosen]

    def _heard(self, now: float, sender: PeerId, report: Report) -> Sends:
        known = self._peers.get(sender)
        if known is not None:
            known.heard_at = now
            if report.number > known.report.number:
                known.report = report
        elif len(self._peers) >= self._participants_max and not self._make_room(sender):
            # The sender may list this peer. It gets the names of nearer ones.
            is_asked = report.asks and self.admits(sender)
            return [(sender, self._next_report()), *self._names(sender)] if is_asked else []
        else:
            self._limit_claimants(sender)
            network = self._network_of(sender)
            self._peers[sender] = _Participant(report, now, self._distance(sender), network)
            self._networks[network] += 1
            self._candidates.pop(sender, None)
            self.events.append(Entered(self.run, sender))
        sends: Sends = []
        if not self.admits(sender):
            return []
        if report.asks:
            sends += [(sender, self._next_report()), *self._names(sender)]
        elif known is None:
            sends.append((sender, self._next_report()))
        return sends

    def _names(self, asker: PeerId) -> Sends:
        """Name other participants to `asker`: any, or the nearest to it if the list is not whole."""
        others = [peer for peer in self._admitted if peer != asker]
        if not others:
            return []
        if self._is_crowded:
            place = _place(self.run, asker)
            own = self._place
            named = sorted(others, key=lambda peer: self._peers[peer].distance ^ own ^ place)[:NAMES_MAX]
        else:
            named = others if len(others) <= NAMES_MAX else self._rng.sample(others, NAMES_MAX)
        return [(asker, Names(self.run, tuple(named)))]

    def _make_room(self, newcomer: PeerId) -> bool:
        """Remove a peer that is not admitted, if there is one. Otherwise remove the peer that `_loser`
        chooses. Return whether there is room."""
        found = next((peer for peer in self._peers if not self.admits(peer)), None)
        if found is not None:
            self._forget(found, "not admitted")
            return True
        if not self.admits(newcomer):
            return False
        self._is_crowded = True
        loser = self._loser(newcomer)
        if loser is None:
            return False
        self._remove(loser)
        self.events.append(Left(self.run, loser, "others are kept", is_far=True))
        return True

    def _limit_claimants(self, newcomer: PeerId) -> None:
        """Remove the oldest claimant that is not admitted, if there are too many."""
        if self._admits is None or self.admits(newcomer):
            return
        claimants = [peer for peer in self._peers if not self.admits(peer)]
        if len(claimants) >= CLAIMANTS_MAX:
            self._forget(claimants[0], "not admitted")

    def _is_near(self, peer: PeerId) -> bool:
        """Return whether a peer is near enough for a list that is not whole."""
        return len(self._peers) < self._participants_max or self._loser(peer) is not None

    def _loser(self, newcomer: PeerId) -> PeerId | None:
        """Return the peer that a newcomer replaces in a full list; None if the newcomer stays out."""
        network, is_nearer = self._network_of(newcomer), False
        size = self._networks[network] + 1 if network is not None else 1
        sizes = ((count, each) for each, count in self._networks.items() if each is not None)
        largest, crowding = max(sizes, default=(0, b""))
        if largest > max(NETWORK_MIN, size):
            rivals = [peer for peer, known in self._peers.items() if known.network == crowding]
        elif size > NETWORK_MIN:
            rivals = [peer for peer, known in self._peers.items() if known.network == network]
            is_nearer = True
        else:
            rivals, is_nearer = list(self._peers), True
        farthest = max(rivals, key=lambda peer: self._peers[peer].distance)
        if is_nearer and self._distance(newcomer) >= self._peers[farthest].distance:
            return None
        return farthest

    def _remove(self, peer: PeerId) -> bool:
        known = self._peers.pop(peer, None)
        if known is None:
            return False
        self._networks[known.network] -= 1
        if not self._networks[known.network]:
            del self._networks[known.network]
        return True

    def _distance(self, peer: PeerId) -> int:
        return self._place ^ _place(self.run, peer)

    def _forget(self, peer: PeerId, reason: str) -> None:
        if self._remove(peer):
            self.events.append(Left(self.run, peer, reason))
            if len(self._peers) <= WHOLE_SHARE * self._participants_max:
                self._is_crowded = False


def _place(run: bytes, peer: PeerId) -> int:
    """Return the position of a peer, by hash, among the participants of a run."""
    return int.from_bytes(blake3(run + peer).digest()[: DISTANCE_BITS // 8], "big")
