"""The graphs on this node, by hash, and the files of their initial values.

A graph is fetched from any holder, checked before use, kept on disk, and kept decoded while it is in use.
Initial values are fetched in ranges, and each replica fetches the values of its own parameters. All data is
untrusted until its hash is verified.
"""

import io
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import trio

from crypto.encoding import decode, encode
from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId
from node.errors import StageFailed, Unreachable, UsageError
from node.protocols.calls import fetch
from node.protocols.runs import RANGE_BYTES_MAX, FetchModel, FetchRange
from node.protocols.uploads import FilePart, whole
from node.seams import Seams, Stage
from node.storage.blobs import NoRoom
from node.storage.guests import Guests
from partition.model.check import check_graph
from partition.model.graph import GRAPH_BYTES_MAX, Graph, StoredValues, decode_graph, graph_hash
from partition.model.safetensors_layout import check_file, check_range, file_header, stored_parameters
from partition.stage import Reload, StageSpecification
from partition.stage_layout import parameter_layout

GRAPHS_IN_MEMORY_MAX = 4
"""Maximum number of decoded graphs in memory. A large one takes some hundred MB."""
FETCHES_MAX = 4
"""Maximum number of graphs being fetched. Each is in memory during the fetch."""
FETCH_SECONDS_MAX = 25.0
"""Time limit for fetching one graph from one holder. A lease waits for it."""
RANGE_SECONDS_MAX = 30.0
FILL_SECONDS_MAX = 100.0
"""Time limit for fetching all initial values of a stage, including waits for busy holders. A Start waits for
it."""
RETRY_SECONDS = 0.5
_LENGTH_BYTES = 8
_INDEX_NAME = "models/index"

Beside = Callable[[bytes, int, int], Awaitable[bytes | None]]
"""Returns a number of bytes of a graph's initial values, or None if they are not there. The arguments are the
graph's hash, the offset and the number of bytes."""


async def _nothing_beside(_graph: bytes, _offset: int, _length: int) -> None:
    return None


@dataclass(frozen=True)
class GraphSettings:
    """The settings for graphs of one node. Raises ValueError if a setting is out of bounds."""

    graph_bytes_max: int = GRAPH_BYTES_MAX
    """Maximum size of a fetched graph, up to the protocol's own limit. Default: 64 MiB."""

    kept_max: int = 32
    """Maximum number of graphs on disk, with their initial values. The oldest is evicted, unless a run here
    needs it. At least 1. Default: 32."""

    range_bytes_max: int = RANGE_BYTES_MAX
    """Maximum number of bytes of initial values in one request, up to the protocol's own limit. Default: 16
    MiB."""

    def __post_init__(self) -> None:
        bounds = (
            (0 < self.graph_bytes_max <= GRAPH_BYTES_MAX, f"graph_bytes_max is 1-{GRAPH_BYTES_MAX}"),
            (self.kept_max >= 1, "kept_max is at least 1"),
            (0 < self.range_bytes_max <= RANGE_BYTES_MAX, f"range_bytes_max is 1-{RANGE_BYTES_MAX}"),
        )
        for holds, rule in bounds:
            if not holds:
                raise ValueError(f"graph settings: {rule}")


class Models:
    """The graphs on this node, and the means to fetch others."""

    def __init__(
        self,
        seams: Seams,
        needed: Callable[[], Collection[bytes]] = tuple,
        guests: Guests | None = None,
        settings: GraphSettings | None = None,
    ) -> None:
        """`needed` returns the graphs of the runs here, which strangers' graphs never evict. Fetched graphs
        count as `guests`."""
        self._seams = seams
        self._needed = needed
        self._guests = guests
        self._settings = settings or GraphSettings()
        self.beside: Beside = _nothing_beside
        """Finds initial values elsewhere on this node: in the stages that it serves."""
        self._decoded: OrderedDict[bytes, Graph] = OrderedDict()
        self._fetching: dict[bytes, trio.Lock] = {}
        self._index = trio.Lock()

    # The requester's side

    async def learn(self, graph: Path, values: Path | None) -> tuple[bytes, Graph]:
        """Store a captured graph and the file of its initial values from this machine. Return the graph's
        hash and the graph.

        Raises:
            UsageError: the graph cannot be read, or no node would accept it.
        """
        name, decoded, beside = await self._seams.executor.run(partial(read_captured, graph, values))
        try:
            await self._keep(name, graph, beside)
        except OSError as error:
            raise UsageError(f"{graph}: it could not be stored: {error.strerror or error}") from None
        self._remember(name, decoded)
        return name, decoded

    # All nodes

    async def get(self, name: bytes, holders: Sequence[PeerId]) -> Graph:
        """Return the graph with this hash, from here or from the first holder that delivers it.

        Raises:
            Unreachable: no holder delivered a valid graph, or there is no room to fetch one.
        """
        if name in self._decoded:
            self._decoded.move_to_end(name)
            return self._decoded[name]
        if name not in self._fetching and len(self._fetching) >= FETCHES_MAX:
            raise Unreachable("busy", "busy: too many models are being fetched")
        lock = self._fetching.setdefault(name, trio.Lock())
        try:
            async with lock:
                return await self._find(name) or await self._fetch(name, holders)
        finally:
            if not lock.locked() and not lock.statistics().tasks_waiting:
                self._fetching.pop(name, None)

    async def _find(self, name: bytes) -> Graph | None:
        if name in self._decoded:
            return self._decoded[name]
        data = await self.read(name)
        if data is None:
            return None
        try:
            graph = await self._seams.executor.run(partial(_decode, name, data), apart=True)
        except RemoteProtocolError:
            return None  # damaged, or from an older version, so it is fetched again
        self._remember(name, graph)
        return graph

    async def _fetch(self, name: bytes, holders: Sequence[PeerId]) -> Graph:
        seams, reasons = self._seams, []
        for peer in holders:
            if peer == seams.network.peer:
                continue
            try:
                data = await fetch(
                    seams.network,
                    peer,
                    FetchModel(name),
                    seconds=FETCH_SECONDS_MAX,
                    bytes_max=self._settings.graph_bytes_max,
                )
                graph = await seams.executor.run(partial(_decode, name, data), apart=True)
                await self._keep(name, data, None)
            except Unreachable as error:
                reasons.append(error.detail)
            except RemoteProtocolError as error:
                reasons.append(str(error))
            except OSError as error:
                raise Unreachable("refused", f"no room for it: {error.strerror or error}") from None
            except NoRoom as error:
                raise Unreachable("refused", f"no room for it: {error}") from None
            else:
                self._remember(name, graph)
                return graph
        detail = "; ".join(reasons) or "no peer is known to hold it"
        raise Unreachable("unknown", f"the model's graph could not be fetched: {detail}")

    async def read(self, name: bytes) -> bytes | None:
        """Return a graph's bytes, or None if it is not here."""
        return await self._seams.executor.run(partial(self._seams.storage.read, graph_name(name)))

    async def read_range(self, name: bytes, offset: int, length: int) -> bytes | None:
        """Return a part of a graph's initial values, at an offset from the beginning of their data; None if
        they are not here."""
        data = await self._seams.executor.run(partial(self._read_range, name, offset, length))
        return await self.beside(name, offset, length) if data is None else data

    def _read_range(self, name: bytes, offset: int, length: int) -> bytes | None:
        part = self._open_range(name, offset, length)
        if part is None:
            return None
        with part.file as file:
            file.seek(part.offset)
            data = file.read(length)
        return data if len(data) == length else None

    async def open(self, name: bytes) -> FilePart | None:
        """Return a graph's open file, or None if it is not here. The caller closes the file."""
        return await self._seams.executor.run(lambda: whole(self._seams.storage.open(graph_name(name))))

    async def open_range(self, name: bytes, offset: int, length: int) -> FilePart | None:
        """Do the same as `read_range`, but return a part of a file, which the caller reads and closes."""
        part = await self._seams.executor.run(partial(self._open_range, name, offset, length))
        if part is not None:
            return part
        data = await self.beside(name, offset, length)
        return None if data is None else FilePart(io.BytesIO(data), 0, length)

    def _open_range(self, name: bytes, offset: int, length: int) -> FilePart | None:
        values = whole(self._seams.storage.open(values_name(name)))
        if values is None:
            return None
        values.file.seek(0)
        head = values.file.read(_LENGTH_BYTES)
        start = _LENGTH_BYTES + int.from_bytes(head, "little") + offset
        if len(head) < _LENGTH_BYTES or start + length > values.length:
            values.file.close()
            return None
        return FilePart(values.file, start, length)

    # Initial values

    async def fill(self, stage: Stage, specification: StageSpecification, holders: Sequence[PeerId]) -> None:
        """Write a stage's stored initial values into its arena, and make the stage load them.

        Raises:
            StageFailed: the values did not arrive in time, or do not match the graph.
        """
        slots = [
            slot
            for slot in parameter_layout(specification)
            if isinstance(slot.parameter.source, StoredValues)
        ]
        if not slots:
            return
        arena = stage.vector("parameters")
        with trio.move_on_after(FILL_SECONDS_MAX):
            for slot in slots:
                source = slot.parameter.source
                assert isinstance(source, StoredValues)
                part = arena[slot.begin_bytes : slot.end_bytes]
                await self._fill(specification.graph.graph, source.offset, part, holders)
                try:
                    await self._seams.executor.run(partial(check_range, source, part))
                except RemoteProtocolError as error:
                    raise StageFailed(f"first values of {slot.name}: {error}") from None
            await stage.call(Reload())
            return
        raise StageFailed("the initial values did not arrive in time")

    async def _fill(self, name: bytes, offset: int, part: memoryview, holders: Sequence[PeerId]) -> None:
        bytes_max = self._settings.range_bytes_max
        for begin in range(0, len(part), bytes_max):
            length = min(bytes_max, len(part) - begin)
            data = await self.read_range(name, offset + begin, length)
            while data is None:
                data = await self._fetch_range(FetchRange(name, offset + begin, length), holders)
            # Not on the event loop: writing megabytes into untouched pages takes too long.
            await self._seams.executor.run(partial(part.__setitem__, slice(begin, begin + length), data))

    async def _fetch_range(self, request: FetchRange, holders: Sequence[PeerId]) -> bytes | None:
        """Fetch from the first holder that delivers. If none does, return None after a pause, because the
        holders may only be busy."""
        network = self._seams.network
        for peer in holders:
            if peer == network.peer:
                continue
            try:
                data = await fetch(
                    network, peer, request, seconds=RANGE_SECONDS_MAX, bytes_max=request.length
                )
            except Unreachable:
                continue
            if len(data) == request.length:
                return data
        await trio.sleep(RETRY_SECONDS)
        return None

    # On disk and in memory

    def _remember(self, name: bytes, graph: Graph) -> None:
        self._decoded[name] = graph
        self._decoded.move_to_end(name)
        while len(self._decoded) > GRAPHS_IN_MEMORY_MAX:
            self._decoded.popitem(last=False)

    async def _keep(self, name: bytes, graph: Path | bytes, values: Path | None) -> None:
        """Store a graph and its initial values on disk, and evict the oldest. Raises OSError."""
        storage, needed = self._seams.storage, {name, *self._needed()}

        def write() -> None:
            if isinstance(graph, bytes):
                if self._guests is not None:
                    self._guests.admit(graph_label(name), [graph_name(name)], len(graph))
                storage.write(graph_name(name), graph)
            else:
                if self._guests is not None:
                    self._guests.release(graph_label(name))
                storage.copy_in(graph_name(name), graph)
            if values is not None:
                storage.copy_in(values_name(name), values)
            names = [other for other in _read_index(storage.read(_INDEX_NAME)) if other != name]
            names.append(name)
            for old in [other for other in names[: -self._settings.kept_max] if other not in needed]:
                storage.delete(graph_name(old))
                storage.delete(values_name(old))
                if self._guests is not None:
                    self._guests.release(graph_label(old))
                names.remove(old)
            storage.write(_INDEX_NAME, encode(names))

        async with self._index:  # one writer of the index at a time
            await self._seams.executor.run(write)


def read_captured(path: Path, values: Path | None) -> tuple[bytes, Graph, Path | None]:
    """Return the graph's hash, the graph, and the file of its initial values, if it has one.

    Raises:
        UsageError: the graph cannot be read, or no node would accept it.
    """
    try:
        with path.open("rb") as file:
            data = file.read(GRAPH_BYTES_MAX + 1)
    except OSError as error:
        raise UsageError(f"{error.filename or path}: {(error.strerror or str(error)).lower()}") from None
    name = graph_hash(data)
    try:
        graph = _decode(name, data)
    except RemoteProtocolError as error:
        raise UsageError(f"{path}: is not a trainable graph: {error}") from None
    if not stored_parameters(graph):
        return name, graph, None  # a neighbouring file, such as a run's result, does not belong to it
    beside = values or path.with_suffix(".safetensors")
    try:
        with beside.open("rb") as file:
            check_file(graph, file.read(len(file_header(graph))), beside.stat().st_size)
    except (OSError, RemoteProtocolError) as error:
        reason = error.strerror.lower() if isinstance(error, OSError) and error.strerror else str(error)
        raise UsageError(
            f"{path}: its initial values should be in {beside}: {reason}", "keep both together"
        ) from None
    return name, graph, beside


def _decode(name: bytes, data: bytes) -> Graph:
    """Decode a consistent graph. Raises RemoteProtocolError."""
    if graph_hash(data) != name:
        raise RemoteProtocolError("the graph does not have the requested hash")
    graph = decode_graph(data)
    check_graph(graph)
    return graph


def _read_index(data: bytes | None) -> list[bytes]:
    try:
        names: list[bytes] = decode(data or encode([]), list[bytes], bytes_max=1 << 20)
    except RemoteProtocolError:
        return []
    return [name for name in names if len(name) == len(graph_hash(b""))]


def graph_label(name: bytes) -> str:
    """Return the label of a fetched graph in the guests' accounting."""
    return f"graph {name.hex()}"


def graph_name(name: bytes) -> str:
    """Return a graph's name in a node's storage."""
    return f"models/{name.hex()}.peerloom"


def values_name(name: bytes) -> str:
    """Return the name of a graph's initial values in a node's storage."""
    return f"models/{name.hex()}.safetensors"
