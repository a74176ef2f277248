"""The client's end of the control channel (`node.control`): ask the node on this machine.

It imports only the standard library (not trio, torch or msgspec), so that `status` and `peers` answer
quickly.
"""

import contextlib
import json
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from node.errors import NoNode, PeerloomError
from node.paths import CONTROL_NAME, short_path, socket_path
from node.storage.folder_lock import last_holder

CONNECT_SECONDS_MAX = 5.0
ANSWER_SECONDS_MAX = 10.0
"""Time limit for commands that only read. A node answers them within milliseconds unless it is stopped."""
_LOOK_SECONDS = 0.01
_START = "start it with `peerloom`, or give its data folder: --data-dir DIR"

Reply = dict[str, Any]


class GoneAway(NoNode):
    """The node ended or disconnected before it answered. `leave` catches this error, because it expects
    that."""


class NodeRefused(PeerloomError):
    """The node answered with an error, which includes the exit code. `trace` is for --debug."""

    def __init__(self, what: str, do: str | None, exit_code: int, trace: str) -> None:
        super().__init__(what, do)
        self.exit_code = exit_code
        self.trace = trace


def request(
    data_dir: Path,
    command: str,
    arguments: Mapping[str, object] | None = None,
    *,
    seconds: float | None = None,
) -> Iterator[Reply]:
    """Ask the node that holds `data_dir`. Yield `{"event": ...}` as events arrive, and finally `{"result":
    ...}`.

    Closing the iterator disconnects, which cancels the command in the node. `seconds` is the time limit for
    each line; None means no limit.

    Raises:
        NoNode: no node holds this data folder, it is another user's, or it was silent for `seconds`.
        GoneAway: the node ended meanwhile.
        NodeRefused: the node's own error, with its exit code.
    """
    line = json.dumps({"command": command, "arguments": dict(arguments or {})})
    with _connect(data_dir) as connection:
        connection.settimeout(seconds)
        try:
            # the node refused before reading; its answer gives the reason
            with contextlib.suppress(BrokenPipeError):
                connection.sendall(line.encode() + b"\n")
            with connection.makefile("rb") as lines:
                for answer in lines:
                    reply = _checked(answer)
                    yield reply
                    if "result" in reply:
                        return
        except TimeoutError:
            raise NoNode(*_silence(data_dir, seconds or 0.0)) from None
        except OSError:
            pass  # reported below as an end without a result
    raise _gone()


def ask(
    data_dir: Path,
    command: str,
    arguments: Mapping[str, object] | None = None,
    on_event: Callable[[Any], None] | None = None,
    *,
    seconds: float | None = ANSWER_SECONDS_MAX,
) -> Any:
    """Return the result of `request`. `on_event` is called with each event. Raises the same errors as
    `request`."""
    for reply in request(data_dir, command, arguments, seconds=seconds):
        if "result" in reply:
            return reply["result"]
        if on_event is not None:
            on_event(reply["event"])
    raise AssertionError("request ended without a result")


def peer_names(data_dir: Path) -> dict[str, str]:
    """Return the names of this node and the peers that it knows, by peer id. Raises the same errors as
    `request`."""
    own = ask(data_dir, "status")
    rows = [own, *ask(data_dir, "peers")["peers"]]
    return {row["peer"]: row["name"] for row in rows if row["name"]}


def is_running(data_dir: Path) -> bool:
    """Return whether a node holds `data_dir` and listens. It may be stopped or busy."""
    try:
        _connect(data_dir, seconds=0.0).close()
    except _Stuck:
        return True
    except NoNode:
        return False
    return True


class _Stuck(NoNode):
    """The node listens but accepts no connection."""


def _connect(data_dir: Path, seconds: float = CONNECT_SECONDS_MAX) -> socket.socket:
    """Connect to the node that holds `data_dir`, waiting up to `seconds` for a busy one. Raises NoNode."""
    until = time.monotonic() + seconds
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(CONNECT_SECONDS_MAX)
        with socket_path(data_dir) as path:
            while True:
                try:
                    connection.connect(path)
                    return connection
                except BlockingIOError:  # the queue of unaccepted connections is full
                    if time.monotonic() >= until:
                        raise _Stuck(*_silence(data_dir, seconds)) from None
                time.sleep(_LOOK_SECONDS)
    except BaseException as error:
        connection.close()
        if isinstance(error, FileNotFoundError | NotADirectoryError):
            raise _no_node(data_dir) from None
        if isinstance(error, ConnectionRefusedError):
            holder = last_holder(data_dir)
            who = f"process {holder}" if holder else "it"
            raise _no_node(data_dir, f"; {who} ended without a goodbye") from None
        if isinstance(error, OSError):
            reason = (error.strerror or str(error)).lower()
            raise _no_node(data_dir, f"; {CONTROL_NAME}: {reason}") from None
        raise


def _silence(data_dir: Path, seconds: float) -> tuple[str, str]:
    """Return the error for a node that does not answer, with a remedy."""
    holder = last_holder(data_dir)
    end = f"; to end it: kill {holder}" if holder else ""
    return (
        f"the node in {short_path(data_dir)} has not answered for {seconds:g} s",
        f"check whether it is stopped or very busy{end}",
    )


def _checked(answer: bytes) -> Reply:
    try:
        reply = json.loads(answer)
    except ValueError:
        # The node writes only JSON, so this line was cut off when the node ended.
        raise _gone() from None
    if not isinstance(reply, dict) or not reply.keys() & {"event", "result", "error"}:
        raise PeerloomError(
            "the node sent something that this command does not know: check that both have the same version"
        )
    error = reply.get("error")
    if error is not None:
        raise NodeRefused(error["what"], error.get("do"), error["exit_code"], error.get("trace", ""))
    return reply


def _gone() -> GoneAway:
    return GoneAway("the node disconnected before it had answered", "look at its screen, then ask again")


def _no_node(data_dir: Path, why: str = "") -> NoNode:
    return NoNode(f"no node runs on this machine (looked in {short_path(data_dir)}){why}", _START)
