"""The settings of a run's members: how long they wait for each other. All times are in seconds. Each
docstring states the purpose, the bounds that other settings impose, and last a good value.

One value is passed to every core and driver of a node (`node.runtime`, `sim.worlds`).
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class RunSettings:
    """How long the members of a run wait for each other. Raises ValueError for contradictory settings."""

    lease_seconds_max: float = 30.0
    """How long to wait for a provider's answer to a request for a slot. The provider first fetches and checks
    the model's graph. 30."""

    witness_seconds_max: float = 5.0
    """How long to wait for a witness's answer. It fetches and checks nothing first, and a silent witness must
    not delay a placement. At most `lease_seconds_max`. 5."""

    prepare_seconds_max: float = 120.0
    """How long to wait for a newcomer to open a stage before its plan is proposed. At least
    `lease_seconds_max`. 120."""

    start_seconds_max: float = 120.0
    """How long to wait for a replica to open its stage under a plan in force. Opening imports torch, which
    takes several seconds on a busy machine that has not imported it yet. 120."""

    renew_seconds: float = 20.0
    """Seconds between renewals. A committer renews the run and so learns which members have forgotten it,
    even if a step takes minutes. 20."""

    renew_seconds_max: float = 10.0
    """How long to wait for the answer to a renewal. At most `renew_seconds`, because later answers are
    ignored. 10."""

    silence_seconds_max: float = 240.0
    """How long a run may be silent before its stage is closed and its slot is free again. More than
    `committer_silence_seconds_max`, so that the others find a new committer first. At least 1, because
    providers promise slots for whole seconds. 240."""

    committer_silence_seconds_max: float = 150.0
    """How long a live committer may be silent before the members assume that it was restarted and has
    forgotten the run. More than `start_seconds_max`, the longest opening of a stage. 150."""

    left_seconds: float = 60.0
    """How long a live committer may send no renewal before it may have left this branch. A member that
    hears of a different branch then follows that branch. At least two renewals, because one may be lost.
    60."""

    pause_seconds_max: float = 3_600.0
    """How long a minority waits for the others before it frees its slots. At least `silence_seconds_max`,
    the silence that a majority tolerates. 3,600."""

    busy_seconds_min: float = 2.0
    """How long to wait before a provider that declined is asked again. It may have a free slot by then. 2."""

    busy_seconds: float = 30.0
    """Maximum of this wait, which doubles from `busy_seconds_min` for a provider that declines repeatedly. At
    least `busy_seconds_min`. 30."""

    refused_seconds: float = 60.0
    """How long to wait before a member without room for more layers is asked again. Its owner may allow more
    by then. 60."""

    new_member_grace_seconds: float = 30.0
    """How long a member that this node has never heard of counts as live. 30."""

    refill_seconds: float = 10.0
    """How long a stage that lacks a replica waits before a new one is sought, so that the situation can
    settle. Less than `lost_seconds_max`. A lost stage is reported after this time. 10."""

    lost_seconds_max: float = 120.0
    """How long to wait for a stage that was lost without a checkpoint, because its last replica may only be
    unreachable. At most `pause_seconds_max`. 120."""

    end_seconds_max: float = 60.0
    """How long to wait for a member's answer to EndRun. The member fetches the weights first. 60."""

    retry_seconds: float = 1.0
    """Seconds between two attempts to tell a member about the end of the run. Less than `end_seconds_max`.
    1."""

    drop_seconds_max: float = 10.0
    """How long a member that has dropped a run still votes on the plan without this member. 10."""

    leave_seconds_max: float = 8.0
    """How long a leaving member waits for a plan without this member. A person is waiting for the node to
    stop. If its stage cannot be replaced within this time, the others continue as after a death. 8."""

    def __post_init__(self) -> None:
        bounds = (
            (
                0 < self.witness_seconds_max <= self.lease_seconds_max,
                "witness_seconds_max must be at most lease_seconds_max",
            ),
            (
                0 < self.lease_seconds_max <= self.prepare_seconds_max,
                "lease_seconds_max must be at most prepare_seconds_max",
            ),
            (self.start_seconds_max > 0, "start_seconds_max must be above 0"),
            (
                0 < self.renew_seconds_max <= self.renew_seconds,
                "renew_seconds_max must be at most renew_seconds",
            ),
            (
                self.left_seconds >= 2 * self.renew_seconds,
                "left_seconds must be at least twice renew_seconds",
            ),
            (
                self.committer_silence_seconds_max > self.start_seconds_max,
                "committer_silence_seconds_max must be above start_seconds_max",
            ),
            (
                self.silence_seconds_max > max(1.0, self.committer_silence_seconds_max),
                "silence_seconds_max must be above committer_silence_seconds_max and 1",
            ),
            (
                self.pause_seconds_max >= self.silence_seconds_max,
                "pause_seconds_max must be at least silence_seconds_max",
            ),
            (
                0 < self.busy_seconds_min <= self.busy_seconds,
                "busy_seconds must be at least busy_seconds_min",
            ),
            (self.refused_seconds > 0, "refused_seconds must be above 0"),
            (self.new_member_grace_seconds >= 0, "new_member_grace_seconds must be at least 0"),
            (
                0 < self.refill_seconds < self.lost_seconds_max,
                "refill_seconds must be below lost_seconds_max",
            ),
            (
                self.lost_seconds_max <= self.pause_seconds_max,
                "lost_seconds_max must be at most pause_seconds_max",
            ),
            (0 < self.retry_seconds < self.end_seconds_max, "retry_seconds must be below end_seconds_max"),
            (self.drop_seconds_max > 0, "drop_seconds_max must be above 0"),
            (self.leave_seconds_max > 0, "leave_seconds_max must be above 0"),
        )
        for holds, rule in bounds:
            if not holds:
                raise ValueError(f"run settings: {rule}")

    def next_busy_seconds(self, last_seconds: float) -> float:
        """Return the next wait for a provider that declined again after waiting `last_seconds`, 0 if it has
        not declined before."""
        return min(max(2 * last_seconds, self.busy_seconds_min), self.busy_seconds)
