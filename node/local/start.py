"""The start of a member of a run in local mode, which waits for training members and for its inviter.

Not here: how long it waits (`partition.run.local.start_barrier`).
"""

from collections.abc import Callable, Collection

from crypto.identity import PeerId
from node.averaging.door import TicketGate
from node.averaging.participation import Participation
from node.local.courses import follow
from partition.run.local.crew import MemberCrew
from partition.run.local.start_barrier import SETTLE_SECONDS, GreetPeers, Settle, StartBarrier


async def meet(
    barrier: StartBarrier,
    crew: MemberCrew,
    stage: int,
    part: Participation,
    door: TicketGate,
    live: Callable[[], Collection[PeerId]],
    now: Callable[[], float],
) -> None:
    """Wait for members that already train, and for a report of the member that asked this node to take
    part."""

    async def do(deed: Settle | GreetPeers) -> None:
        if isinstance(deed, Settle):
            await part.settle(SETTLE_SECONDS)
        else:
            door.greet(deed.peers)

    await follow(barrier.meet(crew, stage, live, now), do)
