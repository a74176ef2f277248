"""The position in a user's code where something happens: the module of the model, and the file and line.

The line is the innermost one that does not belong to torch, this package or Python's own library. It comes
from a stack of frames while a model is traced, or from the text that `torch.export` keeps with each node.
"""

import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn

_TORCH = str(Path(torch.__file__).parent)
_OURS = str(Path(__file__).parents[1])
_PYTHON = sysconfig.get_paths()["stdlib"]
_INSTALLED = ("site-packages", "dist-packages")
_LINE = re.compile(r'File "([^"]+)", line (\d+)')
_MODELS = str(Path(__file__).with_name("models"))
"""Built-in models count as a user's own."""


def line_of(frames: Iterator[Any]) -> str:
    """Return `FILE:LINE` of the innermost of these frames that belongs to the user; empty if there is
    none."""
    for frame in frames:
        name, number = frame
        if is_own(name):
            return f"{_short(name)}:{number}"
    return ""


def is_own(name: str) -> bool:
    """Return whether a file belongs neither to torch, nor to this package, nor to Python."""
    if name.startswith(("<", _TORCH)):
        return False
    if name.startswith(_OURS):
        return name.startswith(_MODELS)
    return not name.startswith(_PYTHON) or any(part in name for part in _INSTALLED)


def _short(name: str) -> str:
    """Return a path relative to the working folder or to a folder of installed packages, in its usual
    form."""
    for part in _INSTALLED:
        if f"/{part}/" in name:
            return name.rpartition(f"/{part}/")[2]
    try:
        return str(Path(name).relative_to(Path.cwd()))
    except ValueError:
        return name


def frames(frame: Any) -> Iterator[Any]:
    """Yield frames, from the innermost one outwards."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def frames_of(error: BaseException) -> list[Any]:
    """Return the frames in which an exception was raised, or its cause if it has one; the innermost first."""
    inner: BaseException = error
    while inner.__cause__ is not None and inner.__traceback__ is None:
        inner = inner.__cause__
    return [frame for frame, _ in _steps(inner.__traceback__)][::-1]


def place_of(error: BaseException, model: nn.Module) -> str:
    """Return, for a message, the module that was running when an exception was raised, and the line."""
    inner: BaseException = error
    while inner.__cause__ is not None and inner.__traceback__ is None:
        inner = inner.__cause__
    steps = _steps(inner.__traceback__)[::-1]
    lines = iter((frame.f_code.co_filename, number) for frame, number in steps)
    return _said(owner(iter(frame for frame, _ in steps), model), line_of(lines))


def place_now(frame: Any, model: nn.Module) -> str:
    """Return the module that is running in or around this frame, and the line."""
    lines = ((each.f_code.co_filename, each.f_lineno) for each in frames(frame))
    return _said(owner(frames(frame), model), line_of(lines))


def place_of_node(stack_trace: str | None, path: str) -> str:
    """Return the module at `path`, and the line that `torch.export` recorded for a node."""
    found = [(name, int(number)) for name, number in _LINE.findall(stack_trace or "")]
    return _said(named(path), line_of(reversed(found)))


def owner(found: Iterator[Any], model: nn.Module) -> str | None:
    """Return the innermost module of the model that is running in these frames; None if there is none."""
    paths = {id(module): path for path, module in model.named_modules()}
    for frame in found:
        path = paths.get(id(frame.f_locals.get("self")))
        if path is not None:
            return named(path)
    return None


def named(path: str) -> str:
    """Return a module's path for use in a message."""
    return f"module '{path}'" if path else "the model itself"


def _steps(trace: TracebackType | None) -> list[tuple[Any, int]]:
    found = []
    while trace is not None:
        found.append((trace.tb_frame, trace.tb_lineno))
        trace = trace.tb_next
    return found


def _said(where: str | None, line: str) -> str:
    where = where or "the model as a whole"
    return f"{where} ({line})" if line else where
