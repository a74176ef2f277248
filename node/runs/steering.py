"""Applies the requester's changes to a run at one member: the newest revision and its consequences.

Only the committer acts on it. It pauses the run or changes its last step, and sends the learning rate of each
step in the Apply message that ends the step, so that all replicas use the same. Every member keeps the
revision, because it may become the committer.
"""

from collections.abc import Callable
from typing import Protocol

from msgspec.structs import replace

from crypto.encoding import decode, encode
from crypto.errors import RemoteProtocolError
from crypto.facts import Fact
from crypto.identity import PeerId
from node.events import RunChanged, RunRevised
from node.protocols.manifest import Run
from node.protocols.revision import RevisionBody, check_revision, rate_of, steps_of
from node.protocols.runs import Revised
from node.runs.context import RunService
from partition.plan.plan import Plan, plan_hash
from partition.run import events
from partition.run.states import State

REVISION_FILE = "revision"
PAUSED = "its requester paused it"
_FACT_BYTES_MAX = 512


def revision_name(run: str) -> str:
    """Return the storage name of an active run's newest revision."""
    return f"runs/{run}/{REVISION_FILE}"


class SteeredCommitter(Protocol):
    """The part of `node.pipeline.committer.CommitterShell` that this file uses."""

    @property
    def paused_at(self) -> int | None: ...
    def revise(self, steps: int, rate: int) -> None: ...
    def pause(self) -> None: ...
    def unpause(self) -> None: ...
    def save(self) -> None: ...


class Steering:
    """The requester's changes to one run at one member. `paused` is called with the number of steps once no
    step is open."""

    def __init__(self, service: RunService, run: Run, paused: Callable[[int], None]) -> None:
        self._service = service
        self._run = run
        self._paused = paused
        self.fact: Fact | None = None
        self.body: RevisionBody | None = None
        data = service.seams.storage.read(revision_name(run.text))
        if data is not None:
            try:
                self.fact = decode(data, Fact, bytes_max=_FACT_BYTES_MAX)
                self.body = check_revision(service.signer, run, self.fact)
            except RemoteProtocolError:
                self.fact = None  # the stored revision is damaged; the committer will send it again

    @property
    def is_paused(self) -> bool:
        """Whether the requester has paused the run."""
        return self.body is not None and self.body.is_paused

    @property
    def steps(self) -> int:
        """The number of steps after which the run ends."""
        return steps_of(self._run, self.body)

    @property
    def seconds_left(self) -> float | None:
        """The seconds until the deadline, negative after it; None if the requester set none."""
        if self.body is None or not self.body.deadline_milliseconds:
            return None
        return self.body.deadline_milliseconds / 1000 - self._service.seams.swarm_clock.wall()

    @property
    def goal(self) -> tuple[float, int] | None:
        """The samples per second that the requester wants, and over how many seconds; None if there is no
        goal."""
        if self.body is None or not self.body.samples_per_second:
            return None
        return self.body.samples_per_second, self.body.goal_seconds

    @property
    def run(self) -> Run:
        """The run with its current number of steps."""
        manifest = self._run.manifest
        if self.steps == manifest.steps:
            return self._run
        return replace(self._run, manifest=replace(manifest, steps=self.steps))

    def is_news(self, body: RevisionBody) -> bool:
        """Return whether `body` is newer than the known revision."""
        return self.body is None or body.number > self.body.number

    def take(
        self, fact: Fact, state: State, committer: SteeredCommitter | None, plan: Plan | None, me: PeerId
    ) -> bool:
        """Accept the requester's revision if it is newer than the known one; return whether it is.

        `state` is the run's state apart from a pause by its requester. Raises RemoteProtocolError if the
        requester did not sign the revision.
        """
        body = check_revision(self._service.signer, self._run, fact)
        if not self.is_news(body):
            return False
        was_paused, self.fact, self.body = self.is_paused, fact, body
        storage, clock = self._service.seams.storage, self._service.seams.clock
        storage.write(revision_name(self._run.text), encode(fact))
        self._service.publish(
            RunRevised(
                at=clock.wall(),
                run=self._run.text,
                number=body.number,
                steps=self.steps,
                learning_rate=body.learning_rate,
                priority=body.priority,
                is_paused=body.is_paused,
            )
        )
        if was_paused != self.is_paused and state in ("running", "degraded"):
            shown, reason = self.shown(state, "its requester lets it go on")
            changed = RunChanged(at=clock.wall(), run=self._run.text, state=shown, reason=reason)
            self._service.publish(changed)
        if committer is not None and plan is not None:
            self._apply(committer, was_paused=was_paused)
            self.tell(plan, me)
        return True

    def begin(self, committer: SteeredCommitter, plan: Plan, me: PeerId) -> None:
        """Apply the known revision to a plan that came into force and in which this node commits."""
        if self.body is not None:
            self._apply(committer, was_paused=False)
            self.tell(plan, me)

    def tell(self, plan: Plan, me: PeerId, *only: PeerId) -> None:
        """As the committer, send the revision to the members before any step that depends on it."""
        if self.fact is not None:
            message = Revised(plan_hash(plan), self.fact)
            for peer in only or plan.members:
                if peer != me:
                    self._service.send(PeerId(peer), message)

    def _apply(self, committer: SteeredCommitter, *, was_paused: bool) -> None:
        committer.revise(self.steps, rate_of(self._run, self.body))
        if self.is_paused:
            committer.pause()
        elif was_paused:
            committer.unpause()

    def steer(
        self,
        event: events.PauseWanted | events.SaveWanted | events.StepsWanted,
        committer: SteeredCommitter | None,
    ) -> None:
        """Make the committer carry out the member's decision between two steps."""
        match event:
            case _ if committer is None:
                return
            case events.PauseWanted() if committer.paused_at is not None:
                self._paused(committer.paused_at)
            case events.PauseWanted():
                committer.pause()
            case events.SaveWanted():
                committer.save()
            case events.StepsWanted() if not self.is_paused:
                committer.unpause()

    def changed(self, event: events.StateChanged) -> None:
        """Publish the run's new state."""
        state, reason = self.shown(event.state, event.reason)
        at = self._service.seams.clock.wall()
        self._service.publish(
            RunChanged(
                at=at,
                run=self._run.text,
                state=state,
                reason=reason,
                waits_for=event.waits_for,
                is_note=event.is_note,
            )
        )

    def shown(self, state: State, reason: str) -> tuple[State, str]:
        """Return the run's state as people see it, and its reason."""
        if self.is_paused and state in ("running", "degraded"):
            return "paused", PAUSED
        return state, reason
