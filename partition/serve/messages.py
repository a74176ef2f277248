"""`/peerloom/serve/3`: the messages between the door and the providers of a service.

    door -> every stage       OpenSession(session, ...)            SessionOpened | SessionClosed
    door -> first stage       Work(session, position, ...)  with token ids
    stage -> next stage       Work                          with the boundary's tensors
    last stage -> door        Answer                        with the logits of the rows that are wanted
    door -> every stage       RestSession(session)            over, but others may begin from it
    door -> every stage       LeaveSession(session)
    a stage -> door           SessionClosed(session, code)         it does not serve this session (any more)
    both ways                 Alive                         while they share a session
    member -> member          Roll                          who holds which stage of a service

One stream per ordered pair of peers, so messages between two peers stay in order. A session belongs to its
door: its id is random, the providers identify it with the door's key, and take its units only from the
previous peer that the door named. A unit is `(session, position, tokens)`: several tokens at once, and any
position up to the kept length, are allowed, so that chunks, rollback and verification need no other format. A
session may begin with the first tokens of another one of the same door (`OpenSession.base`), which every
stage of both has computed: its first unit then stands behind them.

A peer may hold several stages of one service. The door opens the session there for each of them, and the peer
sends itself the units between two that follow one another. A close, a rest and an end are for all of them.

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
"""The version before: without `OpenSession.base` and RestSession, and a peer held one stage of a service."""
MESSAGE_BYTES_MAX = 4_096
"""A Roll with all its rows takes 2.6 KB. Tensors travel beside messages, as payloads."""
SESSION_BYTES = 16
UNIT_TOKENS_MAX = 512
"""Tokens of one unit: a chunk of a prompt. A longer one would make others wait."""
POSITION_MAX = 1 << 24
"""Tokens of one session: far beyond any context a model has now."""
BEST_MAX = 256
"""Logits of a row that are sent instead of the whole row, where sampling needs no more."""
REASON_LENGTH_MAX = 200
ROLL_ROWS_MAX = 64
"""Members of one service that a member tells of."""
TENSORS_MAX = 16
"""Tensors of one boundary."""
SHARES_MAX = 1 << 16
"""Numbers that a door may give its shares; the sessions of one bound how many it has."""
UNITS_MAX = 1 << 31
"""Units of one session are numbered in the order of sending."""

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
"""Why a session is not served: no room now; its place was given to another, for its door sent nothing; the
stage failed; the node leaves; more tokens than the model takes; tokens are missing before the unit; the owner
serves others only; there is no such session here."""


class SessionBase(msgspec.Struct, frozen=True, array_like=True):
    """The first `tokens` of a session that all stages have computed."""

    session: Session
    tokens: Annotated[int, msgspec.Meta(ge=1, le=POSITION_MAX)]


class OpenSession(msgspec.Struct, frozen=True, array_like=True, tag="open"):
    """Serve this session of mine with your stage of a service: `before` sends you its units (the door itself
    at the first stage), and you pass them on to `after` (the door itself at the last). It begins with the
    first tokens of another of my sessions, if there is a `base`. My sessions with another `share` are for
    another user, and have separate turns among mine."""

    session: Session
    service: Hash
    stage: StageNumber
    before: Peer
    after: Peer
    base: SessionBase | None = None
    share: Annotated[int, msgspec.Meta(ge=0, lt=SHARES_MAX)] = 0


class SessionOpened(msgspec.Struct, frozen=True, array_like=True, tag="opened"):
    """I do, with this stage. The version before names none: the only one that I hold."""

    session: Session
    stage: StageNumber | None = None


class SessionClosed(msgspec.Struct, frozen=True, array_like=True, tag="closed"):
    """I do not, or no more."""

    session: Session
    code: CloseCode
    reason: Reason = ""


class UnitWork(msgspec.Struct, frozen=True, array_like=True, tag="work"):
    """A unit for one stage; the previous version names none, since its peers hold a single stage. It keeps
    `position` tokens of the session, rolling back to that if it has more. The last stage answers the `wanted`
    last rows, of each the `best` logits (0: all), or with `is_hidden` its hidden state, of which the head
    makes logits. The tensors' bytes follow."""

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
    """The result of the last stage for a unit. With `best` the tensors are the ids (int64) of each row's best
    logits and the logits themselves, else all logits of the rows; none where no row was wanted. `sums` are
    the logarithms of each row's sum of exponentials. Where hidden states were wanted, they are the tensor,
    a row for each, without sums. The tensors' bytes follow."""

    session: Session
    number: UnitNumber
    best: Best = 0
    sums: Annotated[tuple[float, ...], msgspec.Meta(max_length=ROWS_MAX)] = ()
    tensors: Tensors = ()


class LeaveSession(msgspec.Struct, frozen=True, array_like=True, tag="end"):
    """ForgetSession this session of mine."""

    session: Session


class RestSession(msgspec.Struct, frozen=True, array_like=True, tag="rest"):
    """This session of mine is over. Keep it as long as you need its room for nothing else: others of mine may
    begin from it."""

    session: Session


class Alive(msgspec.Struct, frozen=True, array_like=True, tag="alive"):
    """My node runs. This says nothing about a running computation, which may take any time."""


class ServiceRow(msgspec.Struct, frozen=True, array_like=True):
    """A member of a service: its stage, and whether that answers. A peer that holds several has a row for
    each; `is_stopgap` as in Roll."""

    peer: Peer
    stage: StageNumber
    is_ready: bool
    is_stopgap: bool = False


class Roll(msgspec.Struct, frozen=True, array_like=True, tag="roll"):
    """I hold this stage of a service, or am loading it, or leave it (`is_leaving`); `rows` are the members
    that I know. With `is_stopgap` I hold another stage too, and this one only until another member does."""

    service: Hash
    stage: StageNumber
    is_ready: bool
    is_leaving: bool = False
    rows: Annotated[tuple[ServiceRow, ...], msgspec.Meta(max_length=ROLL_ROWS_MAX)] = ()
    is_stopgap: bool = False


@dataclass(frozen=True)
class Carried:
    """A Work or an Answer with its tensors, as cores hand them on: `tensors` of the message is the wire's."""

    message: UnitWork | Answer
    arrays: tuple[Typed, ...] = ()

    @property
    def size_bytes(self) -> int:
        """Return the bytes of the tensors."""
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
"""Messages that a core has its driver send, and to whom."""


def in_former_version(message: Message) -> Message:
    """Return a message as `SERVE_PROTOCOL_FORMER` has it."""
    match message:
        case RestSession():
            return LeaveSession(message.session)
        case OpenSession():
            return replace(message, base=None)
        case _:
            return message
