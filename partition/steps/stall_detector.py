"""Detection of a stall, in a reduction or at the end of a step, and of the replica at fault.

SWIM detects dead peers. This module detects a replica that answers probes but makes no progress, which would
block the step forever. If nothing has happened for far longer than usual, replicas that have not reported are
asked what they wait for, ASKS times. If still nothing happens, the first of these rules that applies decides
which replicas are stuck:

1. The replicas that do not answer.
2. The replicas that wait for no other peer.
3. The replica for which most others wait; waiting for summands counts before waiting for sums. Among equally
   many, the last in the plan is chosen. So if two replicas accuse each other, only one of them loses its
   place, and the stage keeps the other.

Times are seconds of the committer's clock.
"""

from collections import Counter
from collections.abc import Sequence
from math import inf

from crypto.identity import PeerId
from partition.steps.messages import StallQuestion, Waiting

STUCK = "it is stuck"
PATIENCE_SECONDS_MIN = 30.0
"""Minimum time without a report before replicas are asked. A machine that is busy with other work may pause
for this long."""
PATIENCE_FACTOR = 8
"""Multiple of the usual duration of a round after which replicas are asked. A longer duration is not
noise."""
PATIENCE_SECONDS = 300.0
"""Time without a report before replicas are asked, if no duration was measured yet. The sum of gigabytes over
a slow link begins within this time, and so does the first optimizer step on a slow disk."""
ROUND_SECONDS_MAX = 7_200.0
"""How long a replica's claims of progress are believed."""
ASKS = 2
"""Number of times that replicas are asked. The second answer shows whether there is progress."""
LATE_SECONDS = 1.0
"""If a committer is woken this much too late, it was itself suspended, and others' messages may be unread."""
_SHARE = 0.3
"""Weight of the newest duration in the usual duration."""


class StallDetector:
    """One committer's detector. A round lasts from `begin` to `end`; in it, all of a plan's replicas report
    once."""

    def __init__(self, replicas: Sequence[PeerId]) -> None:
        self._replicas = list(replicas)
        self._usual: dict[str, float] = {}
        self._round = ""
        self._asked = (-1, -1)
        self._began = 0.0
        self.due = inf
        self._asks = 0
        self._answers: dict[PeerId, Waiting] = {}
        self._left: dict[PeerId, int] = {}

    def begin(self, now: float, round_: str, step: int, attempt: int) -> None:
        """Begin a round of reports. `round_` is its kind, because the kinds have different usual
        durations."""
        self._round, self._began, self._asked = round_, now, (step, attempt)
        self._left.clear()
        self._go_on(now)

    def end(self, now: float) -> None:
        """End a round, because all replicas have reported."""
        seconds = now - self._began
        usual = self._usual.get(self._round, seconds)
        self._usual[self._round] = usual + _SHARE * (seconds - usual)
        self.due = inf

    def reported(self, now: float) -> None:
        """Note a report."""
        self._go_on(now)

    def ask(self, plan: bytes) -> StallQuestion:
        """Return the question to replicas that have not reported."""
        return StallQuestion(plan=plan, step=self._asked[0], attempt=self._asked[1])

    def answered(self, now: float, peer: PeerId, message: Waiting) -> None:
        """Note a replica's answer."""
        if (message.step, message.attempt) != self._asked:
            return
        before = self._left.get(peer)
        self._left[peer] = message.left
        self._answers[peer] = message
        if before is not None and message.left < before and now < self._began + ROUND_SECONDS_MAX:
            self._go_on(now)

    def _go_on(self, now: float) -> None:
        self._asks = 0
        self._answers.clear()
        self.due = now + self._patience()

    def _patience(self) -> float:
        if self._round not in self._usual:
            return PATIENCE_SECONDS
        return max(PATIENCE_SECONDS_MIN, PATIENCE_FACTOR * self._usual[self._round])

    @property
    def is_asked(self) -> bool:
        """Whether replicas without a report have been asked, and no progress was seen since."""
        return self._asks > 0

    def stuck(self, now: float, late: Sequence[PeerId]) -> dict[PeerId, str]:
        """Return the stuck replicas among the `late` ones at the time `due`, with reasons. The result is
        empty until they were asked often enough; the caller must then ask them now."""
        is_late = now > self.due + LATE_SECONDS
        judges = self._asks >= ASKS and not is_late
        answers = [self._answers.get(peer) for peer in late]
        self._asks = 1 if is_late else self._asks + 1
        self._answers.clear()
        self.due = now + self._patience()
        if not judges or not late:
            return {}
        waited = f"there was no progress for {(1 + ASKS) * self._patience():.0f} s"
        silent = [peer for peer, answer in zip(late, answers, strict=True) if answer is None]
        if silent:
            return dict.fromkeys(silent, f"{waited}, and the replica does not report what it waits for")
        said = {peer: answer for peer, answer in zip(late, answers, strict=True) if answer is not None}
        own = [peer for peer, answer in said.items() if not answer.peers]
        if own:
            return dict.fromkeys(own, f"{waited}, and the replica waits for no other peer")
        rows = [answer for answer in said.values() if not answer.for_sums] or list(said.values())
        named = Counter(PeerId(peer) for answer in rows for peer in answer.peers)
        worst = max(
            (peer for peer in self._replicas if peer in named),
            key=lambda peer: (named[peer], self._replicas.index(peer)),
            default=None,
        )
        return {} if worst is None else {worst: f"{waited}, and {named[worst]} wait for it"}
