"""The sum of a step's gradients: one all-reduce for a stage, and one for each group of tied weights.

What a stage has to itself is summed over its replicas. A weight that several stages share is summed over all
replicas of all of them, so that each ends with the same total; rows shared by the same stages go together.
Who takes part and what lies where follows from graph and plan, so every replica finds the same groups.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from blake3 import blake3

from crypto.identity import PeerId
from gossip.allreduce import AllReduce, Part, Vector
from partition.model.graph import StageGraph
from partition.stage import StageSpecification, parameter_layout
from partition.steps.replica import ReduceReady

Sends = list[tuple[PeerId, Part]]


@dataclass(frozen=True)
class Share:
    """One group of elements: `spans` of the arena, summed over the replicas of `stages`.

    `name` is 0 for what a stage has to itself, else 1 + the first of the rows: the same for all who share.
    """

    name: int
    stages: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]


def shares(specification: StageSpecification, graphs: Sequence[StageGraph]) -> tuple[Share, ...]:
    """What a stage sums with whom; `graphs` are all stages of the plan."""
    index = specification.graph.index
    holders: dict[int, tuple[int, ...]] = {}
    for row in specification.graph.tied:
        holders[row] = tuple(graph.index for graph in graphs if row in graph.rows)
    own = 0
    tied: dict[tuple[int, ...], list[tuple[int, tuple[int, int]]]] = {}
    for slot in parameter_layout(specification):
        if slot.parameter.kind == "frozen":
            continue
        if slot.is_tied:
            # Rows come in their order, so every stage lines them up alike.
            span = (slot.offset, slot.offset + slot.size)
            tied.setdefault(holders[slot.row], []).append((slot.row, span))
        else:
            own = slot.offset + slot.size
    found = [Share(0, (index,), ((0, own),))]
    for stages, rows in tied.items():
        found.append(Share(1 + rows[0][0], stages, tuple(span for _, span in rows)))
    return tuple(found)


class Reduction:
    """One replica's side of all sums of one attempt. `start` once; then `receive` until `done`."""

    def __init__(self, me: PeerId, work: ReduceReady, parts: Sequence[Share], sums: Vector) -> None:
        self.key = reduction_key(work)
        self._shares = parts
        self._sums = sums
        self._machines: dict[bytes, AllReduce] = {}
        for share in parts:
            members = tuple(peer for stage in share.stages for peer in work.members[stage])
            if members == (me,):
                continue  # nobody else has anything to add
            vector = np.concatenate([sums[begin:end] for begin, end in share.spans])
            key = self._key_of(share)
            self._machines[key] = AllReduce(me, members, key, vector)

    def _key_of(self, share: Share) -> bytes:
        return self.key + share.name.to_bytes(4, "big")

    def start(self) -> Sends:
        """This replica's summands, for the others."""
        return [send for machine in self._machines.values() for send in machine.start()]

    def receive(self, sender: PeerId, part: Part) -> Sends:
        """A part that `is_of` this. Raises RemoteProtocolError for what does not belong here."""
        machine = self._machines.get(part.key)
        return [] if machine is None else machine.receive(sender, part)

    def is_of(self, part: Part) -> bool:
        """Whether a part belongs to this attempt."""
        return part.key.startswith(self.key)

    @property
    def done(self) -> bool:
        return all(machine.done for machine in self._machines.values())

    def waits(self) -> tuple[int, tuple[PeerId, ...], bool]:
        """How many chunks are still to come, from whom, and whether only their sums are missing."""
        machines = self._machines.values()
        left = sum(machine.left for machine in machines)
        unsummed = [peer for machine in machines for peer in machine.unsummed]
        missing = unsummed or [peer for machine in machines for peer in machine.missing]
        return left, tuple(dict.fromkeys(missing)), not unsummed

    def finish(self, totals: Vector) -> bytes:
        """Put the sums into `totals`; their BLAKE3, which all replicas of a stage must share."""
        for share in self._shares:
            machine = self._machines.get(self._key_of(share))
            start = 0
            for begin, end in share.spans:
                found = (
                    self._sums[begin:end] if machine is None else machine.total[start : start + end - begin]
                )
                totals[begin:end] = found
                start += end - begin
        little = totals.astype(totals.dtype.newbyteorder("<"), copy=False)
        return blake3(little.data.cast("B") if little.size else b"").digest()


def reduction_key(work: ReduceReady) -> bytes:
    """What names one attempt: plan, step and attempt."""
    return work.plan + work.step.to_bytes(8, "big") + work.attempt.to_bytes(8, "big")
