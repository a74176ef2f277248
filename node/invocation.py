"""How this process was started, which decides how commands are written in texts for its user.

Texts name our commands as code spans, such as "look: `peerloom status`", whether they come from a screen,
from the node over its control channel, or from a state that another process wrote. When a text is shown,
`shown` replaces the span with the form that works in the user's shell: `peerloom`, `.venv/bin/peerloom`, or
`python3 -m node`. The commands themselves are in `node.cli`.
"""

import os
import re
import shlex
import sys
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any

SCRIPT = "peerloom"
"""The console script of pyproject.toml, and the name of our commands in texts."""
MODULE = "python -m node"
"""Our commands' form for a reader of a program's output, and for a machine that we know nothing about."""
KEEPS_SPANS = "_PEERLOOM_KEEPS_SPANS"
"""Environment variable of a command whose output one of our processes reads and shows to its own reader."""
SPAN_BEGINS = f"`{SCRIPT}"
PROGRAM_GIVEN = "_PEERLOOM_PROGRAM"
"""Environment variable that passes `program()` of a command to the nodes that it starts, since people see
their pages."""
SPAN = re.compile(rf"`{SCRIPT}((?: [^`]*)?)`")
_started_by_script: list[str] = []


def enter_by_script() -> None:
    """Record that the console script started this process. Call it once, before anything is shown."""
    _started_by_script.append(sys.argv[0])
    program.cache_clear()


@cache
def program() -> str:
    """Return the form of `peerloom` in the shell that started this process."""
    if given := os.environ.get(PROGRAM_GIVEN):
        return given
    if _started_by_script:
        return _script(_started_by_script[0])
    return f"{_interpreter()} -m node" if _module() in ("node", "sim") else MODULE


def simulator() -> str:
    """Return the form of `peerloom sim`: `python -m sim`, if that was typed."""
    return f"{_interpreter()} -m sim" if _module() == "sim" else f"{program()} sim"


def elsewhere() -> str:
    """Return the form for another machine, assuming the same kind of installation."""
    return MODULE if program().endswith(" -m node") else SCRIPT


def program_from_anywhere() -> str:
    """Return `program()` for a reader whose current folder is not known, such as the page's."""
    first, *rest = shlex.split(program())
    return shlex.join([os.path.abspath(first) if os.sep in first else first, *rest])


def service_words() -> list[str]:
    """Return the words that start this program again without a shell, from the folder in which it was
    started."""
    if _started_by_script:
        return [os.path.abspath(_started_by_script[0])]
    return [sys.executable, "-m", "node"]


def command_span(*words: str) -> str:
    """Return a command as a code span, its words quoted for a shell."""
    return f"`{shlex.join((SCRIPT, *words))}`"


def install_command(*packages: str) -> str:
    """Return the command that installs packages next to ours; plain `pip` in the user's shell may belong to a
    different environment."""
    if find_spec("pip") is None:  # for example in an environment made by uv
        return shlex.join(["uv", "pip", "install", "--python", sys.executable, *packages])
    return shlex.join([sys.executable, "-m", "pip", "install", *packages])


def shown(text: str, form: Callable[[], str] = program) -> str:
    """Return `text` with each code span of a command replaced by the reader's form."""
    if SPAN_BEGINS not in text or os.environ.get(KEEPS_SPANS):
        return text

    def written(span: re.Match[str]) -> str:
        if form is program and (span[1] == " sim" or span[1].startswith(" sim ")):
            return simulator() + span[1].removeprefix(" sim")
        return form() + span[1]

    return SPAN.sub(written, text)


def shown_values(document: Any, form: Callable[[], str] = program) -> Any:
    """Return a JSON document with `shown` applied to all of its texts."""
    match document:
        case str():
            return shown(document, form)
        case dict():
            return {key: shown_values(value, form) for key, value in document.items()}
        case list() | tuple():
            return [shown_values(value, form) for value in document]
        case _:
            return document


def _module() -> str:
    """Return the package that `python -m` runs as this process; empty for a script or another program."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return "" if spec is None else spec.name.removesuffix(".__main__")


def _script(typed: str) -> str:
    import shutil  # only here: most commands show no command

    name = os.path.basename(typed)
    found = shutil.which(name)
    try:
        if found is not None and os.path.samefile(found, typed):
            return shlex.quote(name)
    except OSError:
        pass  # the script has been removed since it was started, so its path is the best form known
    return _path(typed)


def _interpreter() -> str:
    """Return this interpreter as it was typed, because a wrapper may have replaced a short path with a long
    one."""
    typed = sys.orig_argv[0] if sys.orig_argv else ""
    return _path(typed) if os.sep in typed else shlex.quote(typed or "python")


def _path(typed: str) -> str:
    """Return the shortest form of a path that can be typed in the current folder."""
    try:
        path = os.path.abspath(typed)
        relative = os.path.relpath(path)
    except OSError:  # the current folder has been removed
        return shlex.quote(typed)
    if os.sep not in relative:
        relative = os.path.join(os.curdir, relative)
    return shlex.quote(min(relative, path, key=len))
