"""The rule by which a holder takes the place of its head, once the head is gone for good and no other node
comes for that place.

The head asks the holder of the second stage to keep copies of the first stage, so that one death loses no
stage. A free node found by a requester has priority (`partition.run.local.lending`), because it need not hold
two stages in its memory.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass

from crypto.identity import PeerId
from partition.run.local.courses import Course, Sleep
from partition.run.local.crew import MemberCrew
from partition.run.local.due import Due
from partition.run.local.keeping import StageCopying

GONE_SECONDS = 2.0
"""How long a holder waits after its head has died, because the head may restart soon."""
FREE_SECONDS = 20.0
"""How long a holder waits if a free node could become the head and somebody asks it."""
LOOK_SECONDS = 0.5


@dataclass(frozen=True)
class FindGone:
    """Find out whether a head is dead, from membership or its host. The answer is whether it is."""

    head: PeerId


class SuccessionRule:
    """The rule for one holder. `has_copy`: it has a copy of the first stage."""

    def __init__(
        self,
        crew: MemberCrew,
        copying: StageCopying,
        *,
        requester: PeerId,
        live: Callable[[], Collection[PeerId]],
        offering: Callable[[], Collection[PeerId]],
    ) -> None:
        """`live` returns the live nodes, `offering` those among them that offer a slot."""
        self.has_copy = False
        self._copying = copying
        self._crew = crew
        self._requester = requester
        self._live = live
        self._offering = offering
        self._due = Due()

    def watch(self) -> Course[None]:
        """Keep copies for the head; return once the head is gone for good and this member can take its
        place."""
        while True:
            missed = self._missed_head(self._copying.now())
            if missed is not None and (yield FindGone(missed)):
                return
            if self._keeps and (head := self._crew.head) is not None:
                has_copy = yield from self._copying.copy(0, head)
                self.has_copy = self.has_copy if has_copy is None else has_copy
            yield Sleep(LOOK_SECONDS)

    def _has_others(self) -> bool:
        """Return whether another node may become the head: a free one, which the requester or the head of
        another column asks. A node that uses its slot offers it all the same, so members of the run do not
        count as free."""
        pair = {self._crew.me, *(seat.last_head for seat in self._crew.seats if seat.last_head is not None)}
        has_requester = self._requester not in pair and self._requester in self._live()
        has_asker = has_requester or bool(self._crew.training)
        return has_asker and not {*pair, *self._crew.admitted()}.issuperset(self._offering())

    @property
    def _keeps(self) -> bool:
        return any(seat.keeps_copies for seat in self._crew.seats)

    def _missed_head(self, now: float) -> PeerId | None:
        """Return the head that must be replaced if it is really gone; None while there is a head, or while
        others have priority."""
        is_due = self._crew.head is None and self.has_copy and self._keeps
        waited = self._due.waited(now, "a head", is_due)
        if waited < GONE_SECONDS or (waited < FREE_SECONDS and self._has_others()):
            return None
        return next((seat.last_head for seat in self._crew.seats if seat.last_head), None)
