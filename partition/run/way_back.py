"""Where a run goes back to when a stage has lost its last replica. A pure rule.

The newest checkpoint that is whole, else the first values of all stages, which every member can make itself.
"""

from partition.plan.plan import FIRST_VALUES, Plan

WayBack = tuple[bytes, int]
"""The name of a checkpoint, FIRST_VALUES where there is none, and after how many steps it was made."""


def way_back(newest: WayBack | None, plan: Plan | None, furthest: int, save_every: int) -> WayBack | None:
    """Return what a stage without a replica is restored from, None if there is nothing.

    `newest` is the newest whole checkpoint that this member knows of. Without one the run may begin anew
    under its first `plan`, as long as at most `save_every` steps (0: no checkpoints are made) would be
    computed again. Under a later plan it may not: a member that has missed the news of a checkpoint for long
    has missed a plan too, and would throw the work of others away.
    """
    if newest is not None:
        return newest
    is_young = plan is not None and not plan.height and furthest <= save_every
    return (FIRST_VALUES, 0) if is_young and save_every else None
