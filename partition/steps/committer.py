"""The committer's side of exact mode: it opens numbered micro-batches and defines each step.

Step t is the set of micro-batches [tK, (t+1)K). It is committed in two rounds, by all replicas of the plan or
not at all. So a death at any moment leaves every stage either before or after the step, never with some
replicas before it and others after it, and a minority can commit nothing:

    syncing -> (finishing a step) -> (filling) -> counting -> committing -> applying -> counting ...
                                         ^                                     |
                                         +-- replicas with other parameters ---+        ... evaluating -> done

Other parts decide which peers are gone; that leads to a new plan, with a new Committer. Within a plan only
micro-batches move: away from a replica that is suspected, or that has work but is silent. Only the first
trainer commits.
"""

from collections.abc import Iterable
from math import inf, isfinite

from msgspec.structs import replace

from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId
from partition.plan.plan import Plan, plan_hash
from partition.steps import messages as said
from partition.steps.committer_events import (
    BestWanted,
    Event,
    MicrobatchesMoved,
    ReplicaFailed,
    ReplicaRebuilt,
    Resumed,
    StepApplied,
    StepsPaused,
    TrainingEvaluated,
    TrainingFailed,
    Validated,
    no_number,
    step_applied,
)
from partition.steps.committer_phases import (
    DISSENTS_MAX,
    OPEN_AGAIN_SECONDS,
    STALL_CHECK_SECONDS,
    SYNC_AGAIN_SECONDS,
    Phase,
)
from partition.steps.divergence import Divergence, reported
from partition.steps.evaluation import Evaluation, HeldOut
from partition.steps.filling import Filling
from partition.steps.frame_complaints import USELESS, FrameComplaints
from partition.steps.ledger import Ledger, Place, places_of
from partition.steps.loss_total import Losses, squared_norm
from partition.steps.messages import SAMPLES_MAX, Apply, Open, Sends, StepMessage, Synced, Work
from partition.steps.resume import Lacking, can_resume, check_synced, is_begun, minority, resume_point
from partition.steps.routes import attempts, step_numbers
from partition.steps.save_timer import SaveTimer
from partition.steps.stall_detector import STUCK, StallDetector
from partition.steps.throughput import StepPace
from partition.steps.validation import Series, ValidationSettings

__all__ = ["Committer", "MicrobatchesMoved", "ReplicaFailed", "ReplicaRebuilt", "Resumed", "StepApplied"]
__all__ += ["BestWanted", "StepsPaused", "TrainingEvaluated", "TrainingFailed", "Validated"]


class Committer:
    """The committer of one run under one plan. It begins with whatever step the replicas have reached.

    Long because it is one state machine: each report is judged by the phase that the step is in.
    """

    def __init__(
        self,
        me: PeerId,
        plan: Plan,
        *,
        steps: int,
        evaluations: int,
        metrics: int = 0,
        save_every: int = 0,
        saved: int = 0,
        skips_diverged: bool = False,
        validations: int = 0,
        validation: ValidationSettings | None = None,
        series: Series | None = None,
    ) -> None:
        """`metrics` is the number of metrics in addition to the loss. `save_every` is in steps, 0 for never,
        and `saved` is the step of the newest checkpoint. `skips_diverged`: a step whose loss or gradient is
        not finite changes nothing, instead of ending the run. The first `validations` held-out micro-batches
        are for validation, and the `evaluations` after them for the test. `series` has the validations that
        this member knows of."""
        self.me = me
        self.plan = plan
        self.plan_hash = plan_hash(plan)
        self.steps = steps
        self.saves = SaveTimer(save_every, saved)
        self._divergence = Divergence(skips=skips_diverged)
        self.events: list[Event] = []
        self.phase: Phase = "syncing"
        self.step = plan.step
        self.attempt = attempts(plan).start
        self._places = places_of(plan)
        self._everybody = list(dict.fromkeys([*self._places, *(PeerId(peer) for peer in plan.trainers)]))
        self._last = len(plan.stages) - 1
        self.pace = StepPace()
        self._ledger = Ledger(plan, range(0), train=True)
        self._synced: dict[PeerId, Synced] = {}
        self._digests: dict[PeerId, bytes] = {}
        self._filling = Filling(plan)
        self.losses = Losses()
        self._reduced: dict[PeerId, said.Reduced] = {}
        self._dissents = 0
        self._applied: dict[PeerId, Work] = {}
        self._awaited: set[PeerId] = set()
        self._held_out = HeldOut(validations, evaluations, metrics, validation, series, plan.is_final)
        self._failed: set[PeerId] = set()
        self._overdue = StallDetector(list(self._places))
        self._disputes = FrameComplaints(me, plan, self._places)
        self._suspected: set[PeerId] = set()
        self.vouched: set[bytes] = set()  # digests of others' inputs that match this trainer's own data
        self._commit: said.StepCommit | None = None
        self._apply: Apply | None = None
        self._save: said.Save | None = None
        self._pausing = False
        self._has_opened, self._opened = False, -1
        self._now = 0.0
        self._heard = 0.0
        self._check_at = 0.0

    @property
    def deadline(self) -> float:
        """The time of the next `wake`, which asks again or checks for stalled replicas."""
        if self.phase in ("committing", "applying"):
            return self._overdue.due
        return self._check_at if self.phase in ("syncing", "counting", "evaluating") else inf

    def start(self, now: float) -> Sends:
        """Ask every replica for its state. A repeated call asks the replicas that have not answered."""
        self._now, self._check_at = now, now + SYNC_AGAIN_SECONDS
        return [(peer, said.Sync(plan=self.plan_hash)) for peer in self.awaited]

    @property
    def awaited(self) -> tuple[PeerId, ...]:
        """While syncing, the replicas that have not reported their state."""
        return tuple(peer for peer in self._places if peer not in self._synced)

    def receive(self, now: float, sender: PeerId, message: object) -> Sends:
        """Handle a step message from a replica."""
        if not isinstance(message, StepMessage) or message.plan != self.plan_hash:
            return []
        place = self._places.get(sender)
        if place is None:
            raise RemoteProtocolError("a step message from a peer without a stage")
        if self.phase in ("done", "failed"):
            return []
        self._now = self._heard = now
        self.pace.heard(sender)
        match message:
            case Synced():
                return self._on_synced(sender, message)
            case said.Progress():
                return self._on_progress(place, message)
            case said.Counted():
                return self._on_counted(place, message)
            case said.Reduced():
                return self._on_reduced(sender, message)
            case said.Applied():
                return self._on_applied(sender, message)
            case said.Evaluated():
                return self._on_evaluated(place, message)
            case said.Diverged():
                return self._on_diverged(place, message)
            case said.Waiting() | said.BadFrame() | said.Failed():
                return self._on_trouble(sender, place, message)
        raise RemoteProtocolError(f"a {type(message).__name__} is not for a committer")

    def wake(self, now: float) -> Sends:
        """Ask replicas again that have not answered a Sync; move stalled micro-batches."""
        if now < self.deadline:
            return []
        self._now = now
        if self.phase == "syncing":
            return self.start(now)
        if self.phase in ("committing", "applying"):
            return self._hurry()
        self._check_at = now + STALL_CHECK_SECONDS
        places = self._ledger.obliged()
        obliged = [peer for peer, place in self._places.items() if place in places]
        sends = self._move(self.pace.stalled(now, obliged))
        if not sends and now - self._heard >= OPEN_AGAIN_SECONDS:
            sends = self._to_everybody(self._open_message())
        if sends:
            self._heard = now
        return sends

    def suspect(self, now: float, peer: PeerId) -> Sends:
        """Move the uncounted micro-batches of a peer that SWIM suspects. If it is dead, a new plan
        follows."""
        self._now = now
        if peer not in self._places or self.phase in ("done", "failed"):
            return []
        if self.phase in ("counting", "evaluating"):
            return self._move([peer])
        self._suspected.add(peer)
        return []

    def save(self, now: float) -> Sends:
        """Make the replicas keep a copy of their state: immediately if no commit is in progress, otherwise
        after this step."""
        self._now, self.saves.is_due = now, True
        return self._save_now() if self.phase in ("counting", "evaluating", "paused") else []

    def pause(self, now: float) -> Sends:
        """Open no further step after this one; `StepsPaused` reports the pause. An evaluation still runs to
        its end."""
        self._now, self._pausing = now, True
        return []

    def unpause(self, now: float) -> Sends:
        """Open steps again, because the reason for the pause is gone."""
        self._now, self._pausing = now, False
        return self._open_step() if self.phase == "paused" else []

    def take_last(self, now: float) -> Sends:
        """End with the present state, because the best state cannot be restored."""
        self._now, self._held_out.takes_last = now, True
        return self._open_step() if self.phase == "restoring" else []

    def open_count(self, peer: PeerId) -> int:
        """Return how many micro-batches of the open step this replica owns. They are lost if it is lost."""
        place = self._places.get(peer)
        open_now = self.phase in ("counting", "committing")
        return len(self._ledger.numbers_of(place)) if place is not None and open_now else 0

    def reconnected(self, peer: PeerId) -> Sends:
        """Repeat the messages that `peer` may have missed, because its stream broke and is open again."""
        is_replica = peer in self._places
        if peer not in self._everybody or self.phase in ("done", "failed"):
            return []
        messages: list[StepMessage | None] = [self._save if is_replica else None]
        match self.phase:
            case "syncing" if is_replica and peer not in self._synced:
                messages.append(said.Sync(plan=self.plan_hash))
            case "filling":
                messages.append(self._filling.asked.get(peer))
            case "counting" | "evaluating":
                messages.append(self._open_message())
            case "committing":
                messages.append(self._open_message())
                messages.append(self._commit if is_replica else None)
            case "applying":
                messages.append(self._apply if is_replica else None)
        if self._overdue.is_asked and peer in self._late():
            messages.append(self._overdue.ask(self.plan_hash))
        return [(peer, message) for message in messages if message is not None]

    # Synchronisation

    def _on_synced(self, sender: PeerId, message: Synced) -> Sends:
        check_synced(self.plan, message)
        if self.phase == "filling" and sender in self._filling.asked:
            if not self._filling.take(sender, message):
                return []
            self._digests[sender] = message.digest
            if self._filling.is_rebuilt(sender):
                self.events.append(ReplicaRebuilt(self.step, self._places[sender][0], sender))
            return [] if self._filling.asked else self._go_on()
        if self.phase != "syncing":
            return []
        self._synced[sender] = message
        self.pace.take(sender, message.pace_nanoseconds)
        return [] if len(self._synced) < len(self._places) else self._when_synced()

    def _when_synced(self) -> Sends:
        point = resume_point(self.plan, self._synced)
        if isinstance(point, Lacking):
            return self._fail(point.reason, point.stage)
        self.step, apply = point
        able = {peer: row for peer, row in self._synced.items() if can_resume(row, self.step, apply)}
        behind = {peer for peer, row in able.items() if row.step != self.step}
        self._digests = {peer: row.digest for peer, row in able.items() if peer not in behind}
        if not behind:
            self._apply = apply
            if apply is not None:
                self._tell(apply)
            self._mind_checkpoint()
            return self._repair()
        assert apply is not None
        # Finish the step that the previous committer left half applied, then continue.
        self.step -= 1
        self._overdue.begin(self._now, "applying", self.step, apply.attempt)
        self.phase, self._awaited = "applying", behind
        self._apply = replace(apply, plan=self.plan_hash, step=self.step)
        return [(peer, self._apply) for peer in self._places if peer in behind]

    def _repair(self) -> Sends:
        """Rebuild replicas that have no parameters, or that differ from the majority of their stage, from
        that majority."""
        if not self._filling.begin(self.step, self._digests, self._apply):
            return self._go_on()
        self.phase = "filling"
        return list(self._filling.asked.items())

    # A step

    def _go_on(self) -> Sends:
        """Continue with the next step, now that all replicas have the same state after `step` steps."""
        self._digests.clear()
        sends = self._save_now() if self.saves.is_due else []
        if self._pausing and not is_begun(self.plan, self.step, self._synced.values()):
            self.phase = "paused"
            self.events.append(StepsPaused(self.step))
            return sends
        return sends + self._open_step()

    def _open_step(self) -> Sends:
        match self._held_out.next(self.step, is_over=self._held_out.is_over(self.step, self.steps)):
            case BestWanted() as event:
                self.phase = "restoring"
                self.events.append(event)
                return []
            case Evaluation() as evaluation:
                return self._open_held_out(evaluation)
        self._ledger = self._new_ledger(step_numbers(self.plan, self.step), train=True)
        if not self._take_synced():
            return self._skip(no_number(f"step {self.step}: the loss"))
        self._note_opened(self._ledger)
        self._synced.clear()
        return self._open(self._ledger, "counting") + self._when_counted()

    def _new_ledger(self, numbers: range, *, train: bool) -> Ledger:
        """Return the ledger of a step or an evaluation that begins."""
        self.losses.clear()
        self._reduced.clear()
        self._applied.clear()
        self._commit = self._apply = None
        self._dissents = 0
        self.attempt = self.attempt + 1 if self._opened == self.step else attempts(self.plan).start
        ledger = Ledger(self.plan, numbers, train=train)
        ledger.moved = {self._places[peer] for peer in self._suspected}
        self._suspected.clear()
        return ledger

    def _note_opened(self, ledger: Ledger) -> None:
        if not self._has_opened:
            self.events.append(Resumed(self.step, ledger.replayed(), tuple(self._filling.filled)))
        self._has_opened = True

    def _open(self, ledger: Ledger, phase: Phase) -> Sends:
        ledger.deal(self._rates())
        self._ledger, self.phase, self._opened = ledger, phase, self.step
        self.pace.forget()
        self._heard, self._check_at = self._now, self._now + STALL_CHECK_SECONDS
        return self._to_everybody(self._open_message())

    def _take_synced(self) -> bool:
        """Leave the open step's counted micro-batches with the replicas that have counted them. Return False
        if a loss is not finite."""
        rows = {
            self._places[peer]: row
            for peer, row in self._synced.items()
            if row.step == self.step and peer not in self._filling.filled
        }
        self._ledger.take(rows)
        self.losses.take(row for (stage, _), row in sorted(rows.items()) if stage == self._last)
        return self.losses.is_finite

    def _on_progress(self, place: Place, message: said.Progress) -> Sends:
        if self.phase != ("counting" if message.train else "evaluating") or message.step != self.step:
            return []
        if message.stage != place[0] or place[0] == self._last:
            raise RemoteProtocolError(
                "progress in the last stage, or in a stage that its sender does not hold"
            )
        if self._ledger.owns(place, message.microbatch):
            self._ledger.forwarded(place, message.microbatch)
        return []

    def _on_counted(self, place: Place, message: said.Counted) -> Sends:
        if self.phase != "counting" or message.step != self.step or message.stage != place[0]:
            return []
        if message.microbatch not in self._ledger.numbers:
            raise RemoteProtocolError("a micro-batch was counted that is not in the step")
        if message.samples > SAMPLES_MAX:
            raise RemoteProtocolError("a loss has an impossible number of samples")
        if not self._ledger.owns(place, message.microbatch):
            return []
        if not isfinite(message.loss):
            return self._skip(no_number(f"step {self.step}: the loss"))
        self._ledger.count(place, message.microbatch)
        if place[0] == self._last:
            self.losses.put(message.microbatch, message.samples, message.loss)
        return self._when_counted()

    def _when_counted(self) -> Sends:
        return self._commit_step() if self._ledger.is_complete else []

    def _commit_step(self) -> Sends:
        self.phase = "committing"
        self._overdue.begin(self._now, self.phase, self.step, self.attempt)
        self._reduced.clear()
        self._commit = said.StepCommit(
            plan=self.plan_hash, step=self.step, attempt=self.attempt, replicas=self._ledger.rows()
        )
        return self._to_replicas(self._commit)

    def _on_reduced(self, sender: PeerId, message: said.Reduced) -> Sends:
        if (self.phase, message.step, message.attempt) != ("committing", self.step, self.attempt):
            return []
        self._reduced[sender] = message
        self._overdue.reported(self._now)
        if len(self._reduced) < len(self._places):
            return []
        dissenters = minority(self.plan, {peer: row.digest for peer, row in self._reduced.items()})
        if dissenters:
            return self._reduce_again(dissenters)
        norm = squared_norm(self.plan, self._reduced)
        apply = self.losses.apply(self.plan_hash, self.step, self.attempt, norm)
        if isinstance(apply, str):
            return self._skip(apply)
        self._overdue.end(self._now)
        return self._begin_apply(apply)

    def _begin_apply(self, apply: Apply) -> Sends:
        apply = replace(apply, validated=self._held_out.series)
        self._overdue.begin(self._now, "applying", self.step, self.attempt)
        self.phase, self._awaited, self._apply = "applying", set(self._places), apply
        return self._to_replicas(apply)

    def _skip(self, reason: str) -> Sends:
        """Handle a divergence of the open step: drop the step everywhere, or end the run."""
        apply = self._divergence.skip(self.plan_hash, self.step, self.attempt, reason)
        if isinstance(apply, str):
            return self._fail(apply)
        if self.phase == "committing":
            self._overdue.end(self._now)
        self._commit = None
        return self._begin_apply(apply)

    def _reduce_again(self, dissenters: list[PeerId]) -> Sends:
        self._dissents += 1
        if self._dissents <= DISSENTS_MAX:
            self.attempt += 1
            return self._commit_step()
        for peer in dissenters:
            self._give_up(
                peer, f"step {self.step}: {self._dissents} times its total differed from its stage's"
            )
        return []

    def _on_applied(self, sender: PeerId, message: said.Applied) -> Sends:
        if self.phase != "applying" or message.step != self.step or sender not in self._awaited:
            return []
        self._awaited.discard(sender)
        self._overdue.reported(self._now)
        self._digests[sender] = message.digest
        self._applied[sender] = message.work
        return [] if self._awaited else self._when_applied()

    def _when_applied(self) -> Sends:
        assert self._apply is not None
        self._overdue.end(self._now)
        self._tell(self._apply)
        if self._commit is not None:
            owned = self._ledger.owned()
            for peer, place in self._places.items():
                self.pace.measured(peer, self._applied[peer], len(owned.get(place, ())))
        self.step += 1
        self._mind_checkpoint()
        return self._repair()

    def _tell(self, apply: Apply) -> None:
        """Report the step that this Apply has ended, which is final. The previous committer may not have told
        every peer."""
        self._held_out.learn(apply.validated)
        self.events.append(step_applied(self.plan, apply, self._applied, self._divergence.reason))
        self._divergence.applied(apply)

    def _mind_checkpoint(self) -> None:
        self.saves.look(self.step)

    # Evaluation

    def _open_held_out(self, evaluation: Evaluation) -> Sends:
        """Begin to evaluate held-out samples with the present state."""
        ledger = self._new_ledger(evaluation.numbers, train=False)
        if self._held_out.is_over(self.step, self.steps):
            self._note_opened(ledger)
        sends = self._open(ledger, "evaluating")
        return sends if evaluation.all else self._when_evaluated()

    def _on_evaluated(self, place: Place, message: said.Evaluated) -> Sends:
        if self.phase != "evaluating" or place[0] != self._last:
            return []
        if self._held_out.evaluation.is_known(message, self._ledger.numbers):
            return []
        if not self._ledger.owns(place, message.microbatch):
            return []
        if not message.is_finite:
            return self._fail(no_number(f"held out, after {self.step} steps: the loss or a metric"))
        self._held_out.evaluation.take(message)
        self._ledger.finish(message.microbatch)
        return self._when_evaluated()

    def _when_evaluated(self) -> Sends:
        evaluation = self._held_out.evaluation
        if (result := evaluation.result()) is not None:
            validated = self._held_out.take(self.step, result)
            self.events.append(validated or result)
            if validated is None:
                self.phase = "done"
                return []
            self.saves.is_due = self.saves.is_due or validated.is_kept
            return self._go_on()
        if not evaluation.wants_more(self._ledger.numbers):
            return []
        self._ledger = self._ledger.slide(evaluation.numbers, self._rates())
        return self._open_again()

    # Moves and failures

    def _move(self, peers: Iterable[PeerId]) -> Sends:
        moved = self._ledger.move((self._places[peer] for peer in peers), self._rates())
        for (stage, index), count in moved.items():
            peer = PeerId(self.plan.stages[stage].replicas[index])
            self.events.append(MicrobatchesMoved(self.step, stage, peer, count))
        return self._open_again() if moved else []

    def _on_trouble(self, sender: PeerId, place: Place, message: StepMessage) -> Sends:
        match message:
            case said.BadFrame():
                return self._on_unusable(sender, place, message)
            case said.Failed():
                self._give_up(sender, message.reason, message.step if message.step == self.step else None)
            case said.Waiting():
                if sender in self._late():
                    self._overdue.answered(self._now, sender, message)
        return []

    def _on_unusable(self, sender: PeerId, place: Place, message: said.BadFrame) -> Sends:
        """Handle a replica's report of a frame that it cannot use. The driver has checked the frame's
        signature."""
        found = self._disputes.read(message, self._ledger, place, self.step)
        if found is None or self.phase != ("counting" if found[0].train else "evaluating"):
            return []
        header, author, number = *found, found[0].microbatch
        is_ours = author == self.me or header.digest in self.vouched
        is_moved, guilty, is_data = self._disputes.settle(
            self._ledger, self._rates(), sender, author, header, follows_data=message.of_values and is_ours
        )
        if is_data:
            reason = f"step {self.step}: the model cannot take the data: {message.reason}"
            return self._fail(reason, microbatch=(number, header.train))
        for peer in guilty:
            reason = f"{USELESS}: {message.reason} (step {self.step}, micro-batch {number})"
            self._give_up(peer, reason, self.step if message.of_values and peer == author else None)
        return self._open_again() if is_moved else []

    def _on_diverged(self, place: Place, message: said.Diverged) -> Sends:
        """Handle a stage's report that its result of valid frames is not finite. Other replicas would get the
        same result."""
        if (self.phase, message.step) != ("counting" if message.train else "evaluating", self.step):
            return []
        if message.microbatch is not None and not self._ledger.owes(place, message.microbatch):
            return []
        reason, may_skip = reported(message, place[0])
        return self._skip(reason) if may_skip else self._fail(reason)

    def _hurry(self) -> Sends:
        """Handle a long silence: ask the replicas that delay the step, and give up those that are stuck."""
        late = self._late()
        for peer, reason in self._overdue.stuck(self._now, late).items():
            self._give_up(peer, f"{STUCK} in step {self.step}: {reason}")
        return [(peer, self._overdue.ask(self.plan_hash)) for peer in late]

    def _late(self) -> list[PeerId]:
        """Return the replicas whose report is missing."""
        if self.phase == "committing":
            return [peer for peer in self._places if peer not in self._reduced]
        return [peer for peer in self._places if peer in self._awaited] if self.phase == "applying" else []

    def _give_up(self, peer: PeerId, reason: str, step: int | None = None) -> None:
        if peer not in self._failed:
            self._failed.add(peer)
            self.events.append(ReplicaFailed(peer, self.plan.stage_of(peer), reason, step))

    def _fail(
        self, reason: str, stage: int | None = None, microbatch: tuple[int, bool] | None = None
    ) -> Sends:
        self.phase = "failed"
        self.events.append(TrainingFailed(reason, stage, microbatch))
        return []

    # Bookkeeping

    def _rates(self) -> list[list[int]]:
        return [self.pace.rates(stage) for stage in self.plan.stages]

    def _open_again(self) -> Sends:
        self.attempt += 1
        return self._to_everybody(self._open_message())

    def _open_message(self) -> Open:
        return self._ledger.open(self.plan_hash, self.step, self.attempt)

    def _save_now(self) -> Sends:
        self.saves.is_due = False
        self._save = said.Save(plan=self.plan_hash, step=self.step)
        return self._to_replicas(self._save)

    def _to_replicas(self, message: StepMessage) -> Sends:
        return [(peer, message) for peer in self._places]

    def _to_everybody(self, message: StepMessage) -> Sends:
        return [(peer, message) for peer in self._everybody]
