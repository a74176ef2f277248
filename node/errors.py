"""The exception tree: a class exists only if a caller handles it differently.

    PeerloomError                what the user did or can fix; carries its exit code
        UsageError        2      a flag, a config key, an address, a port, a data folder
        NoNode            3      a client command found no node on this machine
        JoinTimeout       4      --require-join timed out
        RunFailed         5      a plan is infeasible, or a run failed
        CheckFailed       6      an invariant of a simulation broke
    Unreachable                  no path to a peer; the caller tries elsewhere
        WrongPeer                a different peer answered at the address
    StreamClosed                 this side or the other side closed a stream
        StreamEnded              the other side has announced its end of sending, and all its data has arrived
    StageFailed                  a stage process died or refused
        PayloadRefused           data sent by others cannot be used; the stage goes on
        SessionRefused           the stage has too few tokens of a session, or no pages for it; it goes on
        StageDiverged            the result is not finite, as on any other peer; the stage goes on

Garbage from a peer is `crypto.errors.RemoteProtocolError`, never one of these.
"""

from typing import Literal

from crypto.errors import LocalProtocolError, ProtocolError, RemoteProtocolError
from node.invocation import shown

__all__ = [
    "CheckFailed",
    "JoinTimeout",
    "LocalProtocolError",
    "NoNode",
    "PayloadRefused",
    "PeerloomError",
    "ProtocolError",
    "RemoteProtocolError",
    "RunFailed",
    "SessionRefused",
    "StageDiverged",
    "StageFailed",
    "StreamClosed",
    "StreamEnded",
    "Unreachable",
    "UsageError",
    "WrongPeer",
    "split_place",
]

EXIT_DONE = 0
EXIT_UNEXPECTED = 1
EXIT_FORCED = 130


class PeerloomError(Exception):
    """An error for people: `what` happened and where, and optionally what to `do`; at most three lines.

    Both texts name commands in the form of `node.invocation`, and are shown with the commands as this
    process's user types them. `written` has the original texts, for a process that forwards them to another
    process's user.
    """

    exit_code = EXIT_UNEXPECTED

    def __init__(self, what: str, do: str | None = None) -> None:
        super().__init__(what)
        self.written = (what, do)

    @property
    def what(self) -> str:
        return shown(self.written[0])

    @property
    def do(self) -> str | None:
        do = self.written[1]
        return None if do is None else shown(do)

    def __str__(self) -> str:
        return self.what


class UsageError(PeerloomError):
    exit_code = 2


class NoNode(PeerloomError):
    exit_code = 3


class JoinTimeout(PeerloomError):
    exit_code = 4


class RunFailed(PeerloomError):
    exit_code = 5


class CheckFailed(PeerloomError):
    exit_code = 6


class Unreachable(Exception):
    """No path to a peer. `reason` is a code: refused, busy (ask again later), timeout, unknown, wrong key, or
    work (an id without the swarm's proof of work, or a different setting of it)."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


class NotListening(Unreachable):
    """The host answers, but reports that nothing listens at the peer's address."""

    def __init__(self, detail: str) -> None:
        super().__init__("refused", detail)


class WrongPeer(Unreachable):
    """A peer other than the expected one proved its identity."""


class StreamClosed(Exception):
    """The stream is over; nothing more can be sent or received on it."""


class StreamEnded(StreamClosed):
    """The other side sends no more. Unlike after a cut, all data that it sent has arrived. This side may
    still send unless the other side has also closed."""


class StageFailed(Exception):
    """The stage's process died, exceeded a limit or refused a request."""


class PayloadRefused(StageFailed):
    """A payload given to the stage cannot be used. `part` says which; for `of_values` see
    `partition.stage.Refused`."""

    def __init__(
        self, reason: str, part: Literal["input", "labels", "gradient"], *, of_values: bool = False
    ) -> None:
        super().__init__(reason)
        self.part = part
        self.of_values = of_values


class SessionRefused(StageFailed):
    """A stage cannot continue a served session: it holds fewer tokens than the unit's position or, with
    `has_no_room`, has no free pages. The stage goes on, and no session has changed."""

    def __init__(self, reason: str, session: bytes, *, has_no_room: bool) -> None:
        super().__init__(reason)
        self.session = session
        self.has_no_room = has_no_room


class StageDiverged(StageFailed):
    """The stage computed non-finite numbers from finite payloads; the stage remains usable."""


def split_place(message: str) -> tuple[str, str]:
    """Split msgspec's error about a wrong value, "... - at `$.table[0].key`", into the fault and its
    location, `table[0].key`. The location is empty if the whole value is wrong."""
    fault, _, place = message.partition(" - at `$")
    return fault, place.rstrip("`").lstrip(".")
