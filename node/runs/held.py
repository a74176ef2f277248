"""The stages that this node holds and its free slots, as announced to other nodes."""

from collections.abc import Iterable, Mapping

from crypto.identity import PeerId
from node.protocols.runs import RUNS_WORD
from node.runs.member import RunMember
from node.runs.runs import Runs
from node.services.capacity import Capacity
from node.services.metadata import STAGES, AdvertisedStanding
from node.services.standing import look_at


def standing_of(
    told: AdvertisedStanding | None,
    capacity: Capacity,
    words: Mapping[str, bool],
    runs: Runs | None,
    me: PeerId,
    *,
    slots: int,
    is_measured: bool,
) -> AdvertisedStanding:
    """Return the node's standing. Before there are `runs`, it holds no stages and all its `slots` are
    free."""
    slots_free = (slots if runs is None else runs.slots.free) if words[STAGES] else 0
    held = [] if runs is None else stages_held(runs.members.values(), me)
    words = {RUNS_WORD: True, **words}
    return look_at(told, capacity, words, slots_free, held, is_measured=is_measured)


def stages_held(members: Iterable[RunMember], me: PeerId) -> list[tuple[str, int]]:
    """Return (run, stage) for each stage that is open here or being opened."""
    held = []
    for member in members:
        stage = member.plan.stage_of(me) if member.hosts and member.plan is not None else None
        if stage is not None:
            held.append((member.run.text, stage))
    return held
