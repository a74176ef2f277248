"""Applies settings that change while a node runs, and hands over stages that no longer fit."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial

from node.config import Config
from node.placement.slots import share
from node.runs.member import RunMember
from node.runs.runs import Runs
from node.runs.vacating import of_runs, vacate
from node.seams import Network
from node.services.capacity import Capacity, measure, within
from node.services.measurements import Measurements
from node.storage.blobs import Blobs
from node.storage.budget import ScratchBudget
from node.transport.network import RealNetwork

RESOURCES = frozenset({"device", "memory", "cores", "location", "slots"})
"""Settings that determine the resources of a slot."""
PACES = frozenset({"cores", "slots"})
"""Settings that change how fast a slot computes: its threads, and the number of slots next to it."""
TOO_LARGE = "its owner now gives less than this stage was opened with"
TOO_MANY = "its owner now gives fewer slots"


@dataclass(frozen=True)
class ChangeableParts:
    """The parts of a node that follow its settings. `offered` receives the node's new capacity; `calibrate`
    measures again what a slot can do."""

    network: Network
    scratch: ScratchBudget
    blobs: Blobs
    runs: Runs
    measurements: Measurements
    offered: Callable[[Capacity], None]
    calibrate: Callable[[], Awaitable[None]]


def keep_limits(parts: ChangeableParts, config: Config) -> None:
    """Apply the configured limits on disk space and bandwidth."""
    rules = config.offer
    parts.scratch.limit(config.resources.scratch)
    parts.blobs.guest_bytes_max = parts.scratch.of_disk(config.resources.disk)
    rates = rules.upload_bytes_per_second, rules.download_bytes_per_second
    parts.measurements.limits = rates
    if isinstance(parts.network, RealNetwork):
        parts.network.paces.up.limit(rates[0])
        parts.network.paces.down.limit(rates[1])


def change(parts: ChangeableParts, name: str, config: Config, before: Capacity, *, is_real: bool) -> None:
    """Apply a changed setting. Stages of other peers' runs that no longer fit are handed over. If the machine
    `is_real`, a new device is measured first."""
    keep_limits(parts, config)
    if name == "device" and is_real:
        parts.runs.start_task(_measure, parts, config, of=None)
    elif name in RESOURCES:
        _resize(parts, config, within(before, config.resources))
        if name in PACES and is_real:
            parts.runs.start_task(parts.calibrate, of=None)


async def _measure(parts: ChangeableParts, config: Config) -> None:
    found = await parts.runs.seams.executor.run(partial(measure, config.resources))
    _resize(parts, config, found)
    await parts.calibrate()


def _resize(parts: ChangeableParts, config: Config, capacity: Capacity) -> None:
    runs = parts.runs
    parts.offered(capacity)
    surplus = frozenset(runs.queue.resize(config.offer.slots))
    if surplus:
        runs.start_task(vacate, runs, TOO_MANY, of_runs(surplus), of=None)
    allowed = config.resources.memory.of(capacity.memory_total_bytes)
    slot = share(replace(runs.machine, threads=capacity.cores, memory_bytes=allowed), config.offer.slots)

    def is_too_large(member: RunMember) -> bool:
        held = member.hosting.machine
        if held is None or member.run.requester == runs.signer.peer or member.run.id in surplus:
            return False
        is_larger = held.threads > slot.threads or held.memory_bytes > slot.memory_bytes
        return is_larger or held.device != capacity.device

    runs.start_task(vacate, runs, TOO_LARGE, is_too_large, of=None)
