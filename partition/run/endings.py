"""The ends of all runs in local mode of one node, behind one protocol. Each has a
`partition.run.ending.Ending`."""

from math import inf

from crypto.identity import PeerId
from partition.run import admission as admissions
from partition.run.admission import Admission, Present, Revoke, Vouch
from partition.run.conclusions import AllSends, Event, Message, Sends
from partition.run.ending import Ending

RUNS_MAX = 64


def _forgotten_at(ending: Ending) -> float:
    return ending.forget_at


class Endings:
    """The ends of all runs in local mode of one node, behind one protocol. Finished runs are kept for a
    while.

    Messages about an end go to the run's `Ending`, tickets to its `Admission`.
    """

    def __init__(self) -> None:
        self._endings: dict[bytes, Ending] = {}
        self._admissions: dict[bytes, Admission] = {}
        self.events: list[Event] = []

    @property
    def deadline(self) -> float:
        return min((ending.deadline for ending in self._endings.values()), default=inf)

    def open(self, now: float, ending: Ending, admission: Admission | None = None) -> None:
        """Join a run. To make room, finished runs are dropped, those that ended earliest first. Raises
        ValueError if this node is in too many unfinished runs."""
        over = sorted((other for other in self._endings.values() if other.is_settled), key=_forgotten_at)
        for other in over:
            if other.forget_at <= now or len(self._endings) >= RUNS_MAX:
                self.close(other.run)
        if len(self._endings) >= RUNS_MAX:
            raise ValueError(f"this node is already in {RUNS_MAX} unfinished runs in local mode")
        self._endings[ending.run] = ending
        if admission is not None:
            self._admissions[ending.run] = admission

    def close(self, run: bytes) -> None:
        """Forget a run in which this node no longer takes part."""
        self._endings.pop(run, None)
        self._admissions.pop(run, None)

    def receive(self, now: float, sender: PeerId, message: Message) -> AllSends:
        """Handle one message; ignore messages of runs that are unknown here."""
        ending, admission = self._endings.get(message.run), self._admissions.get(message.run)
        if ending is None:
            return []
        if isinstance(message, Present | Vouch | Revoke):
            if admission is None:
                return []
            sends = self.admitted(admission, admission.receive(sender, message))
            # A member that returns to a finished run learns that it has ended.
            return sends + ([(sender, ending.said)] if sends and ending.is_settled else [])
        if admission is not None and admission.admits(sender):
            ending.know(sender)
        return self.drained(ending, ending.receive(now, sender, message))

    def admitted(self, admission: Admission, sends: admissions.Sends) -> AllSends:
        """Move the admission's events to the node's events; return `sends`."""
        self.events += admission.events
        admission.events.clear()
        return [*sends]

    def wake(self, now: float) -> AllSends:
        """Wake the endings that are due."""
        sends: AllSends = []
        for ending in self._endings.values():
            if ending.deadline <= now:
                sends += self.drained(ending, ending.wake(now))
        return sends

    def drained(self, ending: Ending, sends: Sends) -> AllSends:
        """Move an ending's events to the node's events; return `sends`."""
        self.events += ending.events
        ending.events.clear()
        return [*sends]
