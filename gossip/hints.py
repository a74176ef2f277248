"""Accusations by others, kept until this peer's own probe confirms or refutes them.

An accusation is a hint: it makes its receiver probe the accused member. Only if that probe fails is the
accused suspected here, and the accusation passed on. So an accusation spreads only among peers that cannot
reach the accused, and a lie ends at its first receivers. An author whose accusations are refuted too often
(`gossip.suspicion.Credit`) is ignored for a while. For some time after a refutation, the author's other
accusations are doubted: the accused is not informed, and its probe takes the place of a regular one in this
peer's round, so it costs no additional message.

Not here: probes (`gossip.swim`), and the effect of a failed one (`gossip.state_table`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from crypto.facts import Fact
from crypto.identity import PeerId
from gossip.suspicion import Credit
from gossip.table import MemberRow

HINTS_MAX = 256
"""Maximum number of accused members that wait for a probe. Further accusations are ignored, because they will
be repeated."""
HINTS_PROBED_MAX = 16
"""Maximum number of accused members probed simultaneously; a message with 32 lies causes no more probes than
this."""
DOUBTED_MAX = 32
"""Maximum number of accused members that wait for a place in the round; they are also counted in
HINTS_MAX."""
DOUBTED_INTERVALS = 3
"""At most one probe of the round in this many goes to a doubted member, so that the round makes progress."""
HINT_FACTS_MAX = 9
"""Maximum number of waiting accusations per member: the maximum of `SwimSettings.confirmations` plus one."""
SPARED_INTERVALS = 2.0
"""Number of probe intervals after an answer in which no further hint causes a probe, because the same
accusation arrives from several peers."""


@dataclass(slots=True)
class AccusedMember:
    """One accused member. `facts` are keyed by author; `culprits` lose credit if the accused is alive;
    `is_doubted` is set while all of them have recently been wrong."""

    facts: dict[PeerId, Fact] = field(default_factory=dict)
    culprits: list[PeerId] = field(default_factory=list)
    is_doubted: bool = True


class Hints:
    """The accused members, in the order in which the accusations arrived."""

    __slots__ = (
        "_credit", "_doubted", "_interval_seconds", "_pauses", "_pending", "_spared", "_spared_at",
        "_waiting", "rows",
    )  # fmt: skip

    def __init__(self, credit: Credit, interval_seconds: float) -> None:
        self.rows: dict[PeerId, AccusedMember] = {}
        self._waiting: dict[PeerId, None] = {}
        self._doubted: dict[PeerId, None] = {}
        self._pauses = 0
        self._credit = credit
        self._interval_seconds = interval_seconds
        # Number of undecided accusations, keyed by the peer that loses credit if they are false.
        self._pending: dict[PeerId, int] = {}
        # The peers that answered in the current period of SPARED_INTERVALS, and in the previous one.
        self._spared: tuple[set[PeerId], set[PeerId]] = (set(), set())
        self._spared_at = 0.0

    def __len__(self) -> int:
        return len(self.rows)

    def takes(self, now: float, subject: PeerId, accuser: PeerId, culprit: PeerId) -> bool:
        """Return whether an accusation deserves a probe. `culprit` loses credit if it is false."""
        self._age(now)
        hint = self.rows.get(subject)
        is_spared = subject in self._spared[0] or subject in self._spared[1]
        if hint is None and (is_spared or len(self.rows) >= HINTS_MAX):
            return False
        if hint is not None and (accuser in hint.facts or len(hint.facts) >= HINT_FACTS_MAX):
            return False
        if hint is None and self._credit.is_doubted(culprit, now) and len(self._doubted) >= DOUBTED_MAX:
            return False
        return not self._credit.is_spent(culprit, now, self._pending.get(culprit, 0))

    def put(self, now: float, subject: PeerId, accuser: PeerId, culprit: PeerId, fact: Fact) -> None:
        """Add an accusation that has a valid signature and for which `takes` returned True."""
        hint = self.rows.get(subject)
        if hint is None:
            hint = self.rows[subject] = AccusedMember()
            self._doubted[subject] = None
        if hint.is_doubted and not self._credit.is_doubted(culprit, now):
            hint.is_doubted = False
            if subject in self._doubted:
                del self._doubted[subject]
                self._waiting[subject] = None
        hint.facts[accuser] = fact
        hint.culprits.append(culprit)
        self._pending[culprit] = self._pending.get(culprit, 0) + 1

    def next(self) -> PeerId | None:
        """Return the next accused member to probe. Return None if enough are being probed or none waits."""
        waiting = len(self._waiting) + len(self._doubted)
        if not self._waiting or len(self.rows) - waiting >= HINTS_PROBED_MAX:
            return None
        subject = next(iter(self._waiting))
        del self._waiting[subject]
        return subject

    def next_in_round(self, rows: Mapping[PeerId, MemberRow]) -> MemberRow | None:
        """Return the accused member, if any, that replaces the round's next member."""
        self._pauses = max(0, self._pauses - 1)
        if self._pauses or not self._doubted:
            return None
        self._pauses = DOUBTED_INTERVALS
        subject = next(iter(self._doubted))
        del self._doubted[subject]
        row = rows.get(subject)
        if row is not None and row.live:
            return row
        self.drop(subject)
        return None

    def confirm(self, subject: PeerId) -> list[Fact]:
        """Remove and return the accusations of a member whose probe has failed: they are confirmed."""
        hint = self._pop(subject)
        return [] if hint is None else list(hint.facts.values())

    def about(self, subject: PeerId) -> tuple[Fact, ...]:
        """Return the latest accusation, to be sent to the accused itself; empty if there is none or if it is
        doubted."""
        hint = self.rows.get(subject)
        return () if hint is None or hint.is_doubted else tuple(hint.facts.values())[-1:]

    def refute(self, now: float, subject: PeerId) -> list[Fact]:
        """Remove the accusations of a member that has answered. Their culprits lose credit. Return the
        accusations whose authors must be informed."""
        self._age(now)
        self._spared[0].add(subject)
        hint = self._pop(subject)
        if hint is None:
            return []
        for culprit in hint.culprits:
            self._credit.refuted(culprit, now)
        return [] if hint.is_doubted else list(hint.facts.values())

    def drop(self, subject: PeerId) -> None:
        """Remove the accusations of a member without a verdict."""
        self._pop(subject)

    def _pop(self, subject: PeerId) -> AccusedMember | None:
        hint = self.rows.pop(subject, None)
        if hint is None:
            return None
        self._waiting.pop(subject, None)
        self._doubted.pop(subject, None)
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
