"""The rounds of averaging that nodes of a test hold, with the numbers in them, which no event has."""

from dataclasses import dataclass

import trio

from crypto.identity import PeerId
from gossip.averaging.robust.reduction import Vector
from node.averaging.participation import Participation
from node.averaging.rounds import Round, RoundWish


@dataclass(frozen=True, eq=False)
class HeldRound:
    """A round of one member: what it offered at which weight, and the result. It began at `begun_at`, by
    trio's clock."""

    begun_at: float
    run: str
    peer: PeerId
    offered: Vector
    weight: float
    made: Round


class HeardRounds(list[HeldRound]):
    """All rounds of the nodes that have `parts`, oldest first."""

    @property
    def parts(self) -> dict[type, type]:
        """Return the classes of a node whose rounds are heard."""
        heard = self

        class HeardParticipation(Participation):
            async def average(self, vector: Vector | None, weight: float, wanted: RoundWish) -> Round:
                begun_at = trio.current_time()
                made = await super().average(vector, weight, wanted)
                assert vector is not None, "a member in local mode has one"
                heard.append(HeldRound(begun_at, self.name, self.peer, vector, weight, made))
                return made

        return {Participation: HeardParticipation}
