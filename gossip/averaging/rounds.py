"""One round of averaging, as a sans-IO core: form a group, attempt, and attempt again without who failed.

A round ends with `Averaged` or `Failed`, always: after `attempts_max` attempts, or `form_seconds` without a
group. It has the shape of an attempt, and is driven like one.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import inf

from crypto.errors import RemoteProtocolError
from crypto.facts import Signer
from crypto.identity import PeerId
from gossip.averaging.attempt import Attempt
from gossip.averaging.codecs import Codec
from gossip.averaging.formation import Formation, Sends
from gossip.averaging.group import GROUP_MEMBERS_MAX, NONCE_BYTES, Group, Member, Terms
from gossip.averaging.messages import Finished, Join, Message, Roster
from gossip.averaging.outcome import Averaged, Failed, Reason
from gossip.averaging.pace import Pace
from gossip.averaging.reduction import Reduction, Vector, weighted_mean

_FOR_WANT_OF_TIME = (Reason.NO_HAVE_SETS, Reason.INCOMPLETE, Reason.TOO_FEW)


@dataclass(frozen=True)
class RoundSettings:
    """`window_seconds`: how long a group waits for members that are expected. `form_seconds`: how long to
    wait for a group at all. `attempts_max`: attempts in one round."""

    window_seconds: float = 1.0
    form_seconds: float = 20.0
    attempts_max: int = 5


class Round:
    """One peer's side of one round.

    `name` and `number` are the same for all that are to average with each other: for Moshpit they hold the
    group's key. `expected` are the other peers that should take part, as far as this peer knows; anybody
    whose messages the shell lets through may. `rate` is this peer's bandwidth in bytes a second, 0 to reduce
    nothing. `entropy(n)` gives n bytes that no other process draws. `vector` is None for a helper.
    `coordinate` is where this peer stands on the grid's axis, if there is a grid.
    """

    def __init__(
        self,
        signer: Signer,
        name: bytes,
        number: int,
        terms: Terms,
        vector: Vector | None,
        weight: float,
        rate: int,
        expected: Iterable[PeerId],
        entropy: Callable[[int], bytes],
        now: float,
        pace: Pace | None = None,
        settings: RoundSettings | None = None,
        reduction: Reduction = weighted_mean,
        codecs: Mapping[str, Codec] | None = None,
        coordinate: int = 0,
    ) -> None:
        self._signer = signer
        self._name = name
        self._number = number
        self._terms = terms
        self._vector = vector
        self._weight = weight
        self._rate = rate
        self._expected = dict.fromkeys(peer for peer in expected if peer != signer.peer)
        self._entropy = entropy
        self._pace = pace or Pace()
        self._settings = settings or RoundSettings()
        self._reduction = reduction
        self._codecs = codecs
        self._coordinate = coordinate
        self._size_bytes = terms.items * (8 if terms.dtype == "float64" else 4)
        self._demoted: dict[PeerId, None] = {}
        self._disagreed: dict[PeerId, None] = {}
        self._lost: dict[PeerId, None] = {}
        self._finished: dict[PeerId, None] = {}
        self._early: dict[PeerId, Join] = {}
        self._attempt: Attempt | None = None
        self._old: list[Attempt] = []
        self._attempted_at = now
        self._form_until = now + self._settings.form_seconds
        self._formation = self._form(0, now)
        self.result: Averaged | Failed | None = None
        self.failures: list[Failed] = []
        """What became of each attempt that failed here."""

    # What the shell asks.

    @property
    def attempt(self) -> Attempt | None:
        """The attempt that runs, or that succeeded."""
        return self._attempt

    @property
    def attempt_count(self) -> int:
        return self._formation.number + 1

    @property
    def deadline(self) -> float:
        times = [attempt.deadline for attempt in self._attempts()]
        if self.result is None and self._attempt is None:
            times += [self._formation.deadline, self._form_until]
        return min(times, default=inf)

    @property
    def ready(self) -> tuple[PeerId, ...]:
        """The peers for which `pull` has something."""
        peers = [peer for attempt in self._attempts() for peer in attempt.ready]
        return tuple(dict.fromkeys(peers))

    @property
    def awaited(self) -> tuple[PeerId, ...]:
        """The peers that this one waits for now."""
        if self.result is not None:
            return ()
        return self._formation.missing if self._attempt is None else self._attempt.awaited

    @property
    def refused(self) -> dict[PeerId, str]:
        """Peers that wanted to take part under other terms, with what differs."""
        return self._formation.refused

    @property
    def is_closed(self) -> bool:
        """Whether nobody can want anything of this round any more."""
        return self.result is not None and not self._attempts()

    # What the shell tells.

    def start(self, now: float) -> Sends:
        """Announce this peer."""
        return self._formation.wake(now) + self._advance(now)

    def receive(self, now: float, sender: PeerId, message: Message) -> Sends:
        """Take one message. Raises RemoteProtocolError for what no correct peer sends."""
        match message:
            case Join():
                sends = self._take_join(now, sender, message)
            case Roster(group=group):
                sends = self._take_roster(now, sender, group)
            case Finished():
                self._finished[sender] = None
                self._expected.pop(sender, None)
                sends = self._formation.remove(now, sender) if self._attempt is None else []
            case _:
                for attempt in self._attempts():
                    if attempt.id == message.attempt:
                        return self._moved(now, list(attempt.receive(now, sender, message)))
                return []
        return self._moved(now, sends)

    def pull(self, now: float, peer: PeerId) -> Sends:
        """The next chunk for this peer, and what else there is to say now."""
        for attempt in self._attempts():
            if peer in attempt.ready:
                return self._moved(now, list(attempt.pull(now, peer)))
        return []

    def lost(self, now: float, peer: PeerId) -> Sends:
        """This peer cannot be reached, or is dead."""
        self._expected.pop(peer, None)
        self._lost[peer] = None
        sends: Sends = []
        for attempt in self._attempts():
            if peer in attempt.group.peers:
                sends += attempt.lost(now, peer)
        if self._attempt is None:
            sends += self._formation.remove(now, peer)
        return self._moved(now, sends)

    def wake(self, now: float) -> Sends:
        """Do whatever the time asks for."""
        sends: Sends = []
        for attempt in self._attempts():
            sends += attempt.wake(now)
        if self.result is None and self._attempt is None:
            if now >= self._form_until or (not self._expected and len(self._formation.joined) < 2):
                self.result = Failed(Reason.FINISHED if self._finished else Reason.ALONE)
                return sends
            sends += self._formation.wake(now)
        return self._moved(now, sends)

    def cancel(self, now: float) -> Sends:
        """Take no further part."""
        sends: Sends = []
        for attempt in self._attempts():
            sends += attempt.cancel(now)
        self.result = self.result or Failed(Reason.CANCELLED)
        return sends

    # Within.

    def _attempts(self) -> list[Attempt]:
        attempts = self._old if self._attempt is None else [self._attempt, *self._old]
        return [attempt for attempt in attempts if not attempt.is_closed]

    def _form(self, number: int, now: float) -> Formation:
        nonce = self._entropy(NONCE_BYTES)
        member = Member(self._signer.peer, nonce, self._rate, self._vector is not None, self._coordinate)
        join = Join(self._name, self._number, number, member, self._terms)
        window = self._settings.window_seconds
        return Formation(self._signer.peer, join, self._expected, self._demoted, now, window)

    def _take_join(self, now: float, sender: PeerId, message: Join) -> Sends:
        if message.member.peer != sender:
            raise RemoteProtocolError("a peer joins for another")
        self._lost.pop(sender, None)
        if (message.name, message.round) != (self._name, self._number):
            raise RemoteProtocolError("a peer joins another round")
        if message.number >= self._settings.attempts_max:
            raise RemoteProtocolError(f"attempt {message.number} of a round")
        if self.result is not None:
            is_over = isinstance(self.result, Averaged)
            return [(sender, Finished(self._name, self._number))] if is_over else []
        if message.number > self._formation.number:
            if len(self._early) < GROUP_MEMBERS_MAX or sender in self._early:
                self._early[sender] = message
            # Whoever still forms follows those who have failed already; whoever attempts does so afterwards.
            return self._next(now, message.number) if self._attempt is None else []
        if message.number < self._formation.number:
            return self._formation.announce_to(sender) if self._attempt is None else []
        return self._formation.receive(now, sender, message)

    def _take_roster(self, now: float, sender: PeerId, group: Group) -> Sends:
        if group.number != self._formation.number or self.result is not None:
            return []
        if self._attempt is None:
            return self._formation.receive(now, sender, Roster(group))
        if group == self._attempt.group or sender not in self._attempt.group.peers:
            return []
        # It has accepted another roster, and takes no part in this attempt. The next brings all together.
        self._disagreed[sender] = None
        return list(self._attempt.lost(now, sender))

    def _next(self, now: float, number: int) -> Sends:
        self._formation = self._form(number, now)
        self._form_until = now + self._settings.form_seconds
        sends = self._formation.wake(now)
        early, self._early = self._early, {}
        for peer, join in early.items():
            if join.number == number:
                sends += self._formation.receive(now, peer, join)
            elif join.number > number:
                self._early[peer] = join
        return sends

    def _moved(self, now: float, sends: Sends) -> Sends:
        return sends + self._advance(now)

    def _advance(self, now: float) -> Sends:
        """Begin the attempt of a group that stands, and take note of one that is over."""
        sends: Sends = []
        while self.result is None:
            if self._attempt is None:
                group = self._formation.group
                if group is None:
                    return sends
                patience = self._pace.patience(self._size_bytes)
                self._attempted_at = now
                self._attempt = Attempt(
                    self._signer,
                    group,
                    self._vector,
                    self._weight,
                    now,
                    patience,
                    self._reduction,
                    self._codecs,
                )
                sends += self._attempt.start(now)
            result = self._attempt.result
            if result is None:
                return sends
            if isinstance(result, Averaged):
                self._pace.succeeded(self._size_bytes, now - self._attempted_at)
                self.result = result
                return sends
            sends += self._take_failure(now, self._attempt, result)
        return sends

    def _take_failure(self, now: float, attempt: Attempt, failed: Failed) -> Sends:
        self.failures.append(failed)
        self._old = [attempt, *self._old[:1]]
        self._attempt = None
        for peer in failed.suspects:
            # It may join again, and send only.
            if peer not in self._disagreed:
                self._demoted[peer] = None
        self._disagreed.clear()
        if failed.reason in _FOR_WANT_OF_TIME:
            self._pace.failed()
        number = self._formation.number + 1
        if failed.reason is Reason.CANCELLED or number >= self._settings.attempts_max:
            self.result = failed
            return []
        # All members of a failed attempt fail it, or finish, or are lost.
        for peer in attempt.group.peers:
            if peer not in (self._signer.peer, *self._lost, *self._finished):
                self._expected[peer] = None
        return self._next(now, number)
