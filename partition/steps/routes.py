"""Checks of a step's messages against the plan.

`Routes` is a checked Open: the owners of micro-batches, and the counted ones.
"""

from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId
from partition.plan.plan import Plan
from partition.steps.frames import FrameHeader
from partition.steps.messages import EVALUATIONS_IN_FLIGHT_MAX, Open, StepCommit

ATTEMPTS_PER_PLAN = 2**31
"""Attempts are numbered on from plan to plan, so that no total of an older plan is taken for a newer one.
With the largest height they just fit 63 bits."""


def attempts(plan: Plan) -> range:
    """Return the numbers of all attempts under `plan`."""
    return range(plan.height * ATTEMPTS_PER_PLAN, (plan.height + 1) * ATTEMPTS_PER_PLAN)


def step_numbers(plan: Plan, step: int) -> range:
    """Return the micro-batches of step `step`."""
    return range(step * plan.microbatches, (step + 1) * plan.microbatches)


class Routes:
    """One Open. Raises RemoteProtocolError where it does not fit the plan."""

    def __init__(self, plan: Plan, message: Open) -> None:
        self.step = message.step
        self.attempt = message.attempt
        self.train = message.train
        count = len(message.stages[0].owners)
        self.numbers = range(message.first, message.first + count)
        if message.train and self.numbers != step_numbers(plan, message.step):
            raise RemoteProtocolError("an Open of other micro-batches than those of its step")
        if not message.train and count > EVALUATIONS_IN_FLIGHT_MAX:
            raise RemoteProtocolError(f"an Open of {count} held-out micro-batches at once")
        if message.attempt not in attempts(plan) or len(message.stages) != len(plan.stages):
            raise RemoteProtocolError("an Open that does not belong to its plan")
        for stage, routes in zip(plan.stages, message.stages, strict=True):
            if len(routes.owners) != count or max(routes.owners) >= len(stage.replicas):
                raise RemoteProtocolError("an Open that gives a micro-batch to nobody")
            if any(number not in self.numbers for number in routes.counted):
                raise RemoteProtocolError("an Open that counts micro-batches which are not in it")
        self._owners = [
            [PeerId(stage.replicas[place]) for place in routes.owners]
            for stage, routes in zip(plan.stages, message.stages, strict=True)
        ]
        self._counted = [frozenset(routes.counted) for routes in message.stages]

    def owner(self, stage: int, number: int) -> PeerId | None:
        """Return the owner of a micro-batch in `stage`; None for a number that is not open."""
        position = number - self.numbers.start
        return self._owners[stage][position] if 0 <= position < len(self.numbers) else None

    def wants(self, stage: int, number: int) -> PeerId | None:
        """Return the replica of `stage` that needs a frame of this number; None where none does any more."""
        if not 0 <= stage < len(self._owners):
            return None
        return None if number in self._counted[stage] else self.owner(stage, number)


def check_commit(plan: Plan, message: StepCommit) -> None:
    """Check that all replicas take part, and each stage counts each micro-batch once; else raise
    RemoteProtocolError."""
    expected = {(number, peer) for number, stage in enumerate(plan.stages) for peer in stage.replicas}
    rows = {(row.stage, row.replica): row.microbatches for row in message.replicas}
    if rows.keys() != expected or len(message.replicas) != len(expected):
        raise RemoteProtocolError("a commit that names strangers, a replica twice, or not all")
    counted: list[list[int]] = [[] for _ in plan.stages]
    for row in message.replicas:
        counted[row.stage] += row.microbatches
    wanted = list(step_numbers(plan, message.step))
    if any(sorted(numbers) != wanted for numbers in counted):
        raise RemoteProtocolError("a commit in which a micro-batch is missing, or counted twice")


def check_frame(plan: Plan, stage: int, step: int, sender: PeerId, header: FrameHeader) -> None:
    """Check that `sender` may send this to a replica of `stage` at `step`; else raise RemoteProtocolError."""
    is_last = stage == len(plan.stages) - 1
    if header.step > step or header.stage != stage:
        raise RemoteProtocolError("a frame for another stage or a step that has not begun")
    if header.attempt >= attempts(plan).stop:
        raise RemoteProtocolError("a frame of an attempt that its plan has not")
    if header.train and header.microbatch not in step_numbers(plan, step):
        raise RemoteProtocolError("a frame for a micro-batch outside its step")
    match header.direction:
        case "input" if stage > 0:
            allowed = sender in plan.stages[stage - 1].replicas
        case "gradient":
            allowed = not is_last and sender in plan.stages[stage + 1].replicas
        case "labels":
            allowed = is_last and sender in plan.trainers
        case _:
            allowed = sender in plan.trainers
    if not allowed or (header.direction == "gradient" and not header.train):
        raise RemoteProtocolError(f"a frame of {header.direction} from a peer that has none to send")
