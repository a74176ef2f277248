"""How long members of a run wait for each other, in seconds."""

LEASE_SECONDS_MAX = 30.0
"""A provider fetches and checks the model's graph before it answers."""
PREPARE_SECONDS_MAX = 120.0
START_SECONDS_MAX = 120.0
"""Opening a stage imports torch, which takes seconds on a cold, busy machine."""
RENEW_SECONDS = 20.0
"""How often a committer says that the run goes on, and hears who has forgotten it: a step may take
minutes."""
RENEW_SECONDS_MAX = 10.0
SILENCE_SECONDS_MAX = 2 * START_SECONDS_MAX
"""After so long without news of a run its stage is closed and its slot is free again. Time enough for the
others to find another committer first."""
COMMITTER_SILENCE_SECONDS_MAX = START_SECONDS_MAX + 30
"""A committer that lives but says nothing for so long has forgotten the run: it was restarted."""
LEFT_SECONDS = 3 * RENEW_SECONDS
"""A committer that lives and has not renewed the run for so long may have left this branch of it: a member
that hears of another branch meanwhile follows that one."""
PAUSE_SECONDS_MAX = 3_600.0
"""How long a minority waits for the others before it gives its slots back."""
BUSY_SECONDS_MIN = 2.0
"""A provider that declined is asked again after so long: what it holds may have been given back since."""
BUSY_SECONDS = 30.0
"""One that declines again and again, at most so often."""
REFUSED_SECONDS = 60.0
"""A member without room for more layers is asked again after so long: its owner may give more."""
NEW_MEMBER_GRACE_SECONDS = 30.0
"""A member that has not been heard of at all counts as living for so long."""
REFILL_SECONDS = 10.0
"""A stage short of a replica waits so long for the dust to settle before another is asked for."""
LOST_SECONDS_MAX = 120.0
"""A stage whose last replica is gone, and no checkpoint has it: so long it may come back, for it may only be
out of reach."""
END_SECONDS_MAX = 60.0
"""A member fetches the weights before it answers an End."""
RETRY_SECONDS = 1.0
"""Between two attempts to tell a member the end of the run."""
DROP_SECONDS_MAX = 10.0
"""How long a member that has dropped a run still votes on the plan without it."""
LEAVE_SECONDS_MAX = 8.0
"""How long a member that wants to leave waits for a plan without it: a person waits for it to go. Where that
is too short for another to take up its stage, the others go on as after its death."""
