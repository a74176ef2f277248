"""Invariants of committed steps: each micro-batch counts once, and a replica's sums hold exactly what the
commit states."""

from collections.abc import Sequence
from typing import TypeVar

from crypto.identity import PeerId
from sim.checkers.checker import Checker
from sim.events import PeerStarted, PlanAdopted, SamplesCounted, StepCommitted
from sim.observers import Observation, World

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")

_KEPT_MAX = 512
"""Maximum number of steps that are kept for comparison. No peer applies an older step under the same plan."""


class SamplesOnce(Checker):
    """Check that within a committed step all stages count the same micro-batches, each once, and that no
    micro-batch is in two committed steps of one chain of plans. If a plan goes back to a checkpoint, the
    steps after it are replaced and do not count."""

    name = "samples"

    def __init__(self) -> None:
        super().__init__()
        self._parents: dict[bytes, bytes] = {}
        # For each plan: the step of each micro-batch, along the chain up to this plan.
        self._owners: dict[bytes, dict[int, int]] = {}
        self.handlers = {PlanAdopted: self._see_adopted, StepCommitted: self._see_committed}

    def _see_adopted(self, observed: Observation, _world: World) -> None:
        self._parents[observed.event.plan] = observed.event.parent

    def _see_committed(self, observed: Observation, world: World) -> None:
        step, counted = observed.event.step, observed.event.counted
        counts = [self._of_stage(world, step, stage, rows) for stage, rows in enumerate(counted)]
        for stage, counts_here in enumerate(counts[1:], start=2):
            odd = sorted(counts_here ^ counts[0])
            if odd:
                raise self.broken(
                    f"step {step} counts micro-batch {odd[0]} in only one of the stages 1 and {stage}"
                )
        owners = self._of_plan(observed.event.plan)
        later = [number for number, owner in owners.items() if owner >= step]
        for number in later:
            del owners[number]
        for number in sorted(counts[0]) if counts else ():
            if number in owners:
                raise self.broken(f"micro-batch {number} is in step {owners[number]} and in step {step}")
            owners[number] = step

    def _of_stage(
        self, world: World, step: int, stage: int, rows: Sequence[tuple[PeerId, tuple[int, ...]]]
    ) -> frozenset[int]:
        found: dict[int, PeerId] = {}
        for peer, numbers in rows:
            for number in numbers:
                if number in found:
                    raise self.broken(
                        f"step {step} counts micro-batch {number} twice in stage {stage + 1}: "
                        f"{world.name(found[number])} and {world.name(peer)}"
                    )
                found[number] = peer
        return frozenset(found)

    def _of_plan(self, plan: bytes) -> dict[int, int]:
        """Return the steps along the chain up to a plan. A new plan starts with those of its nearest ancestor
        that committed."""
        if plan not in self._owners:
            ancestor = self._parents.get(plan)
            while ancestor is not None and ancestor not in self._owners:
                ancestor = self._parents.get(ancestor)
            self._owners[plan] = dict(self._owners[ancestor]) if ancestor is not None else {}
        return self._owners[plan]


class GoodbyesLoseNothing(Checker):
    """Check that no step is committed twice, since a member that says goodbye first hands over what it holds.
    For scenarios in which no peer crashes and the others have room for what is handed over."""

    name = "goodbyes"

    def __init__(self) -> None:
        super().__init__()
        self._committed: dict[bytes, int] = {}
        self.handlers = {StepCommitted: self._see_committed}

    def _see_committed(self, observed: Observation, world: World) -> None:
        run, step = observed.event.run, observed.event.step
        newest = self._committed.get(run, -1)
        if step <= newest:
            who = "nobody" if observed.peer is None else world.name(observed.peer)
            raise self.broken(f"{who} commits step {step} of run {run.hex()[:8]} after step {newest}")
        self._committed[run] = step


class SumsAgree(Checker):
    """Check that a replica applies a step once under a plan, and that its sums contain exactly the
    micro-batches that the commit assigns to it: none twice, and none that a second replica of its stage also
    has."""

    name = "sums"

    def __init__(self) -> None:
        super().__init__()
        self._commits: dict[tuple[bytes, int], dict[tuple[int, PeerId], tuple[int, ...]]] = {}
        self._applied: dict[tuple[bytes, int], dict[tuple[int, PeerId], tuple[int, ...]]] = {}
        # The steps that each peer applied since its latest start, and when.
        self._when: dict[PeerId, dict[tuple[bytes, int, int], float]] = {}
        self.handlers = {
            PeerStarted: self._see_started,
            StepCommitted: self._see_committed,
            SamplesCounted: self._see_counted,
        }

    def _see_started(self, observed: Observation, _world: World) -> None:
        if observed.peer is not None:
            self._when.pop(observed.peer, None)

    def _see_committed(self, observed: Observation, world: World) -> None:
        event = observed.event
        rows = {
            (stage, peer): tuple(sorted(numbers))
            for stage, named in enumerate(event.counted)
            for peer, numbers in named
        }
        _put(self._commits, (event.plan, event.step), rows)
        for place, numbers in self._applied.get((event.plan, event.step), {}).items():
            self._compare(world, event.step, place, numbers, rows)

    def _see_counted(self, observed: Observation, world: World) -> None:
        event, peer = observed.event, observed.peer
        if peer is None:
            return
        numbers = tuple(sorted(event.microbatches))
        if len(set(numbers)) < len(numbers):
            twice = next(number for number in numbers if numbers.count(number) > 1)
            raise self.broken(
                f"{world.name(peer)} has micro-batch {twice} twice in its sums of step {event.step}"
            )
        own, which = self._when.setdefault(peer, {}), (event.plan, event.step, event.stage)
        if which in own:
            raise self.broken(
                f"{world.name(peer)} applies step {event.step} twice, first at {own[which]:.3f} s"
            )
        _put(own, which, observed.time)
        applied = self._applied.get((event.plan, event.step), {})
        for (stage, other), others in applied.items():
            both = sorted(set(others) & set(numbers)) if stage == event.stage and other != peer else ()
            if both:
                whose = f"{world.name(other)} and of {world.name(peer)}, both of stage {stage + 1}"
                raise self.broken(f"micro-batch {both[0]} of step {event.step} is in the sums of {whose}")
        applied[event.stage, peer] = numbers
        _put(self._applied, (event.plan, event.step), applied)
        rows = self._commits.get((event.plan, event.step))
        if rows is not None:
            self._compare(world, event.step, (event.stage, peer), numbers, rows)

    def _compare(
        self,
        world: World,
        step: int,
        place: tuple[int, PeerId],
        numbers: tuple[int, ...],
        rows: dict[tuple[int, PeerId], tuple[int, ...]],
    ) -> None:
        named = rows.get(place)
        if named is not None and named != numbers:
            odd = sorted(set(named) ^ set(numbers))[0]
            which = "its sums lack" if odd in named else "it was not assigned"
            raise self.broken(
                f"{world.name(place[1])} applies step {step} in stage {place[0] + 1} with a sum that differs "
                f"from the commit: {which} micro-batch {odd}"
            )


def _put(kept: dict[_Key, _Value], key: _Key, value: _Value) -> None:
    """Add an entry to a bounded dict; the oldest entry is dropped if it is full."""
    kept[key] = value
    if len(kept) > _KEPT_MAX:
        del kept[next(iter(kept))]
