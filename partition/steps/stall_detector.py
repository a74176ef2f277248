"""Detection of a stalled reduction, or end of a step, and of the replica at fault.

SWIM detects dead peers. This detects a replica that answers probes but makes no progress, which would block
the step for ever. Once nothing has happened for far longer than usual, replicas that have not reported are
asked, twice, what they wait for; if still nothing happens, the first of these that applies is stuck:

    who does not answer
    who waits for nobody but itself
    who is waited for by the most, for summands before sums; of equally many the last in the plan, so that a
    word against a word costs one of the two its place and the stage keeps the other

Times are seconds of the committer's clock.
"""

from collections import Counter
from collections.abc import Sequence
from math import inf

from crypto.identity import PeerId
from partition.steps.messages import StallQuestion, Waiting

STUCK = "it is stuck"
PATIENCE_SECONDS_MIN = 30.0
"""A machine that is busy with something else may pause for this long."""
PATIENCE_FACTOR = 8
"""A round that takes this many times longer than usual is not noise."""
PATIENCE_SECONDS = 300.0
"""Before anything was measured: the sum of gigabytes over a slow link begins within this, and so does the
first step of an optimizer on a slow disk."""
ROUND_SECONDS_MAX = 7_200.0
"""The longest time for which a replica's claim of progress is believed."""
ASKS = 2
"""How often to ask: the second answer shows whether there is progress."""
LATE_SECONDS = 1.0
"""A committer that is woken this late was itself suspended, and others' messages wait unread."""
_SHARE = 0.3
"""The weight of the newest duration in the usual one."""


class StallDetector:
    """One committer's detector. `begin` and `end` a round, in which all of a plan's replicas report once."""

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
        """Begin a round of reports; `round_` is its kind, since usual durations differ."""
        self._round, self._began, self._asked = round_, now, (step, attempt)
        self._left.clear()
        self._go_on(now)

    def end(self, now: float) -> None:
        """End a round: all have reported."""
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
        """Whether replicas without a report have been asked, with no progress since."""
        return self._asks > 0

    def stuck(self, now: float, late: Sequence[PeerId]) -> dict[PeerId, str]:
        """Return the stuck replicas among the `late` ones at `due`, with reasons. Empty until they were asked
        often enough; then they are to be asked now."""
        is_late = now > self.due + LATE_SECONDS
        judges = self._asks >= ASKS and not is_late
        answers = [self._answers.get(peer) for peer in late]
        self._asks = 1 if is_late else self._asks + 1
        self._answers.clear()
        self.due = now + self._patience()
        if not judges or not late:
            return {}
        waited = f"nothing went on for {(1 + ASKS) * self._patience():.0f} s"
        silent = [peer for peer, answer in zip(late, answers, strict=True) if answer is None]
        if silent:
            return dict.fromkeys(silent, f"{waited}, and it does not say what it waits for")
        said = {peer: answer for peer, answer in zip(late, answers, strict=True) if answer is not None}
        own = [peer for peer, answer in said.items() if not answer.peers]
        if own:
            return dict.fromkeys(own, f"{waited}, and it waits for nobody")
        rows = [answer for answer in said.values() if not answer.for_sums] or list(said.values())
        named = Counter(PeerId(peer) for answer in rows for peer in answer.peers)
        worst = max(
            (peer for peer in self._replicas if peer in named),
            key=lambda peer: (named[peer], self._replicas.index(peer)),
            default=None,
        )
        return {} if worst is None else {worst: f"{waited}, and {named[worst]} wait for it"}
