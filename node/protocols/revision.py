"""A revision of a running run: a signed statement of its requester that replaces the previous one.

It is signed with the key that signed the manifest, so every member accepts it whoever passes it on. Not here:
how members act on it (`node.runs.steering`), and how it is spread (`node.runs.revising`).
"""

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec.structs import replace

from crypto.encoding import decode, encode
from crypto.errors import RemoteProtocolError
from crypto.facts import Fact, Signer
from node.protocols.manifest import Run
from node.protocols.run_file import GOAL_MAX, GOAL_SECONDS, GOAL_SECONDS_MAX, GOAL_SECONDS_MIN
from partition.plan.plan import STEPS_MAX, Hash
from partition.steps.messages import RATE_MAX, RATE_UNIT

REVISION_PURPOSE = "run-revision"
REVISION_BYTES_MAX = 128
PRIORITY_MAX = 9
PRIORITY = 5
"""Priority of a run that does not set one."""


class RevisionBody(msgspec.Struct, frozen=True, array_like=True):
    """The requester's revision of its run. The revision with the highest `number` counts.

    `learning_rate` replaces the manifest's base rate, and the manifest's schedule still scales it. `steps` is
    the last step. Both are None to keep the manifest's values. `deadline_milliseconds` (Unix) is when the run
    should be done; 0 means no deadline. Among one requester's runs of equal priority, the one with the
    earliest deadline gets a slot first. The requester is alerted when the run trains less than
    `samples_per_second` over `goal_seconds`; 0 means no goal.
    """

    run: Hash
    number: Annotated[int, msgspec.Meta(ge=1, lt=2**53)]
    learning_rate: Annotated[float, msgspec.Meta(gt=0, le=10)] | None = None
    steps: Annotated[int, msgspec.Meta(ge=1, le=STEPS_MAX)] | None = None
    priority: Annotated[int, msgspec.Meta(ge=0, le=PRIORITY_MAX)] = PRIORITY
    is_paused: bool = False
    deadline_milliseconds: Annotated[int, msgspec.Meta(ge=0, lt=2**53)] = 0
    samples_per_second: Annotated[float, msgspec.Meta(ge=0, le=GOAL_MAX)] = 0.0
    goal_seconds: Annotated[int, msgspec.Meta(ge=0, le=GOAL_SECONDS_MAX)] = 0


def check_changes(changes: Mapping[str, object]) -> None:
    """Check the changes that a person wants. The keys are fields of RevisionBody. Raises ValueError."""
    whole = {"run": bytes(32), "number": 1, "learning_rate": None, "steps": None, "priority": PRIORITY}
    whole |= {"is_paused": False, "deadline_milliseconds": 0, "samples_per_second": 0.0, "goal_seconds": 0}
    row = [*(whole | dict(changes)).values()]
    try:
        msgspec.convert(row, RevisionBody)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from None
    seconds = changes.get("goal_seconds")
    if isinstance(seconds, int) and seconds < GOAL_SECONDS_MIN:
        raise ValueError(f"a goal needs a period of at least {GOAL_SECONDS_MIN} s")


def revised(before: RevisionBody, number: int, changes: Mapping[str, Any]) -> RevisionBody:
    """Return the revision to sign: `before` with the changes. Raises ValueError if they set `goal_seconds`
    but the run has no goal."""
    body = replace(before, number=number, **changes)
    if not body.samples_per_second:
        if "goal_seconds" in changes:
            raise ValueError("the run has no goal, so goal_seconds has no effect. Set samples_per_second too")
        return replace(body, goal_seconds=0)
    return body if body.goal_seconds else replace(body, goal_seconds=GOAL_SECONDS)


def make_revision(signer: Signer, body: RevisionBody) -> Fact:
    """Sign a revision as the requester."""
    return signer.sign(REVISION_PURPOSE, encode(body))


def read_revision(fact: Fact) -> RevisionBody:
    """Return the body of a revision; the signature is not checked. Raises RemoteProtocolError."""
    body: RevisionBody = decode(fact.body, RevisionBody, bytes_max=REVISION_BYTES_MAX)
    return body


def check_revision(signer: Signer, run: Run, fact: Fact) -> RevisionBody:
    """Return the body of a revision that the requester of `run` has signed. Raises RemoteProtocolError."""
    body = read_revision(fact)
    if signer.check(REVISION_PURPOSE, fact) != run.requester or body.run != run.id:
        raise RemoteProtocolError("a run may be revised only by its requester")
    return body


def rate_of(run: Run, body: RevisionBody | None) -> int:
    """Return the factor, in millionths, by which the run's learning rate is multiplied."""
    asked = run.manifest.optimizer.learning_rate
    if body is None or body.learning_rate is None or not asked:
        return RATE_UNIT
    return min(round(RATE_UNIT * body.learning_rate / asked), RATE_MAX)


def steps_of(run: Run, body: RevisionBody | None) -> int:
    """Return the number of steps after which the run ends."""
    return run.manifest.steps if body is None or body.steps is None else body.steps
