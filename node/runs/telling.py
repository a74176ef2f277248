"""What this member knows to be committed in a run, and how others hear of it.

Each step is shown once, whichever committer tells of it: one that takes over may not know what the last one
managed to say. Not here: committing (`node.runs.committer`), and what follows from how far a run is.
"""

from collections.abc import Callable
from dataclasses import dataclass

from msgspec.structs import replace

from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId
from node.events import RunEvaluated, StepCommitted
from node.runs.chain import ChainShell
from node.runs.committer import RunEvent
from node.runs.manifest import Run
from node.runs.requests import Notice, check_notice
from node.runs.service import Service
from partition.plan.plan import Plan, plan_hash


@dataclass
class Shown:
    """The newest that was shown of each kind."""

    committed: StepCommitted | None = None
    evaluated: RunEvaluated | None = None


class Telling:
    """One member's. `step` is how many steps are committed, `furthest` the most that ever were."""

    def __init__(
        self,
        service: Service,
        run: Run,
        *,
        others: Callable[[Plan], list[PeerId]],
        hosts: Callable[[], bool],
    ) -> None:
        """`others` are the living of a plan but for this node; `hosts` is whether it holds a stage."""
        self.step = 0
        self.shown = Shown()
        self._told = 0
        self.furthest = 0
        self._service = service
        self._run = run
        self._others = others
        self._hosts = hosts
        self._chain: ChainShell | None = None

    def begin(self, chain: ChainShell) -> None:
        """From now on this chain hears how far the run is."""
        self._chain = chain

    def restored(self, step: int) -> int:
        """All go back to `step`. How many steps are to be committed again."""
        lost = max(0, self.step - step)
        self.step, self._told = step, min(self._told, step)
        return lost

    def note(self, step: int) -> None:
        """So many steps are committed. By the most that ever were two branches are judged: what a branch says
        of itself never falls, so that of two neither can give way to what the other was."""
        self.step, manifest = step, self._run.manifest
        self.furthest = max(self.furthest, step)
        if self._chain is not None:
            samples = self.furthest * manifest.microbatches * manifest.microbatch
            self._chain.say(self.furthest, samples, hosts=self._hosts())

    def show(self, event: RunEvent) -> None:
        """Publish it here; a step that was shown before is not shown again."""
        if isinstance(event, StepCommitted):
            if event.step < self._told:
                return
            self._told = event.step + 1
            self.shown.committed = event
            self.note(self._told)
        elif isinstance(event, RunEvaluated):
            self.shown.evaluated = event
        self._service.publish(event)

    def tell(self, plan: Plan, event: RunEvent) -> None:
        """As the committer: publish it here and have all others do so."""
        self.show(event)
        notice = Notice(plan_hash(plan), event)
        for peer in self._others(plan):
            self._service.send(peer, notice)

    def hear(self, message: Notice) -> None:
        """The committer says so. Raises RemoteProtocolError."""
        if message.event.run != self._run.text:
            raise RemoteProtocolError("a notice of another run")
        check_notice(message)
        # By our own clock: another's may be wrong, and this one's screens sort by it.
        self.show(replace(message.event, at=self._service.seams.clock.wall()))
