"""Encodes the claims that a node makes in its SWIM fact in addition to name and addresses: its capacity and
its standing.

Plans are made with the capacity, which is measured at the start. The standing is the node's present
condition: its capabilities, load, free memory, free slots and the stages that it holds. It is rounded to
steps, and published again only when a step changes, because each change costs every member some messages. All
of it is only claimed. It has at most 300 bytes, and parts that do not fit are left out, the stages first.
"""

import os
from collections.abc import Sequence
from functools import lru_cache
from typing import Annotated

import msgspec
import psutil

from crypto.encoding import decode, encode
from crypto.errors import RemoteProtocolError
from gossip.dissemination import CHANGE_INTERVALS, CHANGES_MAX
from gossip.member import METADATA_BYTES_MAX
from gossip.messages import MEMBERS_MAX
from node import events
from node.services.capacity import Capacity, device_memory

METADATA_VERSION = 2
"""Version 2 added the standing. A reader of version 1 ignores it, and metadata of version 1 has None."""
FLOPS_PER_SECOND_MAX = 1e16
"""Highest believable claim. No present device multiplies fp32 matrices this fast, so a higher claim is
ignored."""
CAPABILITIES_MAX = 8
UNREACHABLE_WORD = "unreachable"
"""The capability word of a node that others could not dial back. It takes none of their stages."""
RELAY_WORD = "relay"
"""The capability word of a reachable node that acts as a relay for peers that cannot be dialled."""
STAGES_TOLD_MAX = 4
RUN_LETTERS = 8
STAGES, FENCED, OBSERVER = "stages", "fenced", "observer"
"""Capability words of a standing: the node computes stages; it can isolate them; it only watches."""
LOAD_PERCENT_MAX = 10_000
LOAD_STEP_PERCENT = 25
MEMORY_STEPS = 8
"""Free memory is published in eighths of the total."""
LOOK_SECONDS = 5.0
CHANGES_KEPT = CHANGES_MAX - 1
"""Number of changes allowed in a burst: one fewer than others pass on, so that a changed address still
spreads."""
CHANGE_INTERVALS_A_MEMBER = 2.0
"""Among n members, each changes at most once in this many times n probe intervals. Together that is one
change in two intervals, which costs each member about a kilobyte in that time."""

Text = Annotated[str, msgspec.Meta(max_length=64)]
Word = Annotated[str, msgspec.Meta(max_length=16)]
RunPrefix = Annotated[str, msgspec.Meta(max_length=RUN_LETTERS)]
Size = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
StageNumber = Annotated[int, msgspec.Meta(ge=0, lt=2**16)]


class AdvertisedStanding(msgspec.Struct, frozen=True, array_like=True):
    """A node's present state, rounded to steps."""

    capabilities: Annotated[tuple[Word, ...], msgspec.Meta(max_length=CAPABILITIES_MAX)] = ()
    load_percent: Annotated[int, msgspec.Meta(ge=0, le=LOAD_PERCENT_MAX)] = 0
    memory_available_bytes: Size = 0
    slots_free: Annotated[int, msgspec.Meta(ge=0, le=255)] = 0
    stages: Annotated[
        tuple[tuple[RunPrefix, StageNumber], ...], msgspec.Meta(max_length=STAGES_TOLD_MAX)
    ] = ()


class Metadata(msgspec.Struct, frozen=True, array_like=True):
    """A member's own claims in its SWIM fact, in addition to name and addresses."""

    version: int
    accepts_runs: bool
    device: Text
    cores: Size
    memory_free_bytes: Size
    memory_total_bytes: Size
    flops_per_second: Annotated[float, msgspec.Meta(ge=0, le=FLOPS_PER_SECOND_MAX)]
    location: Text
    standing: AdvertisedStanding | None = None


def encode_metadata(
    capacity: Capacity, *, accepts_runs: bool, standing: AdvertisedStanding | None = None
) -> bytes:
    """Return the metadata of a node with this capacity."""
    while True:
        metadata = Metadata(
            METADATA_VERSION,
            accepts_runs,
            capacity.device,
            capacity.cores,
            capacity.memory_free_bytes,
            capacity.memory_total_bytes,
            min(capacity.flops_per_second, FLOPS_PER_SECOND_MAX),
            capacity.location,
            standing,
        )
        data = encode(metadata)
        if len(data) <= METADATA_BYTES_MAX or standing is None:
            return data
        if standing.stages or standing.capabilities:
            standing = msgspec.structs.replace(
                standing,
                stages=standing.stages[:-1],
                capabilities=standing.capabilities if standing.stages else standing.capabilities[:-1],
            )
        else:
            standing = None


@lru_cache(maxsize=MEMBERS_MAX)
def read_metadata(data: bytes) -> Metadata | None:
    """Return a member's claim; None if this version cannot read it."""
    try:
        metadata: Metadata = decode(data, Metadata, bytes_max=METADATA_BYTES_MAX)
    except RemoteProtocolError:
        return None
    return metadata


def claimed_capacity(data: bytes, at: float) -> events.CapacityMeasured | None:
    """Return the capacity that a member claims; None if this version cannot read it."""
    metadata = read_metadata(data)
    if metadata is None:
        return None
    return events.CapacityMeasured(
        at=at,
        device=metadata.device,
        cores=metadata.cores,
        memory_free_bytes=metadata.memory_free_bytes,
        memory_total_bytes=metadata.memory_total_bytes,
        flops_per_second=metadata.flops_per_second,
        location=metadata.location,
    )


def claimed_standing(data: bytes) -> events.Standing | None:
    """Return the standing that a member claims."""
    metadata = read_metadata(data)
    if metadata is None or metadata.standing is None:
        return None
    standing = metadata.standing
    return events.Standing(
        # Texts from other nodes reach terminals.
        capabilities=tuple(word for word in standing.capabilities if word.isprintable()),
        load_percent=standing.load_percent,
        memory_available_bytes=standing.memory_available_bytes,
        slots_free=standing.slots_free,
        stages=tuple((run, stage) for run, stage in standing.stages if run.isalnum()),
    )


def machine_now(device: str, cores: int) -> tuple[float, int, int]:
    """Return this machine's load in percent of `cores`, and the (free, total) bytes of its device's
    memory."""
    total, free = device_memory(device)
    return 100.0 * os.getloadavg()[0] / max(1, min(cores, psutil.cpu_count() or 1)), free, total


def standing_now(
    told: AdvertisedStanding | None,
    capabilities: Sequence[str],
    load_percent: float,
    memory_bytes: tuple[int, int],
    slots_free: int,
    stages: Sequence[tuple[str, int]],
) -> AdvertisedStanding:
    """Return a node's standing in steps. If nothing has moved by a whole step, return the standing that it
    `told` before.

    `memory_bytes` is (free, total); `stages` are (run, stage) pairs, with the run in hexadecimal.
    """
    free, total = memory_bytes
    before = AdvertisedStanding() if told is None else told
    return AdvertisedStanding(
        tuple(capabilities)[:CAPABILITIES_MAX],
        min(_stepped(before.load_percent, load_percent, LOAD_STEP_PERCENT), LOAD_PERCENT_MAX),
        _stepped(before.memory_available_bytes, free, max(1, total // MEMORY_STEPS)),
        min(slots_free, 255),
        tuple((run[:RUN_LETTERS], stage) for run, stage in stages)[:STAGES_TOLD_MAX],
    )


def change_seconds(interval_seconds: float, live: int) -> float:
    """Return the least time between changes, once the burst is used up."""
    return interval_seconds * max(CHANGE_INTERVALS, CHANGE_INTERVALS_A_MEMBER * live)


def _stepped(told: int, now: float, step: int) -> int:
    """Return the nearest whole step, but keep the published value while it is less than a step away."""
    return told if abs(now - told) < step else round(now / step) * step
