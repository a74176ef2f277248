"""Which nodes a member of a run in local mode asks to take part, and for which stage."""

from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import Protocol

import trio

from crypto.identity import PeerId
from node.averaging.door import Door
from node.errors import Unreachable
from node.local.context import Service
from node.protocols.manifest import Run
from node.protocols.runs import Join
from partition.run.asks import Done

RECRUIT_SECONDS = 3.0
"""Between two looks for nodes that could take part."""
LOOK_SECONDS = 0.5
"""Where a stage is missing, a look is so soon."""
DECLINED_SECONDS = 30.0
"""A node that declined is asked again after so long."""
COMING_SECONDS = 20.0
"""How long a node that agreed to hold a stage has to open it and take over the state of others."""
JOIN_SECONDS_MAX = 30.0


class Asker(Protocol):
    """The member. `missing` are the stages that its own column lacks; `wanted` says how many heads more the
    run can use, so many nodes being free, 0 where another member sees to that; `known` are nodes that need
    not be asked; `heads` counts those that there are, `holders` are other members, also those that are gone.
    `joined` hears of a node that will hold a stage, `asked` that all that could were asked."""

    @property
    def missing(self) -> Sequence[int]: ...
    @property
    def known(self) -> Collection[PeerId]: ...
    @property
    def heads(self) -> int: ...
    @property
    def holders(self) -> Collection[PeerId]: ...
    def wanted(self, free: int) -> int: ...
    def joined(self, stage: int, peer: PeerId) -> None: ...
    def asked(self) -> None: ...


class Recruiter:
    """Recruits for one member."""

    def __init__(
        self,
        service: Service,
        run: Run,
        door: Door,
        member: Asker,
        stages: int,
    ) -> None:
        self._member = member
        self._coming: dict[int, tuple[PeerId, float]] = {}
        self._service = service
        self._run = run
        self._door = door
        self._stages = stages
        self._declined: dict[PeerId, float] = {}

    async def run(self) -> None:
        """Ask nodes with a free slot to take part, until cancelled."""
        while True:
            for stage, peer in self.candidates():
                self._declined[peer] = trio.current_time() + DECLINED_SECONDS
                chain = self._door.chain_for(peer)
                if chain is None:
                    continue
                with suppress(Unreachable):
                    request = Join(self._run.fact, chain, stage)
                    answer = await self._service.ask(peer, request, JOIN_SECONDS_MAX)
                    if isinstance(answer, Done):
                        self._coming[stage] = peer, trio.current_time() + COMING_SECONDS
                        self._member.joined(stage, peer)
            self._member.asked()
            with trio.move_on_after(RECRUIT_SECONDS):
                await trio.sleep(LOOK_SECONDS)
                while not (self._lacking() and self.free()):  # noqa: ASYNC110 - offers have no event
                    await trio.sleep(LOOK_SECONDS)

    def free(self) -> list[PeerId]:
        """Return the nodes that could be asked now."""
        now, known = trio.current_time(), set(self._member.known)
        preferred = self._service.places.preferred(self._run, self._service.offers())
        free = [each.peer for each in preferred if each.peer not in known]
        return [peer for peer in free if self._declined.get(peer, 0.0) <= now]

    def declined(self, peer: PeerId) -> None:
        """This node would not come: ask it again after a while."""
        self._declined[peer] = trio.current_time() + DECLINED_SECONDS

    def _lacking(self) -> list[int]:
        """Return the stages that this member's column lacks, but for those that a node is opening."""
        now, live = trio.current_time(), self._service.live()
        coming = {stage for stage, (peer, until) in self._coming.items() if now < until and peer in live}
        return [stage for stage in self._member.missing if stage not in coming]

    @property
    def is_hopeful(self) -> bool:
        """Whether a node will hold a stage that is missing, or one that could has not been asked yet."""
        missing = self._member.missing
        return len(self._lacking()) < len(missing) or bool(missing and self.free())

    def candidates(self) -> list[tuple[int, PeerId]]:
        """The nodes to ask now: first for the own column, then for further ones, as many as can be whole."""
        free = self.free()
        if self._member.missing:
            return list(zip(self._lacking(), free, strict=False))
        spare = self._spare({each.peer for each in self._service.offers()})
        heads = min(self._member.wanted(len(free)), len(free), (len(free) + spare) // self._stages)
        return [(0, peer) for peer in free[: max(0, heads)]]

    def _spare(self, alive: Collection[PeerId]) -> int:
        """Return how many holders are left over: their heads are gone, and a new one can take them."""
        held = len(set(self._member.holders).intersection(alive))
        return max(0, held - (self._stages - 1) * self._member.heads) if self._stages > 1 else 0
