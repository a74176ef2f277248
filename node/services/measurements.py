"""Publishes in the DHT this node's measurements of itself and of others, and looks up those of other nodes on
demand.

Each peer has two records: its calibration, and its observations of others. They are fetched before a plan is
made, and only for members that announce that they are calibrated. Not here: the measuring itself.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import trio

from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId
from gossip.member import SwarmMember
from node.containment import contain
from node.planning.peers import measurements_document
from node.seams import Clock
from node.services.calibration import (
    CALIBRATION_PURPOSE,
    LOOK_SECONDS,
    CalibrationWish,
    MeasuringTurn,
    calibrate,
)
from node.services.discovery import Discovery
from node.services.links import LinkMeasuring
from node.services.metadata import read_metadata
from partition.plan.observed import (
    FLOPS_PER_SECOND_MAX,
    STAGES_MAX,
    Knowledge,
    Observed,
    StageRow,
    decode_observed,
    encode_observed,
    limited_rows,
)
from partition.plan.rates import Calibration, decode_calibration, encode_calibration

OBSERVED_PURPOSE = "observed"
CALIBRATED = "calibrated"
"""The capability of members that publish measurements and let their links be measured."""
TELL_SECONDS, FIRST_TELL_SECONDS = 30.0, 5.0
"""Seconds between checks for changed observations; each change is stored at a dozen nodes. The short interval
applies until there is anything to publish."""
CHANGE_SHARE = 0.1
"""Least relative change of a figure that is published."""
STAGES_SECONDS = 3_600.0
"""How long a rate measured in a run is used. After that, the peer's claim is used until a new measurement."""
FRESH_SECONDS, ABSENT_SECONDS = 60.0, 10.0
"""Seconds between lookups of a peer's records; the short interval applies if a record was missing."""
LOOKED_UP_MAX = 64
LOOKUPS_AT_ONCE = 8
LOOKUPS_SECONDS_MAX = 3.0
"""Time limit for all lookups. A plan from what is known by then is better than none."""


T = TypeVar("T")


class Measurements:
    """The measurements of one node. `frames` returns recent transfers of frames: peer, bytes a second, and
    whether the link was saturated."""

    def __init__(
        self,
        me: PeerId,
        clock: Clock,
        discovery: Discovery,
        links: LinkMeasuring,
        *,
        members: Callable[[], Iterable[SwarmMember]],
        frames: Callable[[], Iterable[tuple[PeerId, float, bool]]],
        refuse: Callable[[PeerId, RemoteProtocolError], None],
    ) -> None:
        self.calibration: Calibration | None = None
        self.limits = (0, 0)
        """The owner's limits in bytes a second, for each direction; 0 for none."""
        self.is_computing: Callable[[], bool] = lambda: False
        """Whether this node computes now, in which case nothing may be measured."""
        self._is_measuring = False
        self.links = links
        self._me = me
        self._clock = clock
        self._discovery = discovery
        self._members = members
        self._frames = frames
        self._refuse = refuse
        self._stages: dict[PeerId, tuple[int, float]] = {}
        self._calibrations: dict[PeerId, Calibration] = {}
        self._observed: dict[PeerId, Observed] = {}
        self._look_up_at: dict[PeerId, float] = {}
        self._told = Observed()

    async def measure(
        self,
        wanted: CalibrationWish,
        folder: Path,
        calibrated: Callable[[Calibration], None],
        met: trio.Event,
    ) -> None:
        """Calibrate this machine in a thread, while this node does not compute, and pass the result to
        `calibrated`. After the first calibration, wait until this node has `met` others and continue as
        `run`. After a later one, publish it and return. Also return if the calibration fails."""
        turn = MeasuringTurn()
        self._is_measuring = True
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._follow, turn)
                found = await trio.to_thread.run_sync(
                    partial(calibrate, wanted, folder, turn=turn), abandon_on_cancel=True
                )
                nursery.cancel_scope.cancel()
        finally:
            turn.give_up()
            self._is_measuring = False
        if found is None:
            return
        is_new, self.calibration = self.calibration is None, found
        calibrated(found)
        if is_new:
            await met.wait()  # a node that is alone has no peers that need its calibration
            await self.run(self.calibration)
        else:
            await self._discovery.publish(CALIBRATION_PURPOSE, self._me, encode_calibration(found))

    @property
    def is_busy(self) -> bool:
        """Whether this node computes or calibrates."""
        return self._is_measuring or self.is_computing()

    async def _follow(self, turn: MeasuringTurn) -> None:
        """Keep `turn` informed whether this node computes, until cancelled."""
        while True:
            turn.is_busy = self.is_computing()
            await trio.sleep(LOOK_SECONDS)

    async def run(self, calibration: Calibration) -> None:
        """Publish this node's calibration, measure its links and publish them, until cancelled."""
        self.calibration = calibration
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.links.run, self._measured_members, lambda: None)
            await self._discovery.publish(CALIBRATION_PURPOSE, self._me, encode_calibration(calibration))
            while True:
                await trio.sleep(TELL_SECONDS if self._told.links else FIRST_TELL_SECONDS)
                with contain("telling of measurements"):
                    await self._tell()

    def _measured_members(self) -> list[PeerId]:
        return [
            member.peer
            for member in self._members()
            if member.live and member.peer != self._me and _is_measured(member)
        ]

    @property
    def observed(self) -> Observed:
        """This node's recent measurements of others."""
        now = self._clock.monotonic()
        for peer, rate, is_saturated in self._frames():
            if peer != self._me:
                self.links.core.framed(now, peer, rate, is_saturated=is_saturated)
        self._stages = {peer: row for peer, row in self._stages.items() if now - row[1] <= STAGES_SECONDS}
        newest = sorted(self._stages.items(), key=lambda pair: -pair[1][1])[:STAGES_MAX]
        stages = sorted((StageRow(peer, rate) for peer, (rate, _) in newest), key=lambda row: row.peer)
        return Observed(limited_rows(self.links.core.rows(now), *self.limits), tuple(stages))

    async def _tell(self) -> None:
        found = self.observed
        if _differs(self._told, found):
            self._told = found
            await self._discovery.publish(OBSERVED_PURPOSE, self._me, encode_observed(found))

    def stages_found(self, rates: Mapping[PeerId, int]) -> None:
        """Record rates of replicas that a committer on this node has measured."""
        now = self._clock.monotonic()
        for peer, rate in rates.items():
            if peer != self._me:
                self._stages[peer] = max(1, min(rate, FLOPS_PER_SECOND_MAX)), now

    @property
    def knowledge(self) -> Knowledge:
        """The measurements known now, without a lookup."""
        calibrations, observed = dict(self._calibrations), dict(self._observed)
        if self.calibration is not None:
            calibrations[self._me] = self.calibration
        observed[self._me] = self.observed
        hidden = [member.peer for member in self._members() if member.live and is_hidden(member)]
        return Knowledge(self._me, calibrations, observed, frozenset(hidden))

    async def learn(self, peers: Collection[PeerId]) -> Knowledge:
        """Look up the measurements of those `peers` that publish any, within bounded time. Return all that
        are known."""
        now = self._clock.monotonic()
        live = {member.peer: member for member in self._members() if member.live}
        for known in (self._calibrations, self._observed, self._look_up_at):
            for peer in [peer for peer in known if peer not in live]:
                del known[peer]
        wanted = [
            peer
            for peer in sorted(peers)
            if peer != self._me
            and peer in live
            and _is_measured(live[peer])
            and now >= self._look_up_at.get(peer, now)
        ][:LOOKED_UP_MAX]
        if wanted:
            limit = trio.CapacityLimiter(LOOKUPS_AT_ONCE)
            with trio.move_on_after(LOOKUPS_SECONDS_MAX):
                async with trio.open_nursery() as nursery:
                    for peer in wanted:
                        nursery.start_soon(self._look_up, peer, limit)
        return self.knowledge

    async def document(self, peers: Collection[PeerId]) -> dict[str, Any]:
        """Return the measurements of these peers as plain values (`node.planning.peers`)."""
        return measurements_document(await self.learn(peers), peers)

    async def _look_up(self, peer: PeerId, limit: trio.CapacityLimiter) -> None:
        async with limit:
            calibration = await self._read(CALIBRATION_PURPOSE, peer, decode_calibration)
            observed = await self._read(OBSERVED_PURPOSE, peer, partial(decode_observed, author=peer))
        if calibration is not None:
            self._calibrations[peer] = calibration
        if observed is not None:
            self._observed[peer] = observed
        is_whole = calibration is not None and observed is not None
        self._look_up_at[peer] = self._clock.monotonic() + (FRESH_SECONDS if is_whole else ABSENT_SECONDS)

    async def _read(self, purpose: str, peer: PeerId, read: Callable[[bytes], T]) -> T | None:
        for record in await self._discovery.find(purpose, peer):
            if record.publisher == peer:
                try:
                    return read(record.value)
                except RemoteProtocolError as error:
                    self._refuse(peer, error)
        return None


def is_hidden(member: SwarmMember) -> bool:
    """Return whether others reach a member through relays."""
    return any(each.relay is not None for each in member.addresses)


def _is_measured(member: SwarmMember) -> bool:
    claim = read_metadata(member.metadata)
    return claim is not None and claim.standing is not None and CALIBRATED in claim.standing.capabilities


def _differs(told: Observed, found: Observed) -> bool:
    """Return whether any figure differs from the published one by more than measurement noise."""
    before = {(row.peer, way): rate for row in told.links for way, rate in enumerate((row.sent, row.taken))}
    after = {(row.peer, way): rate for row in found.links for way, rate in enumerate((row.sent, row.taken))}
    before |= {(row.peer, 2): row.flops_per_second for row in told.stages}
    after |= {(row.peer, 2): row.flops_per_second for row in found.stages}
    return before.keys() != after.keys() or any(
        abs(rate - before[key]) > CHANGE_SHARE * max(rate, before[key]) for key, rate in after.items()
    )
