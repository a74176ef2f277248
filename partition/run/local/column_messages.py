"""Messages between the head of a column and the members that hold its other stages.

head: Attach(run, stage, step, chain)  ->  Attached(chain, mates) or Refusal(reason, mates)
head: Do, with a request of `partition.stage` as payload  ->  Did, with its answer, or Refusal
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
"""Size limit: a full chain of tickets; requests and answers are payloads."""
MATES_MAX = 32

Hash = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
Subject = Annotated[bytes, msgspec.Meta(min_length=PEER_ID_BYTES, max_length=PEER_ID_BYTES)]
Reason = Annotated[str, msgspec.Meta(max_length=REASON_LENGTH_MAX)]


class Attach(msgspec.Struct, frozen=True, array_like=True, tag="attach"):
    """Work for the sender, a head of this run after `step` steps, and a member by this chain. `keeps` asks
    for copies of the head's own stage, for its successor. `column` are the head's other nodes, to which the
    holder announces itself when the head is gone."""

    run: Hash
    stage: Annotated[int, msgspec.Meta(ge=1, lt=STAGES_MAX)]
    step: Annotated[int, msgspec.Meta(ge=0, le=STEPS_MAX)]
    chain: Chain
    keeps: bool = False
    column: Annotated[tuple[Subject, ...], msgspec.Meta(max_length=STAGES_MAX)] = ()


class Attached(msgspec.Struct, frozen=True, array_like=True, tag="attached"):
    """The holder agrees, and is a member by this chain; `mates` hold the same stage."""

    chain: Chain
    mates: Annotated[tuple[Subject, ...], msgspec.Meta(max_length=MATES_MAX)]


class ColumnRefusal(msgspec.Struct, frozen=True, array_like=True, tag="refusal"):
    """A refusal. `is_diverged`: the result was not finite, and the column continues. `mates` may hold the
    stage; another head, which holds only the first, names them. `is_older`: a newcomer's state is of an
    earlier step than another holder's, which it takes over now; ask again."""

    reason: Reason
    is_diverged: bool = False
    mates: Annotated[tuple[Subject, ...], msgspec.Meta(max_length=MATES_MAX)] = ()
    is_older: bool = False


class Do(msgspec.Struct, frozen=True, array_like=True, tag="do"):
    """A request to the holder's stage, as the payload."""


class Did(msgspec.Struct, frozen=True, array_like=True, tag="did"):
    """The answer to that request, as the payload."""


Question = Attach | Do
Answer = Attached | Did | ColumnRefusal
Work = api.Forward | api.Backward | api.Norm | api.Apply | api.Discard | api.Export
"""The requests that a head sends to another node's stage."""
Worked = api.Forwarded | api.BackwardDone | api.Normed | api.Applied | api.StageDone | api.Exported
