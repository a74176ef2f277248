"""A chain of plans for tests of a lone member."""

from partition.plan.change import Change
from partition.run.stored_chain import StoredChain


class Quiet(StoredChain):
    """A chain that only records its member's wishes; tests report the decisions of others to it."""

    proposals: list[Change | None]

    def wish(self, change: Change | None, parent: bytes) -> None:
        self.proposals.append(change)

    def reach(self, live: object) -> None: ...

    @property
    def deadline(self) -> float:
        return float("inf")
