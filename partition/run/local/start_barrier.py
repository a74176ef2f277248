"""The start of a run in local mode: its members wait, for a bounded time, for the nodes that agreed to take
part.

Opening a stage takes seconds, in which the first member would train alone. The others would then take over
its state, so these steps would never be averaged. Only the start has a barrier: later rounds do not wait for
latecomers (`partition.run.local.round_schedule`), which take over the state of the others.

A member that opens its stage reports the run's id as its lineage, but no state yet.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass

from crypto.identity import PeerId
from partition.run.local.courses import Course, Sleep
from partition.run.local.crew import MemberCrew
from partition.run.local.reports import Reports, is_begun

START_SECONDS_MAX = 30.0
"""Maximum wait for the first step. A stage opens in about 3 s, on a busy machine in 20 s."""
SETTLE_SECONDS = 5.0
"""How long a newcomer listens for training members."""
MEET_SECONDS = 30.0
"""How long a newcomer listens for its inviter, while the inviter is alive."""
LOOK_SECONDS = 0.1
GREET_SECONDS = 0.5

Live = Callable[[], Collection[PeerId]]


@dataclass(frozen=True)
class Settle:
    """Listen for training members, for at most SETTLE_SECONDS. No answer."""


@dataclass(frozen=True)
class GreetPeers:
    """Show these peers this member's chain. No answer."""

    peers: tuple[PeerId, ...]


@dataclass(frozen=True)
class TellStart:
    """Display how many members the first step waits for, "" if it no longer waits. No answer."""

    news: str


class StartBarrier:
    """The barrier of one member, which `inviter` asked to take part."""

    def __init__(self, run: bytes, inviter: PeerId | None) -> None:
        self._run = run
        self._inviter = inviter
        self._seen: set[PeerId] = set()
        self._until: float | None = None
        self._told = 0

    def meeting_seconds(self, stage: int, training: Collection[PeerId]) -> float:
        """Return how long to wait for the inviter's report, which shows whether there is a state to resume
        from. A head that begins before that report arrives would use untrained parameters."""
        # A head is on the roster of another stage only if it has a copy of that stage.
        if stage:
            return 0.0 if training else SETTLE_SECONDS
        return MEET_SECONDS

    def misses_inviter(self, reports: Reports, live: Collection[PeerId]) -> bool:
        """Return whether the inviter is alive but has not reported."""
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
        """Return whether the first step must wait. It need not wait once any member has made a step.

        `agreed` are the nodes that agreed to take part when this member asked; `has_asked`: all possible
        nodes were asked.
        """
        self._until = now + START_SECONDS_MAX if self._until is None else self._until
        if is_begun(reports) or now >= self._until:
            return False
        return bool(self.awaited(reports, agreed, live) or not has_asked)

    def awaited(
        self, reports: Reports, agreed: Collection[PeerId], live: Collection[PeerId]
    ) -> frozenset[PeerId]:
        """Return the members that are opening their stages, the nodes that agreed here and have not reported
        yet, and the inviter, which knows which other nodes it has asked."""
        self._seen.update(reports)
        members = {peer: report for peer, report in reports.items() if report.lineage == self._run}
        opening = {peer for peer, report in members.items() if not report.has_state}
        unheard = set(agreed) - self._seen  # a member that reported and is gone has left
        inviter = members.keys() & {self._inviter}
        return frozenset((opening | unheard | inviter).intersection(live))

    def news(self, awaited: int) -> str | None:
        """Return the text to display while members are awaited, or "" once when the waiting ends; None if
        nothing has changed."""
        if awaited == self._told or (not awaited and not self._told):
            return None
        self._told = awaited
        if not awaited:
            return ""
        return f"waiting for {awaited} {'member' if awaited == 1 else 'members'} that agreed to begin"

    def meet(self, crew: MemberCrew, stage: int, live: Live, now: Callable[[], float]) -> Course[None]:
        """Wait for training members, and for the inviter's report."""
        yield Settle()
        until = now() + self.meeting_seconds(stage, crew.training)
        while self.misses_inviter(crew.reports, live()) and now() < until:
            assert self._inviter is not None
            yield GreetPeers((self._inviter,))  # the inviter answers if the run is over
            yield Sleep(GREET_SECONDS)

    def hold(
        self, crew: MemberCrew, live: Live, now: Callable[[], float], meanwhile: Callable[[], Course[None]]
    ) -> Course[None]:
        """Wait until the first step may be made; follow the course `meanwhile` periodically."""
        while self.holds(now(), crew.reports, agreed=crew.agreed, has_asked=crew.has_asked, live=live()):
            awaited = self.awaited(crew.reports, crew.agreed, live())
            if awaited and (news := self.news(len(awaited))) is not None:
                yield TellStart(news)
            yield from meanwhile()
            yield Sleep(LOOK_SECONDS)
        if (news := self.news(0)) is not None:
            yield TellStart(news)
