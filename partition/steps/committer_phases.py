"""The phases of a committer, and what is timed in them."""

from typing import Literal

DISSENTS_MAX = 2
"""Times the replicas of a stage may reach different totals: a broken transfer, not a broken machine."""
SYNC_AGAIN_SECONDS = 2.0
"""A replica learns of its plan by another way than the Sync, and ignores one that is ahead of it."""
OPEN_AGAIN_SECONDS = 10.0
"""The same for trainers, who answer nothing: when all has been silent for so long."""
STALL_CHECK_SECONDS = 1.0

Phase = Literal[
    "syncing",
    "filling",
    "counting",
    "committing",
    "applying",
    "paused",
    "evaluating",
    "restoring",
    "done",
    "failed",
]
"""`evaluating` comes before a step too, where its validation is due. `restoring`: the steps are done, and
the state that validated best is to come back, by a plan that restores it."""
