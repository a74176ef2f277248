"""One member's view of what its run's requester has changed: the newest revision, and what follows from it.

The committer alone acts: it pauses, ends at another step, and says the learning rate of each step in the
Apply that ends it, so that all replicas use the same. Every member keeps the revision: it may commit
next.
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
from node.runs.context import Service
from partition.plan.plan import Plan, plan_hash
from partition.run import events
from partition.run.states import State

REVISION_FILE = "revision"
PAUSED = "its requester paused it"
_FACT_BYTES_MAX = 512


def revision_name(run: str) -> str:
    """Return where a node keeps the newest revision of a run that goes on, in its storage."""
    return f"runs/{run}/{REVISION_FILE}"


class Committer(Protocol):
    """What is needed of `node.pipeline.committer.CommitterShell`."""

    @property
    def paused_at(self) -> int | None: ...
    def revise(self, steps: int, rate: int) -> None: ...
    def pause(self) -> None: ...
    def unpause(self) -> None: ...
    def save(self) -> None: ...


class Steering:
    """One run's at one member. `paused` is told that no step is open after so many."""

    def __init__(self, service: Service, run: Run, paused: Callable[[int], None]) -> None:
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
                self.fact = None  # damaged: the committer says it again

    @property
    def is_paused(self) -> bool:
        """Whether the requester wants no further step for now."""
        return self.body is not None and self.body.is_paused

    @property
    def steps(self) -> int:
        """After how many the run ends."""
        return steps_of(self._run, self.body)

    @property
    def seconds_left(self) -> float | None:
        """Until its deadline, less than none where it is over; None where its requester set none."""
        if self.body is None or not self.body.deadline_milliseconds:
            return None
        return self.body.deadline_milliseconds / 1000 - self._service.seams.swarm_clock.wall()

    @property
    def run(self) -> Run:
        """The run with the steps that it has now."""
        manifest = self._run.manifest
        if self.steps == manifest.steps:
            return self._run
        return replace(self._run, manifest=replace(manifest, steps=self.steps))

    def is_news(self, body: RevisionBody) -> bool:
        """Return whether it replaces what is known."""
        return self.body is None or body.number > self.body.number

    def take(
        self, fact: Fact, state: State, committer: Committer | None, plan: Plan | None, me: PeerId
    ) -> bool:
        """Take the word of the requester, if it is newer than what is known; whether it is.

        `state` is the run's but for this. Raises RemoteProtocolError: it is not the requester's.
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

    def begin(self, committer: Committer, plan: Plan, me: PeerId) -> None:
        """A plan is in force in which this node commits: it goes on by what is known."""
        if self.body is not None:
            self._apply(committer, was_paused=False)
            self.tell(plan, me)

    def tell(self, plan: Plan, me: PeerId, *only: PeerId) -> None:
        """As the committer: say it to the members, before any step that follows from it."""
        if self.fact is not None:
            message = Revised(plan_hash(plan), self.fact)
            for peer in only or plan.members:
                if peer != me:
                    self._service.send(PeerId(peer), message)

    def _apply(self, committer: Committer, *, was_paused: bool) -> None:
        committer.revise(self.steps, rate_of(self._run, self.body))
        if self.is_paused:
            committer.pause()
        elif was_paused:
            committer.unpause()

    def steer(
        self,
        event: events.PauseWanted | events.SaveWanted | events.StepsWanted,
        committer: Committer | None,
    ) -> None:
        """Have a committer do what its member wants between two steps."""
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
        """Tell people that the run is in another state."""
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
        """Return the state of the run as people see it, and why it is."""
        if self.is_paused and state in ("running", "degraded"):
            return "paused", PAUSED
        return state, reason
