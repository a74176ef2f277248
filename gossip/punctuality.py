"""Marks of members that answer this peer's probes late, or only through others. A mark is not an accusation.

A member that answers late is degraded, and one that only relays can reach has no path from here. Both are
alive, and no other peer is informed. Unanswered probes lead to suspicion (`gossip.suspicion`). Nothing is
counted while this peer doubts itself (Lifeguard's local health), because it may be late itself.
"""

import enum

from crypto.identity import PeerId
from gossip.member import Condition, MemberDegraded, MemberRecovered

RECENT = 8
"""Number of a member's latest probes that count."""
LATE_MIN = 4
"""Number of late answers among these that degrade a member. The same number of consecutive punctual answers
restores it."""
RELAYED_MIN = 4
"""Number of consecutive probes answered only by relays after which the direct path counts as lost. With 10 %
loss each way, this happens by chance to four probes in a million."""


class ProbeAnswer(enum.IntEnum):
    """How one probe was answered."""

    IN_TIME = 0
    LATE = 1
    RELAYED = 2


class Punctuality:
    """Marks of members that recently did not answer in time. Other members take no memory."""

    __slots__ = ("_recent", "marks")

    def __init__(self) -> None:
        self.marks: dict[PeerId, MemberDegraded] = {}
        self._recent: dict[PeerId, tuple[tuple[ProbeAnswer, float], ...]] = {}

    def __len__(self) -> int:
        return len(self._recent)

    def note(
        self, peer: PeerId, answer: ProbeAnswer, seconds: float
    ) -> MemberDegraded | MemberRecovered | None:
        """Record that a probe was answered after `seconds`. Return an event if the member's mark changes."""
        if answer is ProbeAnswer.IN_TIME and peer not in self._recent:
            return None
        recent = (*self._recent.get(peer, ())[1 - RECENT :], (answer, seconds))
        if len(recent) == RECENT and all(kind is ProbeAnswer.IN_TIME for kind, _ in recent):
            del self._recent[peer]
        else:
            self._recent[peer] = recent
        mark = self.marks.get(peer)
        found = _judge(peer, recent, None if mark is None else mark.condition)
        if found is None:
            return None if self.marks.pop(peer, None) is None else MemberRecovered(peer)
        self.marks[peer] = found
        return found if mark is None or mark.condition is not found.condition else None

    def forget(self, peer: PeerId) -> None:
        """Forget a member that is dead, or no longer listed."""
        self._recent.pop(peer, None)
        self.marks.pop(peer, None)


def _judge(
    peer: PeerId, recent: tuple[tuple[ProbeAnswer, float], ...], held: Condition | None
) -> MemberDegraded | None:
    relayed = _in_a_row(recent, ProbeAnswer.RELAYED)
    if relayed >= RELAYED_MIN or (held is Condition.NO_PATH and relayed):
        text = f"no direct answer to the last {relayed} probes, though others reach it"
        return MemberDegraded(peer, Condition.NO_PATH, 0.0, recent[-1][1], text)
    late = [seconds for kind, seconds in recent if kind is ProbeAnswer.LATE]
    is_still_late = held is Condition.LATE and late and _in_a_row(recent, ProbeAnswer.IN_TIME) < LATE_MIN
    if len(late) >= LATE_MIN or is_still_late:
        usual = sorted(late)[len(late) // 2]
        text = f"{len(late)} of the last {len(recent)} probes were answered late, after {usual:.2g} s"
        return MemberDegraded(peer, Condition.LATE, 1 - len(late) / len(recent), usual, text)
    return None


def _in_a_row(recent: tuple[tuple[ProbeAnswer, float], ...], wanted: ProbeAnswer) -> int:
    count = 0
    for kind, _ in reversed(recent):
        if kind is not wanted:
            break
        count += 1
    return count
