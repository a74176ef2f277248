"""Runs a command line and returns its exit code: every error becomes at most three lines on stderr.

This is used by the commands of the node and of the simulator. typer parses the command line, and its errors
are rewritten in our form. Exit codes are those of `node.errors`.
"""

import errno
import io
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import typer

from node.cli.render import show_error
from node.errors import EXIT_DONE, EXIT_FORCED, EXIT_UNEXPECTED, PeerloomError, UsageError
from node.paths import NO_HOME, NO_ROOM, short_path
from node.shadowing import remedy, shadow_behind, shadow_text
from node.suggest import nearest

DEBUG = "--debug"
_SYSTEM = (*NO_ROOM, errno.EROFS)
"""Errors that are shown like a mistyped flag, wherever they are raised."""
_NO_TEMPORARY = "No usable temporary directory"
_NO_HOME_FOLDER = "Could not determine home directory."
"""The messages with which Python (tempfile, pathlib) reports these errors."""


Keys = Mapping[str, Callable[[], Mapping[str, str]]]
"""For each command that reads a file: the file's keys written as flags, and the table of each key."""


def dispatch(app: typer.Typer, arguments: Sequence[str], program: str, keys: Keys | None = None) -> int:
    """Run the command line; return the exit code. Raises nothing."""
    # Remove it before parsing, so that it works after any command, and for parsing errors.
    rest = [argument for argument in arguments if argument != DEBUG]
    debug = len(rest) < len(arguments)
    for stream in (sys.stdout, sys.stderr):
        # A name with characters that the terminal cannot show must not fail the command.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        code = app(rest, prog_name=program, standalone_mode=False)
    except KeyboardInterrupt:
        return EXIT_FORCED
    except SystemExit as end:  # typer exits like this if a pipe is closed
        return end.code if isinstance(end.code, int) else EXIT_UNEXPECTED
    except Exception as error:
        return _fail(error, program, keys or {}, debug=debug)
    except BaseExceptionGroup as group:
        # While a node starts, Ctrl-C may be raised out of a nursery.
        if group.subgroup(KeyboardInterrupt) is None:
            raise
        return EXIT_FORCED
    return code if isinstance(code, int) else EXIT_DONE


def _fail(error: Exception, program: str, keys: Keys, *, debug: bool) -> int:
    if debug:
        traceback.print_exception(error)
        sys.stderr.write(getattr(error, "trace", ""))
    while isinstance(error, ExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    told = _told(error, program, keys)
    show_error(told)
    return told.exit_code


def _told(error: Exception, program: str, keys: Keys) -> PeerloomError:
    """Return any error as one with a remedy."""
    if isinstance(error, PeerloomError):
        return error
    if isinstance(error, ModuleNotFoundError) and error.name == "torch":
        from node.services.torch_extra import NO_TORCH, torch_remedy

        return UsageError(f"{NO_TORCH}, and this command needs it", torch_remedy())
    if (found := shadow_behind(error)) is not None:
        return UsageError(shadow_text(*found), remedy())
    if hasattr(error, "format_message"):
        # typer's usage errors are recognized by this method, because their module is not public.
        return _parsing_error(error, program, keys)
    if isinstance(error, OSError) and (error.errno in _SYSTEM or _NO_TEMPORARY in str(error)):
        return _system_error(error)
    if isinstance(error, RuntimeError) and str(error) == _NO_HOME_FOLDER:
        return UsageError(NO_HOME, "write the whole path, or set HOME")
    what = "; ".join((f"unexpected {type(error).__name__}: {error}", *getattr(error, "__notes__", ())))
    return PeerloomError(what, f"repeat the command with {DEBUG} to see where, and report it")


def _system_error(error: OSError) -> UsageError:
    """Return the error for a failed system call whose cause a user can fix."""
    reason = (error.strerror or str(error)).lower()
    if error.filename is None:
        return UsageError(
            f"{reason}; the program could not write its files", "make room, or use another disk"
        )
    return UsageError(
        f"{short_path(str(error.filename))}: {reason}", "free some space there, or choose another path"
    )


def _parsing_error(error: Any, program: str, keys: Keys) -> UsageError:
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else program
    option = getattr(error, "option_name", None)
    message = error.format_message().strip()
    if option is not None and message.startswith("No such option"):
        command = context.command if context is not None else None
        message = f"unknown flag {option}" + _meant(option, command, keys)
    elif context is not None and (names := _commands_of(error, message, context)):
        message = f"{path.removeprefix(program).strip()}: want a command: {', '.join(names)}"
    else:
        message = message[:1].lower() + message[1:].rstrip(".").replace(". Did you", "; did you")
    return UsageError(message, f"{path} --help")


def _commands_of(error: Any, message: str, context: Any) -> list[str]:
    """Return the commands of a group that was typed without one. typer would print the group's whole help."""
    is_alone = type(error).__name__ == "NoArgsIsHelpError" or message.startswith("Missing command")
    return list(context.command.list_commands(context)) if is_alone else []


def _meant(option: str, command: Any, keys: Keys) -> str:
    """Return a hint for an unknown option: `; did you mean --join?`, or the key of a file that the command
    reads, or ""."""
    parameters = command.params if command is not None else ()
    known = [flag for each in parameters for flag in (*each.opts, *each.secondary_opts)]
    if (near := nearest(option, known)) is not None:
        return f"; did you mean {near}?"
    places = keys[command.name]() if command is not None and command.name in keys else {}
    if (near := nearest(option, list(places))) is not None:
        return f"; did you mean '{near.removeprefix('--').replace('-', '_')}' {places[near]}?"
    return ""
