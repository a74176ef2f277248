"""Changes that wait until no step is open: members leave, and borders between stages move.

The committer pauses the run between two steps. So a leaving member has no open work, and layers are saved
before they move (`partition.run.recutting`). Not here: the plan that follows (`partition.run.proposals`).
"""

from collections.abc import Callable
from contextlib import suppress

from msgspec.structs import replace

from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId
from partition.plan.change import Change, successor
from partition.plan.plan import Plan, plan_hash
from partition.run.draining import Draining
from partition.run.events import Event, PauseWanted, SaveWanted, StepsWanted
from partition.run.messages import Leaving, Recut
from partition.run.proposals import Proposer
from partition.run.recutting import Recutting
from partition.run.roles import Roles
from partition.run.way_back import WayBack


class BetweenSteps:
    """One member's part in these changes. `plan` returns the plan in force, or None if the run is over here.
    `events` are the member's; `restorable` returns the newest checkpoint; `tell` sends to all live members;
    `exclude` drops a peer from the next plan."""

    def __init__(
        self,
        me: PeerId,
        proposer: Proposer,
        draining: Draining,
        roles: Roles,
        *,
        plan: Callable[[], Plan | None],
        events: list[Event],
        restorable: Callable[[], WayBack | None],
        tell: Callable[[Leaving | Recut], None],
        exclude: Callable[[float, PeerId, str], None],
    ) -> None:
        self.recutting = Recutting()
        self._me = me
        self._plan = plan
        self._proposer = proposer
        self._draining = draining
        self._roles = roles
        self._restorable = restorable
        self._events = events
        self._tell = tell
        self._exclude = exclude

    # Members that leave

    def leave(self, now: float) -> None:
        """Tell all members that this node wants to leave."""
        plan = self._plan()
        if plan is not None:
            self._tell(Leaving(plan_hash(plan)))
            self.note_leaving(now, self._me)

    def note_leaving(self, now: float, peer: PeerId) -> None:
        """Note that a member wants to leave."""
        self._draining.note(now, peer)
        if self.recutting.paused_at is None:
            self.look_for_leavers()
        else:
            self.paused(now, self.recutting.paused_at)

    def look_for_leavers(self) -> None:
        """As the committer: pause if a leaving member can now leave, because its stage has another replica or
        the neighbouring stages take its layers."""
        if self._committed_plan() is None:
            return
        handed_over = self._proposer.handed_over()
        if handed_over is not None and not self.recutting.is_open:
            self.recutting.begin(handed_over)
        if handed_over is not None or self._draining.ready():
            self._events.append(PauseWanted())

    def _committed_plan(self) -> Plan | None:
        """Return the plan in force, if this node commits it."""
        plan = self._plan()
        return plan if plan is not None and plan.committer == self._me else None

    def paused(self, now: float, step: int) -> None:
        """As the committer: handle the pause after `step` steps. No step is open, so leaving members can go
        and layers can move."""
        if self._committed_plan() is None:
            return
        leaving = self._draining.ready()
        for peer in leaving:
            self._exclude(now, peer, f"it leaves after step {step}")
        if leaving:
            self.recutting.end()  # the plan without these members is measured anew
        elif self.recutting.paused(now, step):
            self._events.append(SaveWanted(step))
            self.checkpointed(now)

    # Borders between stages

    def recut(self, wanted: Change) -> None:
        """As the committer: move the borders between stages, or add stages. A checkpoint is made for this
        change, and all layers are taken from it. A join of a standby needs no checkpoint."""
        plan = self._committed_plan()
        if plan is None or self.recutting.is_open or self._proposer.absent or self._proposer.leaving:
            return
        if wanted.joined and not self._roles.can_tell:
            return
        with suppress(RemoteProtocolError):
            if not (wanted.cuts or wanted.stages):  # a member joins and no layer moves
                successor(plan, wanted)
                self._proposer.recut, self._proposer.deadline = wanted, 0.0
                return
            # Check the change with a placeholder checkpoint.
            successor(plan, replace(wanted, restored=plan_hash(plan)))
            self.recutting.begin(wanted)
            self._events.append(PauseWanted())

    def checkpointed(self, now: float) -> None:
        """As the committer: note that a checkpoint is whole, on several disks. A change of borders may be
        waiting for it."""
        plan = self._plan()
        if plan is None or self._proposer.recut is not None:
            return
        change = self.recutting.saved(self._restorable())
        if change is not None and change.stages:
            self.heard(now, change)  # only the committer asks the newcomers
        elif change is not None:
            self._wish(now, Recut(plan_hash(plan), change.step, change.restored, change.cuts))

    def bring_back(self, now: float, checkpoint: bytes, step: int) -> None:
        """As the committer, after the last step: make the state in this checkpoint, after `step` steps, the
        result."""
        plan = self._committed_plan()
        if plan is not None:
            self._wish(now, Recut(plan_hash(plan), step, checkpoint, (), is_final=True))

    def _wish(self, now: float, message: Recut) -> None:
        """Announce this change to all members, and propose it."""
        self._tell(message)
        self.heard(now, message.change)

    def heard(self, now: float, change: Change) -> None:
        """Propose a change that the committer announced."""
        self._proposer.recut = change
        self._proposer.changed(now)

    def give_up(self) -> None:
        """As the committer: keep the present borders."""
        self.recutting.end()
        self._proposer.give_up_recut()
        if self._proposer.recut is None:  # a change that was already announced will still be decided
            self._events.append(StepsWanted())
