"""Settings that change while a node runs: what each is told to, and the stages that do not fit any more."""

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
"""Settings that change how fast a slot computes: its threads, and the slots beside it."""
TOO_LARGE = "its owner gives less than this stage was opened with"
TOO_MANY = "its owner gives fewer slots"


@dataclass(frozen=True)
class ChangeableParts:
    """Those of a node that keep to its settings; `offered` is told what it offers from now on, `calibrate`
    finds out anew what a slot does."""

    network: Network
    scratch: ScratchBudget
    blobs: Blobs
    runs: Runs
    measurements: Measurements
    offered: Callable[[Capacity], None]
    calibrate: Callable[[], Awaitable[None]]


def keep_limits(parts: ChangeableParts, config: Config) -> None:
    """Have disk and network kept to the configuration from now on."""
    rules = config.offer
    parts.scratch.limit(config.resources.scratch)
    parts.blobs.guest_bytes_max = parts.scratch.of_disk(config.resources.disk)
    rates = rules.upload_bytes_per_second, rules.download_bytes_per_second
    parts.measurements.limits = rates
    if isinstance(parts.network, RealNetwork):
        parts.network.paces.up.limit(rates[0])
        parts.network.paces.down.limit(rates[1])


def change(parts: ChangeableParts, name: str, config: Config, before: Capacity, *, is_real: bool) -> None:
    """Apply a changed setting. Stages of others that it leaves no room for are handed over. A new device is
    measured first, where it `is_real`."""
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
