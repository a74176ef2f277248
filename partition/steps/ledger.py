"""The committer's ledger of open micro-batches: the owner and the progress of each."""

from collections.abc import Iterable, Mapping, Sequence

from crypto.identity import PeerId
from partition.plan.assignment import deal
from partition.plan.plan import Plan
from partition.steps.messages import Open, StageCommit, StageRoutes, Synced

Place = tuple[int, int]
"""A replica: its stage, and its index in the stage."""


def places_of(plan: Plan) -> dict[PeerId, Place]:
    """Return the (stage, index) of each replica of a plan."""
    return {
        PeerId(peer): (number, index)
        for number, stage in enumerate(plan.stages)
        for index, peer in enumerate(stage.replicas)
    }


class Ledger:
    """A range of micro-batches, `numbers`, in every stage of the plan. `train`: they have a backward pass
    too."""

    def __init__(self, plan: Plan, numbers: range, *, train: bool) -> None:
        self.numbers = numbers
        self.moved: set[Place] = set()
        self._plan = plan
        self.train = train
        self._owners: list[dict[int, int]] = [{} for _ in plan.stages]
        self._counted: list[set[int]] = [set() for _ in plan.stages]
        self._forwarded: list[set[int]] = [set() for _ in plan.stages]
        self._barred: set[tuple[Place, int]] = set()

    @property
    def is_complete(self) -> bool:
        """Whether all micro-batches are counted in all stages."""
        return all(len(counted) == len(self.numbers) for counted in self._counted)

    def owns(self, place: Place, number: int) -> bool:
        """Return whether this replica owns a micro-batch."""
        stage, index = place
        return self._owners[stage].get(number) == index

    def owes(self, place: Place, number: int) -> bool:
        """Return whether this replica owns a micro-batch that it has not counted."""
        return self.owns(place, number) and number not in self._counted[place[0]]

    def numbers_of(self, place: Place) -> list[int]:
        """Return the micro-batches that this replica owns."""
        return [number for number in self.numbers if self.owns(place, number)]

    def owned(self) -> dict[Place, list[int]]:
        """Return the micro-batches of every replica that owns any."""
        found: dict[Place, list[int]] = {}
        for stage, owners in enumerate(self._owners):
            for number in self.numbers:
                found.setdefault((stage, owners[number]), []).append(number)
        return found

    def routes(self) -> tuple[StageRoutes, ...]:
        """Return the routes for an Open."""
        return tuple(
            StageRoutes(bytes(owners[number] for number in self.numbers), tuple(sorted(counted)))
            for owners, counted in zip(self._owners, self._counted, strict=True)
        )

    def open(self, plan: bytes, step: int, attempt: int) -> Open:
        """Return the Open for replicas and trainers."""
        return Open(
            plan=plan,
            step=step,
            attempt=attempt,
            train=self.train,
            first=self.numbers.start,
            stages=self.routes(),
        )

    def rows(self) -> tuple[StageCommit, ...]:
        """Return the rows of a StepCommit."""
        owned = self.owned()
        return tuple(
            StageCommit(number, peer, tuple(owned.get((number, index), ())))
            for number, stage in enumerate(self._plan.stages)
            for index, peer in enumerate(stage.replicas)
        )

    # Input

    def count(self, place: Place, number: int) -> None:
        """Note that the micro-batch is in its owner's sums."""
        self._forwarded[place[0]].discard(number)
        self._counted[place[0]].add(number)

    def forwarded(self, place: Place, number: int) -> None:
        """Note that the owner of the micro-batch has sent its output to the next stage."""
        if number not in self._counted[place[0]] and place[0] < len(self._plan.stages) - 1:
            self._forwarded[place[0]].add(number)

    def finish(self, number: int) -> None:
        """Note that a held-out micro-batch has passed all stages."""
        for stage in range(len(self._plan.stages)):
            self.count((stage, 0), number)

    def take(self, rows: Mapping[Place, Synced]) -> None:
        """Take over what replicas had counted or forwarded under an earlier plan. Counted precedes forwarded.
        If two replicas have the same micro-batch, the first in the plan owns it."""
        for place in sorted(rows):
            for number in self._free(place, rows[place].counted):
                self._owners[place[0]][number] = place[1]
                self.count(place, number)
        for place in sorted(rows):
            for number in self._free(place, rows[place].begun):
                self._owners[place[0]][number] = place[1]
                self.forwarded(place, number)

    def _free(self, place: Place, numbers: Iterable[int]) -> list[int]:
        owners = self._owners[place[0]]
        return [number for number in numbers if number in self.numbers and number not in owners]

    # Dealing

    def deal(self, rates: Sequence[Sequence[int]]) -> None:
        """Give each micro-batch without an owner to the replica that would finish it first. Replicas that
        lost micro-batches before get some only if there is no other replica."""
        for stage, owners in enumerate(self._owners):
            places = self._willing(stage, ()) or self._computing(stage)
            free = [number for number in self.numbers if number not in owners]
            owners.update(deal(free, places, rates[stage], self._loads(stage)))

    def move(self, away: Iterable[Place], rates: Sequence[Sequence[int]]) -> dict[Place, int]:
        """Take their uncounted micro-batches from these replicas; return how many from each.

        They get no more micro-batches of this range, and replicas that lost some before get none back. If no
        other replica is left, nothing changes. A micro-batch that a remaining replica has passed on stays
        where it is.
        """
        leaving = set(away) - self.moved
        found: dict[Place, int] = {}
        for stage, owners in enumerate(self._owners):
            gone = {index for number, index in leaving if number == stage}
            places = self._willing(stage, gone)
            if not gone or not places:
                continue
            taken = [
                number
                for number in self.numbers
                if owners[number] in gone
                and number not in self._counted[stage]
                and not any(((stage, place), number) in self._barred for place in places)
            ]
            for number in taken:
                place = stage, owners.pop(number)
                found[place] = found.get(place, 0) + 1
            self._forwarded[stage].difference_update(taken)
            self.moved.update((stage, index) for index in gone)
            owners.update(deal(taken, places, rates[stage], self._loads(stage)))
        return found

    def pass_on(self, place: Place, number: int, rates: Sequence[Sequence[int]]) -> bool:
        """Give one of this replica's micro-batches, counted or not, to another replica of its stage for good.
        If there is none, change nothing and return False."""
        stage, index = place
        self._barred.add((place, number))
        able = self._willing(stage, ()) or range(len(rates[stage]))
        others = [other for other in able if ((stage, other), number) not in self._barred]
        if not others or self._owners[stage][number] != index:
            return False
        del self._owners[stage][number]
        self._counted[stage].discard(number)
        self._forwarded[stage].discard(number)
        self._owners[stage].update(deal([number], others, rates[stage], self._loads(stage)))
        return True

    def slide(self, numbers: range, rates: Sequence[Sequence[int]]) -> "Ledger":
        """Return the ledger of a later range of numbers. Micro-batches in both ranges keep their owners."""
        later = Ledger(self._plan, numbers, train=self.train)
        later.moved = self.moved
        later._barred = self._barred
        for stage, owners in enumerate(self._owners):
            later._owners[stage] = {number: owners[number] for number in numbers if number in owners}
            later._counted[stage] = {number for number in self._counted[stage] if number in numbers}
            later._forwarded[stage] = {number for number in self._forwarded[stage] if number in numbers}
        later.deal(rates)
        return later

    def _willing(self, stage: int, gone: Iterable[int]) -> list[int]:
        """Return the replicas that may get micro-batches; standbys only if no other is left."""
        excluded = {index for number, index in self.moved if number == stage} | set(gone)
        row = self._plan.stages[stage]
        left = [index for index in range(len(row.replicas)) if index not in excluded]
        return [index for index in left if row.replicas[index] not in row.standbys] or left

    def _computing(self, stage: int) -> list[int]:
        row = self._plan.stages[stage]
        return [index for index, peer in enumerate(row.replicas) if peer in row.computing]

    def _loads(self, stage: int) -> list[int]:
        """Return the number of uncounted micro-batches of each replica."""
        loads = [0] * len(self._plan.stages[stage].replicas)
        for number, index in self._owners[stage].items():
            loads[index] += number not in self._counted[stage]
        return loads

    # Replicas with work to do

    def obliged(self) -> set[Place]:
        """Return the replicas that have work to do now.

        A pending forward pass alone obliges only a replica that holds no micro-batch between its two passes.
        Other replicas may already hold as many as fit into their memory.
        """
        found: set[Place] = set()
        for stage, owners in enumerate(self._owners):
            holding: set[int] = set()
            fresh: set[int] = set()
            for number, index in owners.items():
                if number in self._counted[stage]:
                    continue
                if number in self._forwarded[stage]:
                    holding.add(index)
                    if self.train and number in self._counted[stage + 1]:
                        found.add((stage, index))
                elif stage == 0 or number in self._forwarded[stage - 1] or number in self._counted[stage - 1]:
                    fresh.add(index)
            found |= {(stage, index) for index in (fresh - holding if self.train else fresh)}
        return found

    def replayed(self) -> int:
        """Return how many micro-batches must be computed again because their replica is gone, counted for
        each stage.

        These are micro-batches that no replica here has counted or forwarded, although the next stage has
        begun them or the previous stage has their gradient. Valid only before `deal`.
        """
        last = len(self._plan.stages) - 1
        count = 0
        for stage, owners in enumerate(self._owners):
            for number in self.numbers:
                after = stage < last and number in self._owners[stage + 1]
                before = stage > 0 and number in self._counted[stage - 1]
                count += number not in owners and (after or before)
        return count
