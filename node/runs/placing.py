"""Places a run that this node requests: finds its peers, and meanwhile waits for them in their queues.

The search itself is in `node.placement`. Not here: starting the run, once there is a plan.
"""

from collections.abc import Awaitable, Callable, Collection, Sequence
from functools import partial
from typing import Any, Protocol

from crypto.facts import Signer
from crypto.identity import PeerId
from node.content.dataset_store import Lanes
from node.content.datasets import Dataset
from node.content.graphs import Models
from node.errors import Unreachable, UsageError
from node.events import Event, RunChanged
from node.placement.contest import CONTEST_MEMBERS_MIN, enter_queues
from node.placement.deadline import least_seconds, plan_warnings
from node.placement.leases import Offer, PlacementFailed, place, reduction
from node.placement.places import Places
from node.placement.waiting import QueuePlaces, place_in_time
from node.protocols.manifest import Run
from node.protocols.runs import Reply, Request
from node.runs.manifest_builder import fits
from node.runs.steering import Steering
from node.seams import Seams
from node.services.measurements import Measurements
from partition.plan.plan import Plan
from partition.run.decliners import Decliners
from partition.run.settings import RunSettings


class PlacingService(Protocol):
    """The part of `node.runs.runs.Runs` that this file uses."""

    seams: Seams
    signer: Signer
    settings: RunSettings
    models: Models
    places: Places
    measurements: Measurements
    decliners: Decliners
    live: Callable[[], Collection[PeerId]]
    offers: Callable[[], Sequence[Offer]]
    search: Callable[[], Awaitable[Sequence[Offer]]]
    publish: Callable[[Event], None]

    def is_over(self, run: bytes) -> bool: ...
    def start_task(self, task: Callable[..., Any], *arguments: object, of: Run | None) -> None: ...
    async def ask(self, peer: PeerId, request: Request, seconds: float) -> Reply: ...
    async def load_data(self, run: Run, holders: Sequence[PeerId], lanes: Lanes | None = None) -> Dataset: ...


async def place_run(runs: PlacingService, run: Run, wait_seconds: float, steering: Steering) -> Plan:
    """Place a run, trying again while it waits for other peers. Raises PlacementFailed."""
    try:
        graph = await runs.models.get(run.manifest.graph_hash, [])
        dataset = await runs.load_data(run, [])
    except (Unreachable, UsageError) as error:
        raise PlacementFailed(error.detail if isinstance(error, Unreachable) else str(error)) from None
    if not fits(dataset, run.manifest, graph):
        raise PlacementFailed("the data this node has does not fit the run's manifest; has it changed?")
    queued = QueuePlaces(run.id, runs.ask)
    if len(runs.live()) >= CONTEST_MEMBERS_MIN:
        free = [offer.peer for offer in runs.places.choose(run, runs.offers()) if offer.has_slot]
        await enter_queues(run, free, queued.ask, runs.decliners, steering.fact, runs.seams.clock.monotonic)
    clock, ask, executor, asked = runs.seams.clock, queued.ask, runs.seams.executor, runs.decliners
    rules = runs.settings
    attempt = partial(place, run, graph, runs.signer, decliners=asked, revision=steering.fact, settings=rules)

    def tell(reason: str) -> None:
        runs.publish(RunChanged(at=clock.wall(), run=run.text, state="placing", reason=reason))

    async def try_once(offers: Sequence[Offer], is_last: bool) -> Plan:
        do = partial(attempt, knowledge=await runs.measurements.learn([each.peer for each in offers]))
        return await do(offers, ask, executor, monotonic=clock.monotonic, may_reduce=is_last)

    try:
        plan = await place_in_time(
            runs.places.keeping(run, try_once, tell),
            runs.offers,
            runs.search,
            clock=clock,
            wait_seconds=wait_seconds,
            lacks=tell,
            is_over=partial(runs.is_over, run.id),
        )
    except BaseException:
        runs.start_task(queued.withdraw, of=None)
        raise
    runs.start_task(queued.withdraw, of=None)
    if short := reduction(run.manifest, plan):
        tell(short)
    if steering.seconds_left is not None or steering.goal is not None:
        rates = {bytes(offer.peer): offer.flops_per_second for offer in runs.offers()}
        least = await executor.run(partial(least_seconds, run.manifest, graph, plan, rates))
        for warning in plan_warnings(run.manifest, least, steering.seconds_left, steering.goal):
            tell(warning)
    return plan
