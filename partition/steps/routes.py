"""Checks of a step's messages against the plan.

`Routes` is a checked Open: the owners of micro-batches, and which ones are counted.
"""

from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId
from partition.plan.plan import Plan
from partition.steps.frames import FrameHeader
from partition.steps.messages import EVALUATIONS_IN_FLIGHT_MAX, Open, StepCommit

ATTEMPTS_PER_PLAN = 2**31
"""Number of attempts under one plan. Attempts are numbered consecutively across plans, so that a total of an
older plan is never taken for a newer one. With the maximum height the numbers just fit into 63 bits."""


def attempts(plan: Plan) -> range:
    """Return the numbers of all attempts under `plan`."""
    return range(plan.height * ATTEMPTS_PER_PLAN, (plan.height + 1) * ATTEMPTS_PER_PLAN)


def step_numbers(plan: Plan, step: int) -> range:
    """Return the micro-batches of step `step`."""
    return range(step * plan.microbatches, (step + 1) * plan.microbatches)


class Routes:
    """One checked Open. Raises RemoteProtocolError if it does not fit the plan."""

    def __init__(self, plan: Plan, message: Open) -> None:
        self.step = message.step
        self.attempt = message.attempt
        self.train = message.train
        count = len(message.stages[0].owners)
        self.numbers = range(message.first, message.first + count)
        if message.train and self.numbers != step_numbers(plan, message.step):
            raise RemoteProtocolError("an Open does not have exactly the micro-batches of its step")
        if not message.train and count > EVALUATIONS_IN_FLIGHT_MAX:
            raise RemoteProtocolError(f"an Open has {count} held-out micro-batches, which are too many")
        if message.attempt not in attempts(plan) or len(message.stages) != len(plan.stages):
            raise RemoteProtocolError("an Open does not belong to its plan")
        for stage, routes in zip(plan.stages, message.stages, strict=True):
            if len(routes.owners) != count or max(routes.owners) >= len(stage.replicas):
                raise RemoteProtocolError("an Open gives a micro-batch to a replica that does not exist")
            if any(number not in self.numbers for number in routes.counted):
                raise RemoteProtocolError("an Open counts micro-batches that are not in it")
        self._owners = [
            [PeerId(stage.replicas[place]) for place in routes.owners]
            for stage, routes in zip(plan.stages, message.stages, strict=True)
        ]
        self._counted = [frozenset(routes.counted) for routes in message.stages]

    def owner(self, stage: int, number: int) -> PeerId | None:
        """Return the owner of a micro-batch in `stage`; None if the micro-batch is not open."""
        position = number - self.numbers.start
        return self._owners[stage][position] if 0 <= position < len(self.numbers) else None

    def wants(self, stage: int, number: int) -> PeerId | None:
        """Return the replica of `stage` that needs a frame of this micro-batch; None if none needs it any
        more."""
        if not 0 <= stage < len(self._owners):
            return None
        return None if number in self._counted[stage] else self.owner(stage, number)


def check_commit(plan: Plan, message: StepCommit) -> None:
    """Check that all replicas take part, and that each stage counts each micro-batch once. Raises
    RemoteProtocolError if not."""
    expected = {(number, peer) for number, stage in enumerate(plan.stages) for peer in stage.replicas}
    rows = {(row.stage, row.replica): row.microbatches for row in message.replicas}
    if rows.keys() != expected or len(message.replicas) != len(expected):
        raise RemoteProtocolError("a commit names unknown replicas, names a replica twice, or leaves one out")
    counted: list[list[int]] = [[] for _ in plan.stages]
    for row in message.replicas:
        counted[row.stage] += row.microbatches
    wanted = list(step_numbers(plan, message.step))
    if any(sorted(numbers) != wanted for numbers in counted):
        raise RemoteProtocolError("a commit leaves out a micro-batch, or counts one twice")


def check_frame(plan: Plan, stage: int, step: int, sender: PeerId, header: FrameHeader) -> None:
    """Check that `sender` may send this frame to a replica of `stage` at `step`. Raises RemoteProtocolError
    if not."""
    is_last = stage == len(plan.stages) - 1
    if header.step > step or header.stage != stage:
        raise RemoteProtocolError("a frame is for another stage, or for a step that has not begun")
    if header.attempt >= attempts(plan).stop:
        raise RemoteProtocolError("a frame has an attempt that does not belong to its plan")
    if header.train and header.microbatch not in step_numbers(plan, step):
        raise RemoteProtocolError("a frame is for a micro-batch outside of its step")
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
        raise RemoteProtocolError(f"a frame of {header.direction} came from a peer that must not send it")
