"""The states of one averaging run: those that this peer offers to late joiners, and those it takes over."""

from collections.abc import Callable, Collection
from functools import partial

import trio

from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId
from gossip.claims import LikelySteps
from gossip.roster import Report, Roster
from node.averaging.context import ParticipationService
from node.averaging.expectations import Expectations
from node.averaging.offered import SNAPSHOT_SECONDS, OfferedStates
from node.averaging.snapshot import Snapshot, check_finite
from node.averaging.transfer import DONORS_MAX, OFFER_SECONDS_MAX, fetch_state
from node.averaging_events import StateFetched
from node.errors import Unreachable

ASKED_AHEAD_MAX = 16
"""Maximum number of steps ahead of its own for which a peer lets others wait for a state."""
STATES_MAX = 4
"""Maximum number of states fetched in one attempt, if the first ones are unusable."""


class StateExchange:
    """The state exchange of one participant, in the run with this `name`."""

    def __init__(
        self, name: str, key: bytes, roster: Roster, service: ParticipationService, expectations: Expectations
    ) -> None:
        self._name = name
        self._key = key
        self._roster = roster
        self._service = service
        self._seams = service.seams
        self._expectations = expectations
        self._copies = OfferedStates()
        self._offered = trio.Event()
        self.is_receiving = False
        """Whether a state of others is being fetched."""
        self._step_wanted: int | None = None
        """The earliest step of which another peer wants a copy of this peer's state; None if no peer does."""

    def moved(self, step: int) -> None:
        """Record that this peer is at `step`."""
        self._copies.moved(self._seams.clock.monotonic(), step)

    def offer(self, snapshot: Snapshot, good_seconds: float = SNAPSHOT_SECONDS) -> None:
        """Offer this peer's present state to late joiners, for `good_seconds` even after its step has
        ended."""
        self._copies.add(self._seams.clock.monotonic(), snapshot, good_seconds)
        self._step_wanted = None
        offered, self._offered = self._offered, trio.Event()
        offered.set()

    def wants_state(self, step: int) -> bool:
        """Return whether another peer waits for a copy of this peer's state, which is at `step`."""
        return self._step_wanted is not None and step >= self._step_wanted

    def kept(self, digest: bytes) -> Snapshot | None:
        """Return the snapshot with this digest; None if it is no longer kept."""
        return self._copies.with_digest(self._seams.clock.monotonic(), digest)

    async def snap(self, step: int) -> Snapshot | str:
        """Return a snapshot at this step or later, made by the training loop if necessary, or why there is
        none."""
        if not self._roster.own.has_state:
            return "this peer has no state yet"
        if step > self._roster.own_step + ASKED_AHEAD_MAX:
            return "this peer has not reached that step"
        with trio.move_on_after(OFFER_SECONDS_MAX):
            clock = self._seams.clock
            while (found := self._copies.current(clock.monotonic(), step, self._roster.own_step)) is None:
                self._step_wanted = step if self._step_wanted is None else min(step, self._step_wanted)
                await self._offered.wait()
            return found
        return "this peer made no copy of its state in time"

    async def fetch(
        self,
        step: int,
        step_max: int | None = None,
        *,
        bytes_max: int,
        passed_over: Collection[PeerId] = (),
        likely: LikelySteps | None = None,
        check: Callable[[Snapshot], str] = check_finite,
    ) -> Snapshot:
        """Fetch the state from `step` to `step_max` that most peers hold, at a `likely` step if given; peers
        in `passed_over` are ignored. `check`, which runs in the executor, returns the fault of a state, in
        which case the next state is fetched. Raises Unreachable."""
        useless, error = set(passed_over), ""
        for _ in range(STATES_MAX):
            self.is_receiving = False
            try:
                found = await self._fetch(step, step_max, bytes_max, useless, likely)
            except Unreachable as failure:
                self._expectations.missed_state()
                raise Unreachable(failure.reason, error or failure.detail) from None
            error = await self._seams.executor.run(partial(check, found))
            if not error:
                return found
            for holder in found.holders:
                self._service.refuse(holder, RemoteProtocolError(error))
            useless.update(found.holders)
        raise Unreachable("unknown", error)

    async def _fetch(
        self,
        step: int,
        step_max: int | None,
        bytes_max: int,
        passed_over: Collection[PeerId],
        likely: LikelySteps | None,
    ) -> Snapshot:
        def is_donor(report: Report) -> bool:
            if not report.has_state or not report.step.reaches(step):
                return False
            if likely is not None and likely.lineage not in (None, report.lineage):
                return False
            lasts = [step_max, None if likely is None else likely.last]
            return not any(last is not None and report.step.reaches(last + 1) for last in lasts)

        reports = self._roster.reports
        donors = [peer for peer in sorted(reports) if is_donor(reports[peer]) and peer not in passed_over]
        if likely is not None and not likely.is_nearest:  # if states differ, each helps to judge the others
            donors = [peer for peer in donors if peer not in self._expectations.absent] or donors
        if not donors:
            raise Unreachable("unknown", "no peer of the run has a state to offer")
        seams = self._seams
        if len(donors) > DONORS_MAX:
            donors = seams.rng.sample(donors, DONORS_MAX)
        begun = seams.clock.monotonic()
        found = await fetch_state(
            seams.network,
            seams.executor,
            donors,
            self._key,
            self._roster.signature,
            step,
            bytes_max=bytes_max,
            refuse=self._service.refuse,
            step_max=step_max,
            likely=likely,
            rng=seams.rng,
            receiving=partial(setattr, self, "is_receiving", True),
        )
        self._service.publish(
            StateFetched(
                at=seams.clock.wall(),
                run=self._name,
                step=found.table.step,
                size_bytes=found.table.size_bytes,
                seconds=seams.clock.monotonic() - begun,
            )
        )
        return found
