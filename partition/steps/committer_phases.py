"""The phases of a committer, and their timing."""

from typing import Literal

DISSENTS_MAX = 2
"""Number of times that a reduction is repeated because replicas of a stage reached different totals. A broken
transfer may cause this many failures; if there are more, a machine is at fault."""
SYNC_AGAIN_SECONDS = 2.0
"""Seconds between Syncs. A replica learns of its plan from a different message, and ignores a Sync that
arrives earlier."""
OPEN_AGAIN_SECONDS = 10.0
"""How long there must be silence before an Open is repeated for trainers, which do not answer it."""
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
"""`evaluating` also precedes a step if a validation is due. `restoring`: the steps are done, and a new plan
will restore the state with the best validation."""
