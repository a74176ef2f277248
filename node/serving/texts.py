"""The text of services: the tokenizer files that members keep, doors fetch, and a sandboxed process reads.

A publisher stores the files of its model (`node.content.text_files`) among its blobs. Every member of the
service keeps them too, so they remain available when the publisher is gone. A door (a node that asks the
service) fetches them by their hash at its first question, and keeps one sandboxed process for each of its
latest services.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Protocol

import trio

from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId
from node.content import text_files
from node.content.blobs import BlobSink, fetch_all
from node.content.fenced_text import FencedText, TextLost
from node.content.text_questions import TextFacts
from node.errors import RunFailed, Unreachable, UsageError
from node.placement.admission import Machine
from node.protocols.services import Service
from node.seams import Seams
from node.storage.blobs import Blobs, NoRoom
from partition.serve.text import TextStream, decode_bytes

KEPT_MAX = 16
"""Maximum number of services whose files a node keeps; the least recently used are dropped."""
READERS_MAX = 3
"""Number of sandboxed processes that are kept. Each takes 60 MB and its tokenizer's memory."""
READERS_USED_MAX = 16
"""Maximum number of processes while answers use all of them: 1 GB and the memory of sixteen tokenizers."""
IDLE_SECONDS = 60.0
"""How long an idle process is kept, because the next question of a chat usually follows soon."""
FETCH_SECONDS_MAX = 60.0
_PIN = "service-text"


class TextsOwner(Protocol):
    """The part of `node.serving.serving.Serving` that this file uses."""

    seams: Seams
    refuse: Callable[[PeerId, RemoteProtocolError], None]

    @property
    def machine(self) -> Machine: ...

    def start_task(self, task: Callable[..., Awaitable[object]], *arguments: object) -> None: ...


class _Reader:
    """A process and the number of its users."""

    def __init__(self, text: FencedText) -> None:
        self.text = text
        self.users = 0
        self.uses = 0


class Texts:
    """The texts of a node's services: the files that it keeps, and the processes that read them."""

    def __init__(self, owner: TextsOwner, blobs: Blobs, me: PeerId) -> None:
        self._owner = owner
        self._blobs = blobs
        self._me = me
        self._readers: dict[bytes, _Reader] = {}
        self._opening: dict[bytes, trio.Lock] = {}
        self._kept = dict.fromkeys(blobs.labels(_PIN))
        self._streams = 0

    async def keep(self, path: Path) -> tuple[bytes, TextFacts] | None:
        """Store the files of a model's folder, or of a tokenizer.json. Return their hash and facts, or None
        if the folder has no tokenizer. Raises UsageError if they cannot be read."""
        executor = self._owner.seams.executor
        data = await executor.run(partial(text_files.collect, path))
        if not data:
            return None
        try:
            text = await FencedText.open(data, allow_unfenced=True)  # these are the user's own files
        except (TextLost, RemoteProtocolError) as error:
            raise UsageError(f"{path}: its tokenizer cannot be read: {error}") from None
        facts = text.facts
        await text.aclose()

        def put() -> bytes:
            with self._blobs.hold():
                name, sizes = text_files.keep(data, self._blobs.put)
                self._blobs.pin(_label(name), sizes)
                return name

        try:
            name = await executor.run(put)
        except OSError as error:
            raise UsageError(
                f"{path}: its tokenizer could not be stored: {error.strerror or error}"
            ) from None
        await self._note(name)
        return name, facts

    async def bring(self, service: Service, holders: Sequence[PeerId]) -> bytes:
        """Return the text files of a service, from here or from `holders`, and keep them. Raises Unreachable
        if no holder delivers them."""
        name = service.manifest.tokenizer
        seams, executor = self._owner.seams, self._owner.seams.executor
        sink, refuse = BlobSink(self._blobs, executor), self._owner.refuse
        fetch = partial(
            fetch_all, seams.network, holders=holders, sink=sink, refuse=refuse, clock=seams.clock
        )
        try:
            with self._blobs.hold():
                with trio.fail_after(FETCH_SECONDS_MAX):
                    await fetch({name: text_files.LIST_BYTES_MAX})
                    listed = text_files.read_list(await executor.run(partial(self._get, name)))
                    await fetch(listed.sizes)
                data = await executor.run(partial(self._read, name, listed))
        except trio.TooSlowError:
            raise Unreachable("timeout", f"it did not arrive within {FETCH_SECONDS_MAX:.0f} s") from None
        except OSError as error:
            raise Unreachable("refused", f"no room for it: {error.strerror or error}") from None
        except (NoRoom, RemoteProtocolError) as error:
            raise Unreachable("refused", str(error)) from None
        await self._note(name)
        return data

    def _get(self, name: bytes) -> bytes:
        data = self._blobs.get(name)
        if data is None:
            raise RemoteProtocolError("a damaged file")
        return data

    def _read(self, name: bytes, listed: text_files.TextChunks) -> bytes:
        data = b"".join(map(self._get, listed.sizes))
        label = _label(name)
        if self._blobs.pinned(label) is None:
            sizes = {name: len(self._get(name)), **listed.sizes}
            self._blobs.pin(label, sizes, is_guest=True)
        return data

    async def _note(self, name: bytes) -> None:
        label = _label(name)
        self._kept.pop(label, None)
        self._kept[label] = None
        while len(self._kept) > KEPT_MAX:
            oldest = next(iter(self._kept))
            del self._kept[oldest]
            await self._owner.seams.executor.run(partial(self._blobs.unpin, oldest))

    @asynccontextmanager
    async def reading(
        self, service: Service, holders: Sequence[PeerId], *, purpose: str = ""
    ) -> AsyncIterator[FencedText]:
        """Yield a process that reads and writes a service's text. Each purpose has its own process. Raises
        UsageError if the files cannot be read here; RunFailed if no holder delivers them."""
        called = service.manifest.name
        name = service.manifest.tokenizer + purpose.encode()
        try:
            reader = await self._reader(name, service, holders)
        except Unreachable as error:
            raise RunFailed(
                f"nobody hands over the tokenizer of {called}: {error.detail}",
                "ask again: `peerloom services`",
            ) from None
        except (TextLost, RemoteProtocolError) as error:
            raise UsageError(f"the tokenizer of {called} cannot be read: {error}") from None
        reader.users += 1
        reader.uses += 1
        try:
            yield reader.text
        except TextLost as error:
            raise RunFailed(f"the tokenizer of {called} was ended: {error}") from None
        finally:
            reader.users -= 1
            self._owner.start_task(self._close_idle, name, reader, reader.uses)

    async def _reader(self, name: bytes, service: Service, holders: Sequence[PeerId]) -> _Reader:
        lock = self._opening.setdefault(name, trio.Lock())
        try:
            async with lock:
                reader = self._readers.get(name)
                if reader is None or reader.text.is_lost:
                    await self._make_room()
                    reader = self._readers[name] = await self._open(service, holders)
                return reader
        finally:
            if not lock.locked() and not lock.statistics().tasks_waiting:
                self._opening.pop(name, None)

    async def _open(self, service: Service, holders: Sequence[PeerId]) -> _Reader:
        data = await self.bring(service, holders) if service.manifest.tokenizer else b""
        allow = self._owner.machine.allow_unfenced or service.publisher == self._me
        return _Reader(await FencedText.open(data, allow_unfenced=allow))

    async def _make_room(self) -> None:
        """If there are too many processes, end the least recently used idle one.

        Raises RunFailed if there are too many and all are in use.
        """
        idle = [name for name, each in self._readers.items() if not each.users]
        while len(self._readers) >= READERS_MAX and idle:
            await self._readers.pop(idle.pop(0)).text.aclose()
        if len(self._readers) + len(self._opening) > READERS_USED_MAX:
            raise RunFailed(
                f"{READERS_USED_MAX} services with a tokenizer are asked here already",
                "ask again once one of them has answered",
            )

    async def _close_idle(self, name: bytes, reader: _Reader, uses: int) -> None:
        await trio.sleep(IDLE_SECONDS)
        if not reader.users and reader.uses == uses and self._readers.get(name) is reader:
            del self._readers[name]
            await reader.text.aclose()

    @asynccontextmanager
    async def pieces(
        self, text: FencedText | None, stops: Sequence[str], *, is_marked: bool = False
    ) -> AsyncIterator["TextPieces"]:
        """Yield the decoder of one answer's tokens. Without `text`, the tokens are bytes. With `is_marked`,
        the text includes the special tokens that mark calls and reasoning."""
        found = TextPieces(text, self.next_stream(), stops, is_marked=is_marked)
        try:
            yield found
        finally:
            with suppress(TextLost, UsageError):
                await found.finish()  # makes the process forget the answer

    def next_stream(self) -> int:
        """Return a number that is unique among the answers in a process."""
        self._streams += 1
        return self._streams

    async def aclose(self) -> None:
        """End all processes."""
        for reader in self._readers.values():
            await reader.text.aclose()
        self._readers.clear()


class TextPieces:
    """The text of one answer, piece by piece. If it contains a stop text, it ends (`is_stopped`) before the
    first one."""

    def __init__(
        self, text: FencedText | None, number: int, stops: Sequence[str], *, is_marked: bool = False
    ) -> None:
        self.stopped_by = ""
        self._fenced = text
        self._number = number
        self._stops = tuple(stops)
        self._bytes = TextStream(decode_bytes, stops)
        self._is_over = False
        self._is_marked = is_marked

    @property
    def is_stopped(self) -> bool:
        """Return whether the answer is complete."""
        return bool(self.stopped_by)

    async def push(self, token: int) -> str:
        """Return the text that a token adds. Raises TextLost, UsageError."""
        if self._fenced is None:
            piece = self._bytes.push(token)
            self.stopped_by = self._bytes.stopped_by
            return piece
        piece, self.stopped_by = await self._fenced.push(
            self._number, [token], self._stops, is_marked=self._is_marked
        )
        return piece

    async def finish(self) -> str:
        """Return the remaining text that was held back. Raises TextLost, UsageError."""
        if self._is_over:
            return ""
        self._is_over = True
        if self._fenced is None:
            piece = self._bytes.finish()
            self.stopped_by = self._bytes.stopped_by
            return piece
        piece, self.stopped_by = await self._fenced.push(
            self._number, [], self._stops, is_last=True, is_marked=self._is_marked
        )
        return piece


def _label(name: bytes) -> str:
    return f"{_PIN}/{name.hex()}"
