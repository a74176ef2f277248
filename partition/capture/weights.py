"""First values in the safetensors file that accompanies a graph: written and read one tensor at a time.

No second copy of the model is ever made. `partition.model.safetensors_layout` defines the file.
"""

from collections.abc import Iterator
from os import SEEK_END, PathLike
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import torch

from crypto.errors import RemoteProtocolError
from partition.capture.errors import CaptureRefused
from partition.model.graph import Graph, StoredValues
from partition.model.safetensors_layout import check_file, check_range, file_header, stored_parameters

_CHUNK_BYTES = 1 << 24


class StoredWeights(Protocol):
    """A graph, and (name, tensor) of its stored values, in order; a result of `capture` is one."""

    @property
    def graph(self) -> Graph: ...

    @property
    def stored(self) -> tuple[tuple[str, torch.Tensor], ...]: ...


def write_weights(path: str | PathLike[str], captured: StoredWeights) -> int:
    """Write the safetensors file of a captured model. Return its length in bytes.

    The file appears under its name only when it is complete.

    Raises:
        CaptureRefused: the tensors are no longer those that were captured.
        OSError: the file cannot be written.
    """
    graph = captured.graph
    rows = stored_parameters(graph)
    if [row.names[0] for row in rows] != [name for name, _ in captured.stored]:
        raise CaptureRefused("the stored tensors are not those of the graph")
    target = Path(path)
    partial = target.with_name(target.name + ".partial")
    try:
        with partial.open("wb") as file:
            written = file.write(file_header(graph))
            for row, (name, tensor) in zip(rows, captured.stored, strict=True):
                data = _bytes(tensor)
                try:
                    assert isinstance(row.source, StoredValues)
                    check_range(row.source, data)
                except RemoteProtocolError as error:
                    raise CaptureRefused(f"'{name}' has changed since it was captured") from error
                for start in range(0, len(data), _CHUNK_BYTES):
                    written += file.write(data[start : start + _CHUNK_BYTES])
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
    return written


class StoredFile:
    """A safetensors file that is open for reading ranges. A context manager.

    Raises:
        RemoteProtocolError: the file is truncated, too long, or its header is not the graph's.
        OSError: no such file.
    """

    def __init__(self, path: str | PathLike[str], graph: Graph) -> None:
        header = file_header(graph)
        self._graph = graph
        self._begin = len(header)
        self._file = Path(path).open("rb")  # noqa: SIM115 - closed by `close`
        try:
            length = self._file.seek(0, SEEK_END)
            self._file.seek(0)
            check_file(graph, self._file.read(len(header)), length)
        except BaseException:
            self._file.close()
            raise

    def read(self, stored: StoredValues) -> bytes:
        """Return the bytes of one parameter. Raises RemoteProtocolError if they are not those that the graph
        says."""
        self._file.seek(self._begin + stored.offset)
        data = self._file.read(stored.length)
        check_range(stored, data)
        return data

    def all(self) -> Iterator[tuple[str, bytes]]:
        """Yield (first name, bytes) of every stored parameter, one at a time."""
        for row in stored_parameters(self._graph):
            assert isinstance(row.source, StoredValues)
            yield row.names[0], self.read(row.source)

    def close(self) -> None:
        """Close the file; a second call does no harm."""
        self._file.close()

    def __enter__(self) -> "StoredFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _bytes(tensor: torch.Tensor) -> memoryview:
    """Return the bytes, little-endian, in C order; without a copy if possible."""
    flat = tensor.detach().cpu().contiguous().view(-1)
    array: Any = flat.view(torch.uint8).numpy()
    return memoryview(array) if flat.numel() else memoryview(b"")
