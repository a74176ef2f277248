"""A committer's view of replicas that take their stage's state from others before a step is opened: replicas
without a state, and replicas whose parameters differ from most of their stage.
"""

from collections.abc import Mapping

from crypto.identity import PeerId
from partition.plan.plan import NO_HASH, Plan
from partition.steps.messages import Apply, Fill, Synced
from partition.steps.resume import fills, is_filled, minority


class Filling:
    """The fillings under one plan. `asked` has the replicas that must still be filled; `filled` lists those
    that were filled, once for each time."""

    def __init__(self, plan: Plan) -> None:
        self.asked: dict[PeerId, Fill] = {}
        self.filled: list[PeerId] = []
        self._plan = plan
        self._rebuilt: set[PeerId] = set()

    def begin(self, step: int, digests: Mapping[PeerId, bytes], apply: Apply | None) -> bool:
        """Find the replicas to fill after `step` steps, of which `apply` was the last. Return whether there
        are any."""
        known = {peer: digest for peer, digest in digests.items() if digest != NO_HASH}
        self._rebuilt = set(minority(self._plan, known))
        right = {peer: digest for peer, digest in digests.items() if peer not in self._rebuilt}
        self.asked = fills(self._plan, step, right, apply)
        return bool(self.asked)

    def take(self, sender: PeerId, message: Synced) -> bool:
        """Note a replica's Synced; return whether it completes a filling."""
        if not is_filled(self.asked[sender], message):
            return False  # an earlier report of this replica
        del self.asked[sender]
        self.filled.append(sender)
        return True

    def is_rebuilt(self, peer: PeerId) -> bool:
        """Return whether a replica had different parameters from its stage. Returns True only once."""
        is_so = peer in self._rebuilt
        self._rebuilt.discard(peer)
        return is_so
