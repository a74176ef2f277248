"""The settings of a run's members, all times in seconds: purpose, bounds against other settings, a good
value.

One value is passed to every core and driver of a node (`node.runtime`, `sim.worlds`).
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class RunSettings:
    """How long the members of a run wait for each other. Raises ValueError for contradictory settings."""

    lease_seconds_max: float = 30.0
    """Time limit of a provider's answer to a request for a slot; it fetches and checks the model's graph
    first. 30."""

    witness_seconds_max: float = 5.0
    """Time limit of a witness's answer. It fetches and checks nothing first, and a silent one must not delay
    a placement. At most a lease. 5."""

    prepare_seconds_max: float = 120.0
    """Time limit of a newcomer to open a stage before its plan is proposed. At least a lease. 120."""

    start_seconds_max: float = 120.0
    """Time limit of a replica to open its stage under a plan in force. Opening imports torch, which takes
    seconds on a cold, busy machine. 120."""

    renew_seconds: float = 20.0
    """Interval at which a committer renews the run, and learns which members forgot it; a step may take
    minutes. 20."""

    renew_seconds_max: float = 10.0
    """Time limit of the answer to a renewal. At most `renew_seconds`, since later answers are ignored. 10."""

    silence_seconds_max: float = 240.0
    """Silence of a run after which its stage is closed and its slot is free again. More than a committer's
    silence, so that the others find another committer first. At least 1, since providers promise slots for
    whole seconds. 240."""

    committer_silence_seconds_max: float = 150.0
    """Silence of a living committer after which it counts as restarted, having forgotten the run. More than
    `start_seconds_max`, the longest opening of a stage. 150."""

    left_seconds: float = 60.0
    """Time without a renewal after which a living committer may have left this branch; a member that hears of
    another branch then follows that one. At least two renewals, since one may be lost. 60."""

    pause_seconds_max: float = 3_600.0
    """How long a minority waits for the others before it frees its slots. At least the silence that a
    majority tolerates. 3,600."""

    busy_seconds_min: float = 2.0
    """Interval before a provider that declined is asked again: it may have a free slot by then. 2."""

    busy_seconds: float = 30.0
    """The longest such interval, for a provider that declines repeatedly. At least `busy_seconds_min`, from
    which the interval doubles. 30."""

    refused_seconds: float = 60.0
    """Interval before a member without room for more layers is asked again: its owner may give more. 60."""

    new_member_grace_seconds: float = 30.0
    """How long a member that was never heard of counts as living. 30."""

    refill_seconds: float = 10.0
    """How long a stage that lacks a replica waits for the situation to settle before another is asked for.
    Less than `lost_seconds_max`; a lost stage is reported after this time. 10."""

    lost_seconds_max: float = 120.0
    """How long a lost stage without a checkpoint is awaited: its last replica may only be unreachable. At
    most `pause_seconds_max`. 120."""

    end_seconds_max: float = 60.0
    """Time limit of a member's answer to EndRun; it fetches the weights first. 60."""

    retry_seconds: float = 1.0
    """Interval between two attempts to tell a member the end of the run. Less than `end_seconds_max`. 1."""

    drop_seconds_max: float = 10.0
    """How long a member that has dropped a run still votes on the plan without it. 10."""

    leave_seconds_max: float = 8.0
    """How long a leaving member waits for a plan without it: a person waits for it to go. If that is too
    short to replace its stage, the others continue as after its death. 8."""

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
        """Return the next interval for a provider that declines, after the interval `last_seconds`, 0 for
        none."""
        return min(max(2 * last_seconds, self.busy_seconds_min), self.busy_seconds)
