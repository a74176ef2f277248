"""The sum of a step's gradients: one all-reduce for a stage, and one for each group of tied weights.

A stage's own weights are summed over its replicas. A weight that several stages share is summed over all
replicas of these stages, so that each gets the same total; weights shared by the same stages are summed
together. Members and layout follow from graph and plan, so every replica finds the same groups.
"""

from collections.abc import Sequence

import numpy as np
from blake3 import blake3

from crypto.identity import PeerId
from gossip.allreduce import AllReduce, Part, Vector
from partition.steps.replica import ReduceReady
from partition.steps.shares import Share

Sends = list[tuple[PeerId, Part]]


class Reduction:
    """One replica's part in all sums of one attempt. Call `start` once, then `receive` until `done`."""

    def __init__(self, me: PeerId, work: ReduceReady, parts: Sequence[Share], sums: Vector) -> None:
        self.key = reduction_key(work)
        self._shares = parts
        self._sums = sums
        self._machines: dict[bytes, AllReduce] = {}
        for share in parts:
            members = tuple(peer for stage in share.stages for peer in work.members[stage])
            if members == (me,):
                continue  # there is nothing else to add
            spans = [sums[begin:end] for begin, end in share.spans]
            # Sent in `start` immediately afterwards, so a single span need not be copied.
            vector = spans[0] if len(spans) == 1 else np.concatenate(spans)
            key = self._key_of(share)
            self._machines[key] = AllReduce(me, members, key, vector)

    def _key_of(self, share: Share) -> bytes:
        return self.key + share.name.to_bytes(4, "big")

    def start(self) -> Sends:
        """Return this replica's summands for the other replicas."""
        return [send for machine in self._machines.values() for send in machine.start()]

    def receive(self, sender: PeerId, part: Part) -> Sends:
        """Add a part that `is_of` this sum. Raises RemoteProtocolError if the part does not belong here."""
        machine = self._machines.get(part.key)
        return [] if machine is None else machine.receive(sender, part)

    def is_of(self, part: Part) -> bool:
        """Return whether a part belongs to this attempt."""
        return part.key.startswith(self.key)

    @property
    def done(self) -> bool:
        return all(machine.done for machine in self._machines.values())

    def waits(self) -> tuple[int, tuple[PeerId, ...], bool]:
        """Return the number of missing chunks, their senders, and whether only sums are missing."""
        machines = self._machines.values()
        left = sum(machine.left for machine in machines)
        unsummed = [peer for machine in machines for peer in machine.unsummed]
        missing = unsummed or [peer for machine in machines for peer in machine.missing]
        return left, tuple(dict.fromkeys(missing)), not unsummed

    def finish(self, totals: Vector) -> bytes:
        """Write the sums to `totals`; return their BLAKE3 hash, which all replicas of a stage must share."""
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
    """Return the key of one attempt, made of plan, step and attempt number."""
    return work.plan + work.step.to_bytes(8, "big") + work.attempt.to_bytes(8, "big")
