"""The files of a model to be served, from any kind of source."""

import re
from dataclasses import dataclass
from pathlib import Path

from node.errors import UsageError

GRAPH_SUFFIX, VALUES_SUFFIX = ".peerloom", ".safetensors"


@dataclass(frozen=True)
class ServedFiles:
    """A captured graph, the file of its values if there is one, the service's default name, and the folder or
    tokenizer for its text. `run` and `step` identify the run and checkpoint, if it is from one."""

    graph: Path
    values: Path | None
    called: str
    text: str = ""
    run: bytes = b""
    step: int = 0


def is_run(model: str) -> bool:
    """Return whether a text means a run, by its id or a prefix of it, and not a file."""
    return re.fullmatch(r"[0-9a-f]{4,16}", model) is not None and not Path(model).exists()


def captured_files(model: str) -> ServedFiles:
    """Return the files of a FILE.peerloom. Raises UsageError if there is no such file."""
    path = Path(model).expanduser()
    how = "give a captured FILE.peerloom, a model's folder, or a RUN: docs/serving.md"
    if path.suffix != GRAPH_SUFFIX:
        raise UsageError(f"{model}: want a FILE{GRAPH_SUFFIX}", how)
    if not path.is_file():
        raise UsageError(f"{model}: there is no such file", how)
    values = path.with_suffix(VALUES_SUFFIX)
    return ServedFiles(path, values if values.is_file() else None, service_name(path.stem))


def service_name(text: str) -> str:
    """Convert a text to a valid name of a service."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).lstrip("._-") or "model"
