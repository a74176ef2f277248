"""The phases of a committer, and their timing."""

from typing import Literal

DISSENTS_MAX = 2
"""Times the replicas of a stage may reach different totals: a broken transfer, not a broken machine."""
SYNC_AGAIN_SECONDS = 2.0
"""Interval of Syncs: a replica learns of its plan by another message, and ignores a Sync that arrives before
it."""
OPEN_AGAIN_SECONDS = 10.0
"""The same for trainers, which answer nothing: sent after a long silence."""
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
"""`evaluating` comes before a step too, where its validation is due. `restoring`: the steps are done, and a
plan is to restore the state that validated best."""
