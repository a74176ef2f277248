"""Accusations by others, until this peer's own probe has shown what is true of them.

An accusation is a hint: it makes its receiver probe the accused. Only when that probe fails is the accused
suspected here, and only then is the accusation passed on. So an accusation travels as far as the accused is
out of reach, a lie ends at those it was told to, and nobody is buried by a forwarder. An author whose
accusations are refuted too often (`gossip.suspicion.Credit`) is ignored for a while.

Not here: probes (`gossip.swim`), and what follows from a failed one (`gossip.state_table`).
"""

from dataclasses import dataclass, field

from crypto.facts import Fact
from crypto.identity import PeerId
from gossip.suspicion import Credit

HINTS_MAX = 256
"""Accused members that wait for a probe; more are told of again."""
HINTS_PROBED_MAX = 16
"""How many of these are probed at once: a message with 32 lies costs no more."""
HINT_FACTS_MAX = 9
"""Accusations of one member that wait: as many accusers as `Settings.confirmations` can ask for, and one."""
SPARED_INTERVALS = 2.0
"""Probe intervals in which one that has just answered a probe is not probed for another hint: the same
accusation comes from several sides."""


@dataclass(slots=True)
class Hint:
    """One accused member. `facts` by author; `culprits` pay if it turns out to live."""

    facts: dict[PeerId, Fact] = field(default_factory=dict)
    culprits: list[PeerId] = field(default_factory=list)
    is_probed: bool = False


class Hints:
    """The accused, in the order in which they were heard of."""

    __slots__ = ("_credit", "_interval_seconds", "_pending", "_spared", "_spared_at", "_waiting", "rows")

    def __init__(self, credit: Credit, interval_seconds: float) -> None:
        self.rows: dict[PeerId, Hint] = {}
        self._waiting: dict[PeerId, None] = {}
        self._credit = credit
        self._interval_seconds = interval_seconds
        # Accusations that wait for a verdict, by whoever pays for a false one.
        self._pending: dict[PeerId, int] = {}
        # The peers that answered in this period of SPARED_INTERVALS, and in the one before.
        self._spared: tuple[set[PeerId], set[PeerId]] = (set(), set())
        self._spared_at = 0.0

    def __len__(self) -> int:
        return len(self.rows)

    def takes(self, now: float, subject: PeerId, accuser: PeerId, culprit: PeerId) -> bool:
        """Return whether an accusation is worth a look; `culprit` pays if it is false."""
        self._age(now)
        hint = self.rows.get(subject)
        is_spared = subject in self._spared[0] or subject in self._spared[1]
        if hint is None and (is_spared or len(self.rows) >= HINTS_MAX):
            return False
        if hint is not None and (accuser in hint.facts or len(hint.facts) >= HINT_FACTS_MAX):
            return False
        return not self._credit.is_spent(culprit, now, self._pending.get(culprit, 0))

    def put(self, subject: PeerId, accuser: PeerId, culprit: PeerId, fact: Fact) -> None:
        """Add an accusation whose signature holds, and that `takes` allows."""
        hint = self.rows.get(subject)
        if hint is None:
            hint = self.rows[subject] = Hint()
            self._waiting[subject] = None
        hint.facts[accuser] = fact
        hint.culprits.append(culprit)
        self._pending[culprit] = self._pending.get(culprit, 0) + 1

    def next(self) -> PeerId | None:
        """The next accused member to be probed; None while enough are, or none waits."""
        if not self._waiting or len(self.rows) - len(self._waiting) >= HINTS_PROBED_MAX:
            return None
        subject = next(iter(self._waiting))
        del self._waiting[subject]
        self.rows[subject].is_probed = True
        return subject

    def confirm(self, subject: PeerId) -> list[Fact]:
        """The probe has failed: take the accusations out, which were right."""
        hint = self._pop(subject)
        return [] if hint is None else list(hint.facts.values())

    def about(self, subject: PeerId) -> tuple[Fact, ...]:
        """The first accusation, for the accused itself to hear."""
        hint = self.rows.get(subject)
        return () if hint is None else tuple(hint.facts.values())[:1]

    def refute(self, now: float, subject: PeerId) -> list[Fact]:
        """The accused has answered: take the accusations out, at the cost of their culprits."""
        self._age(now)
        self._spared[0].add(subject)
        hint = self._pop(subject)
        if hint is None:
            return []
        for culprit in hint.culprits:
            self._credit.refuted(culprit, now)
        return list(hint.facts.values())

    def drop(self, subject: PeerId) -> None:
        """Forget the accusations, whatever they are worth."""
        self._pop(subject)

    def _pop(self, subject: PeerId) -> Hint | None:
        hint = self.rows.pop(subject, None)
        if hint is None:
            return None
        self._waiting.pop(subject, None)
        for culprit in hint.culprits:
            left = self._pending[culprit] - 1
            if left:
                self._pending[culprit] = left
            else:
                del self._pending[culprit]
        return hint

    def _age(self, now: float) -> None:
        seconds = SPARED_INTERVALS * self._interval_seconds
        if now >= self._spared_at + 2 * seconds:
            self._spared, self._spared_at = (set(), set()), now
        elif now >= self._spared_at + seconds:
            self._spared, self._spared_at = (set(), self._spared[0]), now
