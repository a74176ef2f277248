"""`/peerloom/serve/3`: the messages between a door (the node that asks) and the providers of a service.

    door -> every stage       OpenSession(session, ...); answer: SessionOpened or SessionClosed
    door -> first stage       Work(session, position, ...), with token ids
    stage -> next stage       Work, with the tensors of the boundary between them
    last stage -> door        Answer, with the logits of the requested rows
    door -> every stage       RestSession(session): it is over, but others may begin from it
    door -> every stage       LeaveSession(session): forget it
    a stage -> door           SessionClosed(session, code): it does not serve this session (any more)
    both ways                 Alive, while the two peers share a session
    member -> member          Roll: which member holds which stage of a service

There is one stream per ordered pair of peers, so messages between two peers stay in order. A session belongs
to its door: its id is random, the providers identify it together with the door's key, and they accept its
units only from the previous peer that the door named. A unit is `(session, position, tokens)`. It may have
several tokens, and begin at any position up to the kept length, so chunks, rollback and verification need no
other format. A session may begin with the first tokens of another session of the same door
(`OpenSession.base`), which every stage of both has computed; its first unit then comes after these tokens.

A peer may hold several stages of one service. The door opens the session there for each of them, and the peer
passes units between two successive stages to itself. Closing, resting and leaving apply to all of its stages.

Not here: finding a service and asking a node to hold a stage (`node.protocols.services`).
"""

from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec
from msgspec.structs import replace

from crypto.identity import PEER_ID_BYTES, PeerId
from partition.codecs.codec import TensorHeader, Typed
from partition.model.serving import ROWS_MAX
from partition.plan.plan import STAGES_MAX

SERVE_PROTOCOL = "/peerloom/serve/3"
SERVE_PROTOCOL_FORMER = "/peerloom/serve/1"
"""The previous version of the protocol: it has no `OpenSession.base` and no RestSession, and a peer holds one
stage of a service."""
MESSAGE_BYTES_MAX = 4_096
"""Maximum size of a message. A Roll with all its rows takes 2.6 KB. Tensors travel separately, as
payloads."""
SESSION_BYTES = 16
UNIT_TOKENS_MAX = 512
"""Maximum number of tokens of one unit: a chunk of a prompt. A longer unit would make others wait."""
POSITION_MAX = 1 << 24
"""Maximum number of tokens of one session, far above any model's context today."""
BEST_MAX = 256
"""Maximum number of logits of a row that are sent instead of the whole row, if sampling needs no more."""
REASON_LENGTH_MAX = 200
ROLL_ROWS_MAX = 64
"""Maximum number of members of one service that a member reports."""
TENSORS_MAX = 16
"""Maximum number of tensors of one boundary between stages."""
SHARES_MAX = 1 << 16
"""Number of different values of `OpenSession.share`, one for each user of the door. Only shares with an open
session take memory."""
UNITS_MAX = 1 << 31
"""Upper bound of a unit's number, exclusive. The units of one session are numbered in the order of
sending."""

Session = Annotated[bytes, msgspec.Meta(min_length=SESSION_BYTES, max_length=SESSION_BYTES)]
Hash = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
Peer = Annotated[bytes, msgspec.Meta(min_length=PEER_ID_BYTES, max_length=PEER_ID_BYTES)]
StageNumber = Annotated[int, msgspec.Meta(ge=0, lt=STAGES_MAX)]
Position = Annotated[int, msgspec.Meta(ge=0, le=POSITION_MAX)]
Tokens = Annotated[int, msgspec.Meta(ge=1, le=UNIT_TOKENS_MAX)]
Rows = Annotated[int, msgspec.Meta(ge=0, le=ROWS_MAX)]
Best = Annotated[int, msgspec.Meta(ge=0, le=BEST_MAX)]
UnitNumber = Annotated[int, msgspec.Meta(ge=0, lt=UNITS_MAX)]
Reason = Annotated[str, msgspec.Meta(max_length=REASON_LENGTH_MAX)]
Tensors = Annotated[tuple[TensorHeader, ...], msgspec.Meta(max_length=TENSORS_MAX)]
CloseCode = Literal["busy", "evicted", "failed", "leaving", "length", "position", "refused", "unknown"]
"""The reason why a session is not served. busy: there is no room now; evicted: its place was given to another
session, because its door sent nothing; failed: the stage failed; leaving: the node leaves; length: it has
more tokens than the model takes; position: tokens before the unit are missing; refused: the node's owner does
not serve this door; unknown: there is no such session here."""


class SessionBase(msgspec.Struct, frozen=True, array_like=True):
    """The first `tokens` of a session, which all stages have computed."""

    session: Session
    tokens: Annotated[int, msgspec.Meta(ge=1, le=POSITION_MAX)]


class OpenSession(msgspec.Struct, frozen=True, array_like=True, tag="open"):
    """Serve this session of mine with your stage of a service. `before` sends you its units (the door itself
    at the first stage), and you pass them on to `after` (the door itself at the last stage). If there is a
    `base`, the session begins with the first tokens of another session of mine. Sessions of mine with a
    different `share` belong to a different user; users take turns within the computing time that I get."""

    session: Session
    service: Hash
    stage: StageNumber
    before: Peer
    after: Peer
    base: SessionBase | None = None
    share: Annotated[int, msgspec.Meta(ge=0, lt=SHARES_MAX)] = 0


class SessionOpened(msgspec.Struct, frozen=True, array_like=True, tag="opened"):
    """I serve this session, with this stage. The previous version names no stage, because a peer holds only
    one."""

    session: Session
    stage: StageNumber | None = None


class SessionClosed(msgspec.Struct, frozen=True, array_like=True, tag="closed"):
    """I do not serve this session, or no longer."""

    session: Session
    code: CloseCode
    reason: Reason = ""


class UnitWork(msgspec.Struct, frozen=True, array_like=True, tag="work"):
    """A unit for one stage; the previous version names no stage, because a peer holds only one. The unit
    begins after `position` tokens of the session; if the stage has more, it rolls back to there. The last
    stage answers for the last `wanted` rows: with the `best` highest logits of each (0: all logits). If
    `is_hidden`, it answers with the inputs of the model's head for these rows instead. The tensors' bytes
    follow."""

    session: Session
    number: UnitNumber
    position: Position
    tokens: Tokens
    wanted: Rows
    best: Best
    tensors: Tensors = ()
    stage: StageNumber | None = None
    is_hidden: bool = False


class Answer(msgspec.Struct, frozen=True, array_like=True, tag="answer"):
    """The result of the last stage for a unit. With `best`, the tensors are the ids (int64) of each row's
    best logits, and these logits. Otherwise they are all logits of the rows; there are none if no row was
    wanted. `sums` are the logarithms of each row's sum of exponentials. If hidden states were wanted, they
    are the only tensor, with one row for each wanted row, and `sums` is empty. The tensors' bytes follow."""

    session: Session
    number: UnitNumber
    best: Best = 0
    sums: Annotated[tuple[float, ...], msgspec.Meta(max_length=ROWS_MAX)] = ()
    tensors: Tensors = ()


class LeaveSession(msgspec.Struct, frozen=True, array_like=True, tag="end"):
    """Forget this session of mine."""

    session: Session


class RestSession(msgspec.Struct, frozen=True, array_like=True, tag="rest"):
    """This session of mine is over. Keep it until you need its room: other sessions of mine may begin from
    it."""

    session: Session


class Alive(msgspec.Struct, frozen=True, array_like=True, tag="alive"):
    """My node is running. This says nothing about a computation in progress, which may take any time."""


class ServiceRow(msgspec.Struct, frozen=True, array_like=True):
    """A member of a service: its stage, and whether the stage answers. A peer that holds several stages has a
    row for each. `is_stopgap` has the same meaning as in Roll."""

    peer: Peer
    stage: StageNumber
    is_ready: bool
    is_stopgap: bool = False


class Roll(msgspec.Struct, frozen=True, array_like=True, tag="roll"):
    """I hold this stage of a service, am loading it, or am leaving it (`is_leaving`). `rows` are the members
    that I know. `is_stopgap`: I hold another stage too, and this one only until another member does."""

    service: Hash
    stage: StageNumber
    is_ready: bool
    is_leaving: bool = False
    rows: Annotated[tuple[ServiceRow, ...], msgspec.Meta(max_length=ROLL_ROWS_MAX)] = ()
    is_stopgap: bool = False


@dataclass(frozen=True)
class Carried:
    """A Work or an Answer with its tensors, as cores exchange them. The `tensors` field of the message is
    only for the wire."""

    message: UnitWork | Answer
    arrays: tuple[Typed, ...] = ()

    @property
    def size_bytes(self) -> int:
        """The size of the tensors in bytes."""
        return sum(array.nbytes for _, array in self.arrays)


Message = (
    OpenSession
    | SessionOpened
    | SessionClosed
    | UnitWork
    | Answer
    | LeaveSession
    | RestSession
    | Alive
    | Roll
)
Sends = list[tuple[PeerId, Message | Carried]]
"""Messages that a driver must send for a core, with their receivers."""


def in_former_version(message: Message) -> Message:
    """Return the form of a message in `SERVE_PROTOCOL_FORMER`."""
    match message:
        case RestSession():
            return LeaveSession(message.session)
        case OpenSession():
            return replace(message, base=None)
        case _:
            return message
