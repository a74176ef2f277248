"""The client's end of the control channel (`node.control`): ask the node on this machine.

Only the standard library, so that `status` and `peers` answer at once: no trio, torch or msgspec.
"""

import json
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from node.errors import NoNode, PeerloomError
from node.paths import CONTROL_NAME, short_path

CONNECT_SECONDS_MAX = 5.0
ANSWER_SECONDS_MAX = 10.0
"""For commands that only look: a node answers them in milliseconds unless it is stopped."""
_START = "python -m node, or name its data folder: --data-dir DIR"

Reply = dict[str, Any]


class GoneAway(NoNode):
    """The node ended, or hung up, before it had answered: caught by `leave`, which wants just that."""


class NodeRefused(PeerloomError):
    """The node answered with an error; it says which exit code this is. `trace` is for --debug."""

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
    """Ask the node that holds `data_dir`; yields `{"event": ...}` as they come, lastly `{"result": ...}`.

    Closing the iterator hangs up, which cancels the command in the node. `seconds` is how long one line
    may take, None for as long as it likes.

    Raises:
        NoNode: no node holds this data folder, or it said nothing for `seconds`.
        GoneAway: it went away in between.
        NodeRefused: the node's own error, with its exit code.
    """
    control = _read_control(data_dir)
    line = json.dumps({"token": control["token"], "command": command, "arguments": dict(arguments or {})})
    try:
        connection = socket.create_connection(("127.0.0.1", control["port"]), CONNECT_SECONDS_MAX)
    except OSError:
        raise _no_node(data_dir, f"; nothing answers on its port {control['port']}") from None
    with connection:
        connection.settimeout(seconds)
        try:
            connection.sendall(line.encode() + b"\n")
            with connection.makefile("rb") as lines:
                for answer in lines:
                    reply = _checked(answer)
                    yield reply
                    if "result" in reply:
                        return
        except TimeoutError:
            raise NoNode(
                f"the node in {short_path(data_dir)} has not answered for {seconds:g} s",
                f"is it stopped or very busy? to end it: kill {control['pid']}",
            ) from None
        except OSError:
            pass  # said below: an end without a result
    raise _gone()


def ask(
    data_dir: Path,
    command: str,
    arguments: Mapping[str, object] | None = None,
    on_event: Callable[[Any], None] | None = None,
    *,
    seconds: float | None = ANSWER_SECONDS_MAX,
) -> Any:
    """The result of `request`; each event goes to `on_event`. Raises as `request` does."""
    for reply in request(data_dir, command, arguments, seconds=seconds):
        if "result" in reply:
            return reply["result"]
        if on_event is not None:
            on_event(reply["event"])
    raise AssertionError("request ends with a result or raises")


def is_running(data_dir: Path) -> bool:
    """Whether a node seems to hold `data_dir` (its process is alive)."""
    try:
        _read_control(data_dir)
    except NoNode:
        return False
    return True


def _read_control(data_dir: Path) -> dict[str, Any]:
    path = data_dir / CONTROL_NAME
    try:
        control: dict[str, Any] = json.loads(path.read_bytes())
        pid, port, token = control["pid"], control["port"], control["token"]
    except FileNotFoundError:
        raise _no_node(data_dir) from None
    except OSError as error:
        raise _no_node(data_dir, f"; {CONTROL_NAME}: {(error.strerror or str(error)).lower()}") from None
    except (ValueError, KeyError, TypeError):
        raise _no_node(data_dir, f"; its {CONTROL_NAME} is damaged") from None
    if not (isinstance(pid, int) and isinstance(port, int) and isinstance(token, str)):
        raise _no_node(data_dir, f"; its {CONTROL_NAME} is damaged")
    if not _is_alive(pid):
        raise _no_node(data_dir, f"; process {pid} ended without a goodbye")
    return control


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (ProcessLookupError, OverflowError):
        return False
    return True


def _checked(answer: bytes) -> Reply:
    try:
        reply = json.loads(answer)
    except ValueError:
        # The node writes nothing but JSON, so this line was cut by its end.
        raise _gone() from None
    if not isinstance(reply, dict) or not reply.keys() & {"event", "result", "error"}:
        raise PeerloomError("the node sent what this command does not know; are both of one version?")
    error = reply.get("error")
    if error is not None:
        raise NodeRefused(error["what"], error.get("do"), error["exit_code"], error.get("trace", ""))
    return reply


def _gone() -> GoneAway:
    return GoneAway("the node went away before it had answered", "look at its screen, then ask again")


def _no_node(data_dir: Path, why: str = "") -> NoNode:
    return NoNode(f"no node runs on this machine (looked in {short_path(data_dir)}){why}", _START)
