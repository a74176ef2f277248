"""The start of a run in local mode: its members wait, for a bounded time, for those that agreed to take part.

A member opens its stage in seconds, in which the first one would train alone; the others then take over its
step, so that the rounds of all those steps are lost. Only the start has a barrier: later rounds wait for
nobody (`partition.run.local.round_schedule`), and a member that comes later takes over the state of the
others.

A member that opens its stage says so: its report names the run as its lineage and has no state yet.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass

from crypto.identity import PeerId
from partition.run.local.courses import Course, Sleep
from partition.run.local.crew import MemberCrew
from partition.run.local.reports import Reports, is_begun

START_SECONDS_MAX = 30.0
"""The longest wait for the first step: a stage opens in some 3 s, on a machine that is busy in 20."""
SETTLE_SECONDS = 5.0
"""How long a newcomer listens for those that train already."""
MEET_SECONDS = 30.0
"""How long it listens for the member that asked it, as long as that one is alive."""
LOOK_SECONDS = 0.1
GREET_SECONDS = 0.5

Live = Callable[[], Collection[PeerId]]


@dataclass(frozen=True)
class Settle:
    """Listen for those that train already, for SETTLE_SECONDS at most. No answer."""


@dataclass(frozen=True)
class GreetPeers:
    """Show these peers that this one is a member. No answer."""

    peers: tuple[PeerId, ...]


@dataclass(frozen=True)
class TellStart:
    """Tell a person how many members the first step waits for, "" for none any more. No answer."""

    news: str


class StartBarrier:
    """The barrier of one member. `inviter` has asked it to take part."""

    def __init__(self, run: bytes, inviter: PeerId | None) -> None:
        self._run = run
        self._inviter = inviter
        self._seen: set[PeerId] = set()
        self._until: float | None = None
        self._told = 0

    def meeting_seconds(self, stage: int, training: Collection[PeerId]) -> float:
        """Return how long to wait for the report of the inviter, which says whether there is a state to go on
        from: a head that begins before it has heard of the others would begin with untrained numbers."""
        # A head is in the roster of another stage only if it has a copy of that.
        if stage:
            return 0.0 if training else SETTLE_SECONDS
        return MEET_SECONDS

    def misses_inviter(self, reports: Reports, live: Collection[PeerId]) -> bool:
        """Return whether the inviter is alive and has not been heard of."""
        return self._inviter is not None and self._inviter not in reports and self._inviter in live

    def holds(
        self,
        now: float,
        reports: Reports,
        *,
        agreed: Collection[PeerId],
        has_asked: bool,
        live: Collection[PeerId],
    ) -> bool:
        """Return whether the first step waits: no longer once somebody has made it.

        `agreed` are the nodes that agreed here to take part, `has_asked` says that all that could were asked.
        """
        self._until = now + START_SECONDS_MAX if self._until is None else self._until
        if is_begun(reports) or now >= self._until:
            return False
        return bool(self.awaited(reports, agreed, live) or not has_asked)

    def awaited(
        self, reports: Reports, agreed: Collection[PeerId], live: Collection[PeerId]
    ) -> frozenset[PeerId]:
        """Return the members that are opening their stages, those that agreed here and have not been heard of
        yet, and the inviter, which knows whom else it has asked."""
        self._seen.update(reports)
        members = {peer: report for peer, report in reports.items() if report.lineage == self._run}
        opening = {peer for peer, report in members.items() if not report.has_state}
        unheard = set(agreed) - self._seen  # a member that was heard and is gone has left
        inviter = members.keys() & {self._inviter}
        return frozenset((opening | unheard | inviter).intersection(live))

    def news(self, awaited: int) -> str | None:
        """Return what to tell while so many members are awaited, and "" once the barrier is gone (0) and
        something was told; None: nothing new."""
        if awaited == self._told or (not awaited and not self._told):
            return None
        self._told = awaited
        if not awaited:
            return ""
        return f"waiting for {awaited} {'member' if awaited == 1 else 'members'} that agreed to begin"

    def meet(self, crew: MemberCrew, stage: int, live: Live, now: Callable[[], float]) -> Course[None]:
        """Wait for those that train already, and for the report of the member that asked this node."""
        yield Settle()
        until = now() + self.meeting_seconds(stage, crew.training)
        while self.misses_inviter(crew.reports, live()) and now() < until:
            assert self._inviter is not None
            yield GreetPeers((self._inviter,))  # it answers where the run is over
            yield Sleep(GREET_SECONDS)

    def hold(
        self, crew: MemberCrew, live: Live, now: Callable[[], float], meanwhile: Callable[[], Course[None]]
    ) -> Course[None]:
        """Go on once the first step may be made, with the course `meanwhile` now and then until it is."""
        while self.holds(now(), crew.reports, agreed=crew.agreed, has_asked=crew.has_asked, live=live()):
            awaited = self.awaited(crew.reports, crew.agreed, live())
            if awaited and (news := self.news(len(awaited))) is not None:
                yield TellStart(news)
            yield from meanwhile()
            yield Sleep(LOOK_SECONDS)
        if (news := self.news(0)) is not None:
            yield TellStart(news)
