"""This node's own machine: what was measured of it, what it offers, and what other members learn of both."""

import os
from collections.abc import Callable
from functools import partial

import trio

from crypto.identity import PeerId
from gossip.member import Profile
from node.events import Event
from node.executor import RealExecutor
from node.paths import cache_folder
from node.placement.permission import Permission
from node.placement.provider import Provider
from node.runs.held import standing_of
from node.runs.runs import Runs
from node.runs.vacating import of_others, vacate
from node.seams import Seams
from node.services.calibration import CalibrationWish, corrected
from node.services.capacity import Capacity, measure
from node.services.measurements import CALIBRATED, Measurements
from node.services.membership import Membership
from node.services.metadata import AdvertisedStanding, encode_metadata
from node.services.standing import StandingKeeper
from node.services.torch_extra import cannot_compute
from node.stages.fences import try_here
from partition.plan.rates import Calibration


class OwnMachine:
    """The machine of one node. Call `measure` first, then `keep_standing`, then `join`."""

    capacity: Capacity
    standing: StandingKeeper
    """Announces this node's condition to others."""

    def __init__(
        self,
        provider: Provider,
        seams: Seams,
        peer: PeerId,
        publish: Callable[[Event], None],
        *,
        given: Capacity | None,
        is_met: trio.Event,
    ) -> None:
        """`given` is used in place of a measurement; `is_met` is set once another node is known."""
        self._provider = provider
        self._seams = seams
        self._peer = peer
        self._publish = publish
        self._given = given
        self._is_met = is_met
        self._membership: Membership | None = None
        self._measurements: Measurements | None = None
        self._runs: Runs | None = None

    @property
    def is_measured(self) -> bool:
        """Whether this is a real machine whose capacity was measured, not given."""
        return self._given is None and isinstance(self._seams.executor, RealExecutor)

    @property
    def offered(self) -> Capacity:
        """The capacity of one slot, as offered to others."""
        return self._provider.of_a_slot(self.capacity)

    async def measure(self) -> None:
        """Measure what this machine can do, and which restrictions of a stage's process it can enforce."""
        async with trio.open_nursery() as nursery:
            if isinstance(self._seams.executor, RealExecutor):
                nursery.start_soon(self._try_fences)
            if (capacity := self._given) is None:
                resources = self._provider.config.resources
                capacity = await self._seams.executor.run(lambda: measure(resources))
            self._hold(capacity)

    async def _try_fences(self) -> None:
        """Find out which restrictions of a stage's process can be enforced, before any slot is offered
        here."""
        resources, at = self._provider.config.resources, self._seams.clock.wall()
        tried = await self._seams.executor.run(partial(try_here, resources, at))
        self._provider.unfenced, self._provider.cannot_compute = tried.unfenced, cannot_compute()
        self._publish(tried)
        if not self._provider.offered.may_serve:
            self._publish(self._provider.offer(self._seams.clock.wall()))

    def keep_standing(self) -> None:
        """Start announcing this node's condition; until `join`, it announces no stages."""
        self.standing = StandingKeeper(
            self._seams.clock,
            self._provider.config.swarm.preset,
            first=self._standing_now(None),
            look=self._standing_now,
            tell=self._tell,
            live=lambda: 1 if self._membership is None else len(self._membership.live),
        )

    def join(self, membership: Membership, measurements: Measurements, runs: Runs) -> None:
        """Connect the services that announce and use this machine."""
        self._membership, self._measurements, self._runs = membership, measurements, runs

    def profile(self) -> Profile:
        """Return what members learn about this node."""
        accepts, standing = self._provider.takes_stages_of_others, self.standing.told
        metadata = encode_metadata(self.offered, accepts_runs=accepts, standing=standing)
        return Profile(self._provider.config.name, self._seams.network.addresses, metadata)

    def _tell(self) -> None:
        assert self._membership is not None
        self._membership.update(self.profile())

    def _standing_now(self, told: AdvertisedStanding | None) -> AdvertisedStanding:
        """Return this node's condition; a simulated node appears idle."""
        provider, measurements = self._provider, self._measurements
        words = {
            **provider.words,
            CALIBRATED: measurements is not None and measurements.calibration is not None,
        }
        return standing_of(
            told,
            self.capacity,
            words,
            self._runs,
            self._peer,
            slots=provider.rules.slots,
            is_measured=self.is_measured,
        )

    def _hold(self, capacity: Capacity) -> None:
        self.capacity = capacity
        self._publish(capacity.measured(self._seams.clock.wall(), self._provider.rules.slots))

    def offer(self, capacity: Capacity) -> None:
        """Offer this capacity from now on."""
        self._hold(capacity)
        self.standing.tell_now()

    def permitted(self, permission: Permission) -> None:
        """Apply a new permission to serve others. If others may not be served any more, their stages here are
        handed over."""
        self._publish(self._provider.offer(self._seams.clock.wall()))
        self.standing.tell_now()
        if not permission.may_serve and self._runs is not None:
            self._runs.start_task(vacate, self._runs, permission.reason, of_others(self._peer), of=None)

    async def calibrate(self) -> None:
        """Measure in the background what a stage's process can do here, and announce it in place of the
        estimate."""
        config, provider = self._provider.config, self._provider
        if not (config.resources.calibrate and provider.takes_stages) or self._measurements is None:
            return
        slots = provider.rules.slots
        wanted = CalibrationWish(self.capacity.device, "float32", max(1, self.capacity.cores // slots), slots)
        folder = cache_folder(os.environ, config.data_dir)
        await self._measurements.measure(wanted, folder, self.calibrated, self._is_met)

    def calibrated(self, found: Calibration) -> None:
        """Offer the measured speed of a stage's process."""
        self.offer(corrected(self.capacity, found, self._provider.rules.slots))
