"""Verdicts on a committer's events under one plan: which peers are lost, and whether training is over."""

from dataclasses import dataclass

from crypto.identity import PeerId
from partition.plan.plan import Plan
from partition.run.failures import Failures
from partition.steps.committer_events import Event, ReplicaFailed, TrainingEvaluated, TrainingFailed
from partition.steps.messages import Synced


@dataclass(frozen=True)
class PeersLost:
    """The next plan must drop these peers."""

    peers: tuple[PeerId, ...]
    reason: str


@dataclass(frozen=True)
class TrainingOver:
    """The last step is committed and evaluated; or `reason` is why it never will be."""

    reason: str | None


class Verdicts:
    """The committer's verdicts under one plan. The driver calls `late` once all replicas should be open."""

    def __init__(self, plan: Plan, failures: Failures) -> None:
        """`failures` also counts the failures under earlier plans."""
        self._plan = plan
        self._failures = failures
        self._synced: set[PeerId] = set()

    def heard(self, sender: PeerId, message: object) -> None:
        """Note a replica's message to the committer."""
        if isinstance(message, Synced):
            self._synced.add(sender)

    def late(self, phase: str, seconds: float) -> PeersLost:
        """Return the replicas that have not opened their stage after `seconds`. `phase` is the committer's
        phase."""
        replicas = {PeerId(peer) for stage in self._plan.stages for peer in stage.replicas}
        late = sorted(replicas - self._synced) if phase == "syncing" else ()
        return PeersLost(tuple(late), f"its stage was not open after {seconds:.0f} s")

    def judge(self, event: Event) -> PeersLost | TrainingOver | None:
        """Return the verdict on a committer's event; None if the run continues unchanged."""
        match event:
            case TrainingEvaluated():
                return TrainingOver(None)
            case TrainingFailed(stage=None):
                return TrainingOver(event.reason)
            case TrainingFailed(stage=int() as stage):
                # The stage has replicas, but none of them has its parameters: treat it as a lost stage.
                peers = tuple(PeerId(peer) for peer in self._plan.stages[stage].replicas)
                return PeersLost(peers, event.reason)
            case ReplicaFailed():
                over = self._failures.note(event.peer, event.step, event.reason)
                return PeersLost((event.peer,), event.reason) if over is None else TrainingOver(over)
        return None
