"""The settings of a run's members, all times in seconds: what each does, its bounds against its siblings, a
good value.

One value is given to every core and driver of a node from the top (`node.runtime`, `sim.worlds`).
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class RunSettings:
    """How long the members of a run wait for each other. Raises ValueError where they contradict each
    other."""

    lease_seconds_max: float = 30.0
    """How long a provider may take to answer a request for a slot: it fetches and checks the model's graph
    before. 30."""

    witness_seconds_max: float = 5.0
    """How long a witness may take to agree: it has nothing to fetch or check before, and a silent one must
    not hold a placement up. At most a lease. 5."""

    prepare_seconds_max: float = 120.0
    """How long a newcomer may take to open a stage before its plan is proposed. At least a lease. 120."""

    start_seconds_max: float = 120.0
    """How long a replica may take to open its stage under a plan in force: opening imports torch, which takes
    seconds on a cold, busy machine. 120."""

    renew_seconds: float = 20.0
    """How often a committer says that the run goes on, and hears who has forgotten it: a step may take
    minutes. 20."""

    renew_seconds_max: float = 10.0
    """How long the answer to that may take. At most `renew_seconds`, for a later answer is not looked at.
    10."""

    silence_seconds_max: float = 240.0
    """After so long without news of a run its stage is closed and its slot is free again. More than a
    committer's silence, so that the others find another committer first; providers promise slots for whole
    seconds, so at least 1. 240."""

    committer_silence_seconds_max: float = 150.0
    """A committer that lives but says nothing for so long has forgotten the run: it was restarted. More than
    `start_seconds_max`, the longest time that a stage is being opened. 150."""

    left_seconds: float = 60.0
    """A committer that lives and has not renewed the run for so long may have left this branch of it: a
    member that hears of another branch meanwhile follows that one. At least two renewals, for one may be
    lost. 60."""

    pause_seconds_max: float = 3_600.0
    """How long a minority waits for the others before it gives its slots back. At least the silence that a
    majority bears. 3,600."""

    busy_seconds_min: float = 2.0
    """A provider that declined is asked again after so long: what it holds may have been given back since.
    2."""

    busy_seconds: float = 30.0
    """One that declines again and again is asked at most so often. At least `busy_seconds_min`, from which
    the wait doubles. 30."""

    refused_seconds: float = 60.0
    """A member without room for more layers is asked again after so long: its owner may give more. 60."""

    new_member_grace_seconds: float = 30.0
    """A member that has not been heard of at all counts as living for so long. 30."""

    refill_seconds: float = 10.0
    """A stage short of a replica waits so long for the dust to settle before another is asked for. Less than
    a lost stage's wait, which begins to be reported after it. 10."""

    lost_seconds_max: float = 120.0
    """A stage whose last replica is gone, and no checkpoint has it: so long it may come back, for it may only
    be out of reach. At most `pause_seconds_max`. 120."""

    end_seconds_max: float = 60.0
    """How long a member may take to answer an End: it fetches the weights before. 60."""

    retry_seconds: float = 1.0
    """Between two attempts to tell a member the end of the run. Less than `end_seconds_max`. 1."""

    drop_seconds_max: float = 10.0
    """How long a member that has dropped a run still votes on the plan without it. 10."""

    leave_seconds_max: float = 8.0
    """How long a member that wants to leave waits for a plan without it: a person waits for it to go. Where
    that is too short for another to take up its stage, the others go on as after its death. 8."""

    def __post_init__(self) -> None:
        bounds = (
            (0 < self.witness_seconds_max <= self.lease_seconds_max, "a witness at most lease"),
            (0 < self.lease_seconds_max <= self.prepare_seconds_max, "lease at most prepare"),
            (self.start_seconds_max > 0, "start above 0"),
            (0 < self.renew_seconds_max <= self.renew_seconds, "an answer to a renewal before the next"),
            (self.left_seconds >= 2 * self.renew_seconds, "left after two renewals"),
            (
                self.committer_silence_seconds_max > self.start_seconds_max,
                "a committer's silence above start",
            ),
            (
                self.silence_seconds_max > max(1.0, self.committer_silence_seconds_max),
                "silence above a committer's",
            ),
            (self.pause_seconds_max >= self.silence_seconds_max, "pause at least silence"),
            (0 < self.busy_seconds_min <= self.busy_seconds, "busy at least its minimum"),
            (self.refused_seconds > 0, "refused above 0"),
            (self.new_member_grace_seconds >= 0, "grace at least 0"),
            (0 < self.refill_seconds < self.lost_seconds_max, "refill below lost"),
            (self.lost_seconds_max <= self.pause_seconds_max, "lost at most pause"),
            (0 < self.retry_seconds < self.end_seconds_max, "retry below end"),
            (self.drop_seconds_max > 0, "drop above 0"),
            (self.leave_seconds_max > 0, "leave above 0"),
        )
        for holds, rule in bounds:
            if not holds:
                raise ValueError(f"run settings: {rule}")

    def next_busy_seconds(self, last_seconds: float) -> float:
        """Return how long to leave a provider alone that declines, after it was left alone for
        `last_seconds` before, 0 for not at all."""
        return min(max(2 * last_seconds, self.busy_seconds_min), self.busy_seconds)
