"""The invariants of a simulated run in local mode: a stage has one head at a time, and each counted step is
complete."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from crypto.identity import PeerId
from sim.observers import Broken


@dataclass
class _Execution:
    """One execution of a step by a head, with the holders that have applied it, by stage."""

    head: PeerId
    applied: dict[int, PeerId] = field(default_factory=dict)
    is_counted: bool = False


class LocalTruth:
    """The observed actions in one run of `stages` stages. The methods raise Broken for a violation."""

    def __init__(self, stages: int) -> None:
        self._stages = stages
        self._executions: list[_Execution] = []
        self._heads: dict[tuple[PeerId, int], PeerId] = {}

    def begin(self, head: PeerId) -> int:
        """Begin a step; return the number of its execution."""
        self._executions.append(_Execution(head))
        return len(self._executions) - 1

    def seat(self, holder: PeerId, stage: int, head: PeerId) -> None:
        """Record that a holder starts to work for a head."""
        before = self._heads.get((holder, stage))
        if before is not None:
            raise Broken("heads", f"stage {stage + 1} works for two heads simultaneously")
        self._heads[holder, stage] = head

    def leave(self, holder: PeerId, stage: int) -> None:
        """Record that a holder stops working for its head."""
        self._heads.pop((holder, stage), None)

    def apply(self, number: int, head: PeerId, holder: PeerId, stage: int) -> None:
        """Record that a stage has applied a step."""
        execution = self._executions[number]
        if self._heads.get((holder, stage), holder) != head:
            raise Broken("heads", f"stage {stage + 1} applied a step of a head that it does not work for")
        if execution.head != head or execution.is_counted or stage in execution.applied:
            raise Broken("steps", f"stage {stage + 1} applied a step twice, or a step of a different head")
        execution.applied[stage] = holder

    def count(self, number: int, step: int) -> Sequence[PeerId]:
        """Record that a head counts a step; return the holders of its other stages."""
        execution, wanted = self._executions[number], range(1, self._stages)
        if execution.is_counted or sorted(execution.applied) != [*wanted]:
            raise Broken(
                "steps", (f"step {step} was counted twice, or before all of its stages had applied it")
            )
        execution.is_counted = True
        return [execution.applied[stage] for stage in wanted]
