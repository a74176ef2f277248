"""Collects the events of a demo and derives `result.json` from them. No I/O.

It has no clock. All times are wall-clock times of one machine, taken at the trainer's node or at the kill.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from node.text import counted

Event = Mapping[str, Any]

ACCURACY_MIN = 0.97
PREFERRED_VICTIM = "c"
"""The node to kill, if possible. It is in the middle of the chain of joins, so visibly not a leaf."""
KILL_AT = 0.4
"""Share of the steps after which a replica is killed."""


@dataclass(frozen=True)
class Victim:
    """The replica to kill: a node's name and peer id, and its stage, counted from 0."""

    name: str
    peer: str
    stage: int


def choose_victim(plan: Event, names: Mapping[str, str]) -> Victim | None:
    """Return a replica that is not the trainer and whose stage has another replica. `names` are by peer id.

    Return None if the plan has no such replica, because any kill would then end the run.
    """
    victims = [
        Victim(names[peer], peer, stage)
        for stage, replicas in enumerate(plan["stages"])
        for peer in replicas
        if len(replicas) > 1 and peer != plan["trainer"] and peer in names
    ]
    return min(victims, key=lambda victim: (victim.name != PREFERRED_VICTIM, victim.name), default=None)


class Story:
    """The story of one run, collected from its events in order. `result` summarizes it."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.plan: Event | None = None
        self.committed: list[Event] = []
        self.victim: Victim | None = None
        self.killed_at: float | None = None
        self.lost: Event | None = None
        self.dropped: Event | None = None
        self.evaluated: Event | None = None
        self.ended: Event | None = None
        self._committed_when_dropped = 0

    def take(self, event: Event) -> None:
        """Handle an event of the run, or of the membership at the trainer's node."""
        match event["kind"]:
            case "RunPlanned" if self.plan is None:  # later plans lack the victim
                self.plan = event
            case "StepCommitted":
                self.committed.append(event)
            case "MemberLost" if self.victim is not None and event["peer"] == self.victim.peer:
                self.lost = self.lost or event
            case "ReplicaDropped" if self.victim is not None and event["peer"] == self.victim.peer:
                self.dropped = event
                self._committed_when_dropped = len(self.committed)
            case "RunEvaluated":
                self.evaluated = event
            case "RunEnded":
                self.ended = event

    def killed(self, victim: Victim, at_seconds: float) -> None:
        """Record that the victim was killed at `at_seconds` (Unix time)."""
        self.victim, self.killed_at = victim, at_seconds

    @property
    def is_time_to_kill(self) -> bool:
        """Return whether enough steps are done and no node was killed yet."""
        return self.victim is None and len(self.committed) >= max(1, round(self.steps * KILL_AT))

    @property
    def has_recovered(self) -> bool:
        """Return whether a step was committed without the victim."""
        return self.dropped is not None and len(self.committed) > self._committed_when_dropped

    @property
    def losses(self) -> list[float]:
        """Return the mean loss of each committed step."""
        return [event["loss"] for event in self.committed]

    @property
    def steps_before_kill(self) -> int:
        """Return the number of steps committed before the kill, or of all steps if there was no kill."""
        if self.killed_at is None:
            return len(self.committed)
        return sum(event["at_seconds"] <= self.killed_at for event in self.committed)

    @property
    def detected_seconds(self) -> float | None:
        """Return the seconds from the kill to its detection by SWIM at the trainer's node."""
        if self.lost is None or self.killed_at is None:
            return None
        return float(self.lost["at_seconds"]) - self.killed_at

    @property
    def failover_seconds(self) -> float | None:
        """Return the seconds from the last step before the victim was dropped to the next step."""
        if not self.has_recovered or not self._committed_when_dropped:
            return None
        before, after = self.committed[self._committed_when_dropped - 1 : self._committed_when_dropped + 1]
        return float(after["at_seconds"] - before["at_seconds"])

    @property
    def train_seconds(self) -> float:
        """Return the seconds from the feeding of the first step to the commit of the last."""
        if not self.committed:
            return 0.0
        first, last = self.committed[0], self.committed[-1]
        return float(last["at_seconds"] - first["at_seconds"] + first["seconds"])

    @property
    def missing(self) -> str | None:
        """Return what the demo failed to show, or None."""
        if len(self.committed) != self.steps:
            return f"{len(self.committed)} of {counted(self.steps, 'step was', 'steps were')} committed"
        if [event["step"] for event in self.committed] != list(range(self.steps)):
            return "the steps did not come one after another"
        if self.victim is None or self.detected_seconds is None or self.failover_seconds is None:
            return "no replica was lost and replaced"
        if self.evaluated is None:
            return "the run was not evaluated"
        if self.evaluated["accuracy"] < ACCURACY_MIN:
            accuracy, samples = self.evaluated["accuracy"], self.evaluated["samples"]
            return f"accuracy {accuracy:.3f} on {samples} unseen digits; at least {ACCURACY_MIN} was wanted"
        return None

    def result(self) -> dict[str, Any]:
        """Return `result.json` without the values that only the command knows (files, total time); schema
        `peerloom/demo/1`."""
        stages = self.plan["stages"] if self.plan else []
        peers = {peer for replicas in stages for peer in replicas} | (
            {self.plan["trainer"]} if self.plan else set()
        )
        return {
            "schema": "peerloom/demo/1",
            "run": self.plan["run"] if self.plan else None,
            "accuracy": self.evaluated["accuracy"] if self.evaluated else None,
            "test_samples": self.evaluated["samples"] if self.evaluated else 0,
            "peers": len(peers),
            "stages": len(stages),
            "replicas": min((len(replicas) for replicas in stages), default=0),
            "killed": self.victim.peer if self.victim else None,
            "killed_name": self.victim.name if self.victim else None,
            "killed_stage": self.victim.stage if self.victim else None,
            "detected_seconds": _rounded(self.detected_seconds),
            "failover_seconds": _rounded(self.failover_seconds),
            "microbatches_replayed": self.dropped["microbatches_replayed"] if self.dropped else 0,
            "steps_before_kill": self.steps_before_kill,
            "steps_after_kill": len(self.committed) - self.steps_before_kill,
            "loss_first": self.losses[0] if self.committed else None,
            "loss_last": self.losses[-1] if self.committed else None,
            "seconds": _rounded(self.train_seconds),
        }


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)
