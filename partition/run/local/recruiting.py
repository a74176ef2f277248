"""The choice of the nodes that a member in local mode asks to take part, and of the stages for which it asks
them.

`recruit` is the course of a member that asks nodes one by one.
"""

from collections.abc import Callable, Collection, Sequence
from math import inf
from typing import Protocol

from crypto.identity import PeerId
from partition.run.local.courses import AskToHold, Course, Sleep
from partition.run.local.crew import MemberCrew

RECRUIT_SECONDS = 3.0
"""Seconds between two checks for nodes that could take part."""
LOOK_SECONDS = 0.5
"""The same while a stage is missing that some node could hold."""
SLACK_SECONDS = 1e-6
"""Tolerance for rounding in sums of times."""
DECLINED_SECONDS = 30.0
"""How long to wait before a node that declined is asked again."""
UNANSWERED_SECONDS = 5.0
"""The same for a node that gave no answer. It may be behind a partition that heals soon."""
ANSWER_SECONDS = 2.0
"""How long a column waits for the answer of a node that it asks, before its own nodes take the stage."""
COMING_SECONDS = 20.0
"""Time limit for a node that agreed to hold a stage to open it and take over the state of others."""


class NodeView(Protocol):
    """The nodes that a member can see. `live` are believed alive, `offered` have an offer, and `preferred`
    are those with an offer that may be asked, the best first."""

    def live(self) -> Collection[PeerId]: ...
    def offered(self) -> Collection[PeerId]: ...
    def preferred(self) -> Sequence[PeerId]: ...


class Recruitment:
    """The recruitment by one member, for its own column and for further columns of `stages` stages."""

    def __init__(self, crew: MemberCrew, nodes: NodeView, stages: int) -> None:
        self._crew = crew
        self._nodes = nodes
        self._stages = stages
        self._coming: dict[int, tuple[PeerId, float]] = {}
        self._declined: dict[PeerId, float] = {}
        self._silent: dict[PeerId, float] = {}
        """Until when no answer is expected from a node that gave none."""
        self._asked_at = -inf
        self._asks: tuple[int, float] | None = None
        """The stage for which a node is being asked that is expected to answer, and since when."""

    def recruit(self, now: Callable[[], float]) -> Course[None]:
        """Ask nodes to take part, endlessly."""
        while True:
            candidates = self._look(now())
            if candidates is not None:
                for stage, peer in candidates:
                    self.asking(now(), peer)
                    self._asks = None if self._is_silent(now(), peer) else (stage, now())
                    will: bool | None = yield AskToHold(stage, peer)
                    self._asks = None
                    self.answered(now(), peer, will)
                    if will:
                        self._coming[stage] = peer, now() + COMING_SECONDS
                        self._crew.joined(stage, peer)
                self._asked_at = now()
                self._crew.asked()
            yield Sleep(LOOK_SECONDS)  # no event reports new offers

    def _look(self, now: float) -> list[tuple[int, PeerId]] | None:
        """Return the nodes to ask now, each with its stage; None while it is too early to ask."""
        is_time = now - self._asked_at >= RECRUIT_SECONDS - SLACK_SECONDS
        if is_time or (self._lacking(now) and self.free(now)):
            return self._candidates(now)
        return None

    def asking(self, now: float, peer: PeerId) -> None:
        """Note that a node is being asked. It is asked again only later."""
        # Expired entries are dropped, because a swarm sees any number of peers come and go.
        self._declined = {each: until for each, until in self._declined.items() if until > now}
        self._silent = {each: until for each, until in self._silent.items() if until > now}
        self._declined[peer] = now + DECLINED_SECONDS

    def answered(self, now: float, peer: PeerId, will: bool | None) -> None:
        """Note the answer of a node, None if it gave none. Then it is soon asked again, but for a while the
        column does not wait for it."""
        if will is None:
            self._declined[peer] = now + UNANSWERED_SECONDS
            self._silent[peer] = now + DECLINED_SECONDS
        else:
            self._silent.pop(peer, None)

    def _is_silent(self, now: float, peer: PeerId) -> bool:
        return now < self._silent.get(peer, now)

    def free(self, now: float) -> list[PeerId]:
        """Return the nodes that may be asked now."""
        known = self._crew.known
        free = [peer for peer in self._nodes.preferred() if peer not in known]
        return [peer for peer in free if self._declined.get(peer, 0.0) <= now]

    def is_hopeful(self, now: float) -> bool:
        """Return whether a missing stage has a node that is opening it or is being asked, or could be offered
        to a node that may be asked. Nodes that gave no answer do not count for a while."""
        missing = self._crew.missing
        free = [peer for peer in self.free(now) if not self._is_silent(now, peer)]
        is_asked = (
            self._asks is not None and self._asks[0] in missing and now < self._asks[1] + ANSWER_SECONDS
        )
        return is_asked or len(self._lacking(now)) < len(missing) or bool(missing and free)

    def _candidates(self, now: float) -> list[tuple[int, PeerId]]:
        """Return the nodes to ask now: first for this member's own column, then for as many further columns
        as can be complete. Nodes that gave no answer come last."""
        free = sorted(self.free(now), key=lambda peer: self._is_silent(now, peer))
        if self._crew.missing:
            return list(zip(self._lacking(now), free, strict=False))
        heads = min(self._crew.wanted(len(free)), len(free), (len(free) + self._spare()) // self._stages)
        return [(0, peer) for peer in free[: max(0, heads)]]

    def _lacking(self, now: float) -> list[int]:
        """Return the stages that this member's column lacks and that no node is opening."""
        live = self._nodes.live()
        coming = {stage for stage, (peer, until) in self._coming.items() if now < until and peer in live}
        return [stage for stage in self._crew.missing if stage not in coming]

    def _spare(self) -> int:
        """Return the number of free holders, whose heads are gone and which a new head can use."""
        held = len(set(self._crew.holders).intersection(self._nodes.offered()))
        return max(0, held - (self._stages - 1) * self._crew.heads) if self._stages > 1 else 0
