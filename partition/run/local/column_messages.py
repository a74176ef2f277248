"""Messages between the head of a column and the members that hold its other stages.

head: Attach(run, stage, step, chain)  ->  Attached(chain, mates) or ColumnRefusal(reason, mates)
head: Do, with a request of `partition.stage` as payload  ->  Did, with its answer, or ColumnRefusal
"""

from typing import Annotated

import msgspec

from crypto.identity import PEER_ID_BYTES
from partition import stage as api
from partition.plan.plan import STAGES_MAX, STEPS_MAX
from partition.run.tickets import Chain
from partition.stage import REASON_LENGTH_MAX

PROTOCOL = "/peerloom/column/1"
MESSAGE_BYTES_MAX = 32 * 1024
"""Maximum size of a message: a full chain of tickets. The stages' requests and answers are payloads."""
MATES_MAX = 32

Hash = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
Subject = Annotated[bytes, msgspec.Meta(min_length=PEER_ID_BYTES, max_length=PEER_ID_BYTES)]
Reason = Annotated[str, msgspec.Meta(max_length=REASON_LENGTH_MAX)]


class Attach(msgspec.Struct, frozen=True, array_like=True, tag="attach"):
    """Request to work for the sender, a head of this run after `step` steps, and a member as `chain` proves.
    `keeps` asks for copies of the head's own stage, for its successor. `column` are the head's other nodes,
    to which the holder announces itself when the head is gone."""

    run: Hash
    stage: Annotated[int, msgspec.Meta(ge=1, lt=STAGES_MAX)]
    step: Annotated[int, msgspec.Meta(ge=0, le=STEPS_MAX)]
    chain: Chain
    keeps: bool = False
    column: Annotated[tuple[Subject, ...], msgspec.Meta(max_length=STAGES_MAX)] = ()


class Attached(msgspec.Struct, frozen=True, array_like=True, tag="attached"):
    """The holder agrees, and is a member as `chain` proves. `mates` hold the same stage."""

    chain: Chain
    mates: Annotated[tuple[Subject, ...], msgspec.Meta(max_length=MATES_MAX)]


class ColumnRefusal(msgspec.Struct, frozen=True, array_like=True, tag="refusal"):
    """A refusal. `is_diverged`: the result was not finite, and the column continues. `mates` may hold the
    stage; a head that is asked, which holds only the first stage, names them. `is_older`: the newcomer's
    state is older than another holder's state, which it takes over now; ask again later."""

    reason: Reason
    is_diverged: bool = False
    mates: Annotated[tuple[Subject, ...], msgspec.Meta(max_length=MATES_MAX)] = ()
    is_older: bool = False


class Do(msgspec.Struct, frozen=True, array_like=True, tag="do"):
    """A request to the holder's stage. The request is the payload."""


class Did(msgspec.Struct, frozen=True, array_like=True, tag="did"):
    """The answer of the holder's stage. The answer is the payload."""


Question = Attach | Do
Answer = Attached | Did | ColumnRefusal
Work = api.Forward | api.Backward | api.Norm | api.Apply | api.Discard | api.Export
"""The requests that a head sends to another node's stage."""
Worked = api.Forwarded | api.BackwardDone | api.Normed | api.Applied | api.StageDone | api.Exported
