"""Records the averaging rounds of a test's nodes, with the tensor values, which no event contains."""

from dataclasses import dataclass

import trio

from crypto.identity import PeerId
from gossip.averaging.robust.reduction import Vector
from node.averaging.participation import Participation
from node.averaging.rounds import Round, RoundWish


@dataclass(frozen=True, eq=False)
class HeldRound:
    """A round of one member: the vector that it offered, with which weight, and the result. `begun_at` is
    trio's clock at the start."""

    begun_at: float
    run: str
    peer: PeerId
    offered: Vector
    weight: float
    made: Round


class HeardRounds(list[HeldRound]):
    """All rounds of the nodes that are started with `parts`, oldest first."""

    @property
    def parts(self) -> dict[type, type]:
        """Return the node classes that record rounds."""
        heard = self

        class HeardParticipation(Participation):
            async def average(self, vector: Vector | None, weight: float, wanted: RoundWish) -> Round:
                begun_at = trio.current_time()
                made = await super().average(vector, weight, wanted)
                assert vector is not None, "a member in local mode offered no vector"
                heard.append(HeldRound(begun_at, self.name, self.peer, vector, weight, made))
                return made

        return {Participation: HeardParticipation}
