"""Invariants of the chain of plans of each run."""

from crypto.identity import PeerId
from partition.plan.plan import NO_HASH
from sim.checkers.checker import Checker
from sim.events import BranchLeft, PlanAdopted
from sim.observers import Observation, World


class OnePlanAHeight(Checker):
    """Check that no two peers ever have different plans in force at one height. Not for runs that may
    fork."""

    name = "plans"

    def __init__(self) -> None:
        super().__init__()
        self._plans: dict[tuple[bytes, int], tuple[bytes, PeerId | None]] = {}
        self.handlers = {PlanAdopted: self._see_adopted}

    def _see_adopted(self, observed: Observation, world: World) -> None:
        event = observed.event
        plan, first = self._plans.setdefault((event.run, event.height), (event.plan, observed.peer))
        if plan != event.plan:
            raise self.broken(
                f"two plans at height {event.height} of run {event.run.hex()[:8]}: {plan.hex()[:8]} at "
                f"{_name(world, first)}, {event.plan.hex()[:8]} at {_name(world, observed.peer)}"
            )


class PlansFollow(Checker):
    """Check that each plan follows a plan of the previous height that was in force; the first follows
    none."""

    name = "chain"

    def __init__(self) -> None:
        super().__init__()
        self._heights: dict[tuple[bytes, bytes], tuple[int, bytes]] = {}
        self.handlers = {PlanAdopted: self._see_adopted}

    def _see_adopted(self, observed: Observation, world: World) -> None:
        event = observed.event
        known = self._heights.setdefault((event.run, event.plan), (event.height, event.parent))
        what = f"plan {event.plan.hex()[:8]} of height {event.height} at {_name(world, observed.peer)}"
        if known != (event.height, event.parent):
            raise self.broken(f"{what} had height {known[0]} or a different parent on another peer")
        if (event.height == 0) != (event.parent == NO_HASH):
            raise self.broken(f"{what} must have a parent, or be the first plan and have none")
        if event.height:
            parent = self._heights.get((event.run, event.parent))
            if parent is None:
                raise self.broken(f"{what} follows {event.parent.hex()[:8]}, which was never in force")
            if parent[0] != event.height - 1:
                raise self.broken(f"{what} follows {event.parent.hex()[:8]} of height {parent[0]}")


class SomeBranchGoesOn(Checker):
    """Check that at least one branch of a run is never left, that is, some peer remains under a plan in
    force. Peers that are down count, because their disks bring the plan back."""

    name = "branches"

    def __init__(self) -> None:
        super().__init__()
        self._followers: dict[bytes, set[PeerId | None]] = {}
        self.handlers = {PlanAdopted: self._see_adopted, BranchLeft: self._see_left}

    def _see_adopted(self, observed: Observation, _world: World) -> None:
        self._followers.setdefault(observed.event.run, set()).add(observed.peer)

    def _see_left(self, observed: Observation, world: World) -> None:
        left = self._followers.setdefault(observed.event.run, set())
        left.discard(observed.peer)
        if not left:
            raise self.broken(
                f"{_name(world, observed.peer)} was the last peer on its branch of run "
                f"{observed.event.run.hex()[:8]} and left it, so no branch remains"
            )


def _name(world: World, peer: PeerId | None) -> str:
    return "nobody" if peer is None else world.name(peer)
