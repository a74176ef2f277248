"""The chat of the page: lists the services with the holders of their stages, and streams answers.

    GET  /api/services               the services, and the holders of each of their stages now
    GET  /api/service-text?service=  how a service takes text
    POST /api/chat                   one answer, as server-sent events: begin, piece, route, moved, error, end

The page admits only its owner. Only the browser's window keeps a conversation, and sends all of it with each
question. Here it only passes through, and no event, log or recording contains it. Answers for programs, which
have keys and a queue, are elsewhere (`node.web.model_api`).
"""

from collections.abc import Sequence
from http import HTTPStatus
from itertools import pairwise
from typing import Any, Protocol

import msgspec
import trio

from crypto.identity import PeerId
from node.errors import PeerloomError, UsageError
from node.invocation import program_from_anywhere, shown
from node.requests import Given
from node.seams import Clock
from node.serving.asking import AnswerStream, Asking
from node.serving.questions import Question
from node.serving.serving import Serving
from node.web.door import HttpRequest, Response, Send, Streaming
from node.web.forms.asking import BEAT, event
from node.web.views import peer_key

CHAT_BYTES_MAX = 1 << 20
"""Maximum size of a conversation, the same as on the control channel."""
LOOK_SECONDS = 0.25
"""Seconds between checks whether an answer has a new route, while no token comes."""
BEAT_SECONDS = 15.0
LISTED_SECONDS = 1.0
"""How long windows share one query for the services' members."""
WAITING_PIECES_MAX = 64
"""Maximum number of pieces that wait for a browser that reads slowly, while the answer continues."""


class PageQuestion(msgspec.Struct, frozen=True):
    """One question to a service. Without a chat template, it is the prompt itself."""

    service: Given
    question: Question = Question()


class ChatNode(Protocol):
    """The part of the node that this file uses."""

    @property
    def serving(self) -> Serving: ...


class PageChat:
    """The chats of one node's page."""

    def __init__(self, node: ChatNode, chats_max: int) -> None:
        self._chats_max = chats_max
        self._node = node
        self._asking = Asking(node.serving)
        self._chats = 0
        self._looking = trio.Lock()
        self._listed: tuple[float, Response] | None = None

    async def services(self) -> Response:
        """Return the services, including those that cannot answer now."""
        async with self._looking:
            clock = self._node.serving.seams.clock
            now = clock.monotonic()
            if self._listed is None or now - self._listed[0] > LISTED_SECONDS:
                rows = [await self._row(each) for each in await self._node.serving.finder.all()]
                answer = _json({"schema": "peerloom/page-services/1", "services": rows})
                self._listed = clock.monotonic(), answer
            return self._listed[1]

    async def _row(self, service: Any) -> dict[str, Any]:
        found = await self._asking.document(service)
        bounds = [0, *service.manifest.cuts]
        found["layers"] = [*([first, after - 1] for first, after in pairwise(bounds)), [bounds[-1], None]]
        found["publisher"] = peer_key(service.publisher)
        for rows in found["stages"]:
            for row in rows:
                row["peer"] = row["peer"][-len(found["publisher"]) :]
        return found

    async def text(self, request: HttpRequest) -> Response:
        """Return how a service takes text. Its tokenizer files are fetched for that."""
        try:
            return _json(await self._asking.text_document(request.query.get("service", "")))
        except PeerloomError as error:
            return _refused(error)

    async def answer(self, request: HttpRequest) -> Response | Streaming:
        """Begin an answer. When the window closes the connection, the answer ends in every stage."""
        try:
            asked = msgspec.json.decode(request.body, type=PageQuestion)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return _refused(UsageError("the request needs a service and a question"))
        if self._chats >= self._chats_max:
            return _refused(UsageError(f"pages are already receiving {self._chats_max} answers", "stop one"))
        self._chats += 1
        request.held.callback(self._leave)
        try:
            answering = self._asking.answering(asked.service, asked.question)
            stream = await request.held.enter_async_context(answering)
        except PeerloomError as error:
            return _refused(error)

        async def write(send: Send) -> None:
            await _write(stream, send, self._node.serving.seams.clock)

        headers = (("cache-control", "no-store"), ("x-accel-buffering", "no"))
        return Streaming(write, "text/event-stream", headers)

    def _leave(self) -> None:
        self._chats -= 1


async def _write(stream: AnswerStream, send: Send, clock: Clock) -> None:
    """Send an answer as it comes, and report changes of its route."""
    route, moves = stream.generation.route, stream.generation.moves
    await send(event({"service": stream.service.text, "route": _keys(route)}, "begin"))
    beat_at = clock.monotonic() + BEAT_SECONDS
    async with trio.open_nursery() as nursery:
        entrance, pieces = trio.open_memory_channel[bytes](WAITING_PIECES_MAX)
        nursery.start_soon(_read, stream, entrance, clock)
        while True:
            data = b""
            try:
                with trio.move_on_after(LOOK_SECONDS):
                    data = await pieces.receive()
                    while True:  # send the waiting pieces together
                        data += pieces.receive_nowait()
            except trio.WouldBlock:
                pass
            except trio.EndOfChannel:
                await send(data)
                return
            made = stream.generation
            if made.route != route or made.moves != moves:
                if made.moves != moves:
                    lost = [peer for peer in route if peer not in made.route]
                    data += _moved(stream, lost)
                elif not route:
                    data += event({"route": _keys(made.route)}, "route")
                route, moves = made.route, made.moves
            if not data and clock.monotonic() >= beat_at:
                data = BEAT
            if data:
                beat_at = clock.monotonic() + BEAT_SECONDS
                await send(data)


async def _read(stream: AnswerStream, pieces: trio.MemorySendChannel[bytes], clock: Clock) -> None:
    """Put each piece of an answer, and finally how it ended, into a channel."""
    async with pieces:
        try:
            async for piece in stream:
                text = piece if isinstance(piece, str) else f"{piece} "
                await pieces.send(event({"text": text, "tokens": stream.generation.count}, "piece"))
        except PeerloomError as error:
            await pieces.send(event(_problem(error), "error"))
        document = stream.document(clock.monotonic()) | {"route": _keys(stream.generation.route)}
        await pieces.send(event(document, "end"))


def _moved(stream: AnswerStream, lost: Sequence[PeerId]) -> bytes:
    made = stream.generation
    return event(
        {
            "route": _keys(made.route),
            "lost": _keys(lost),
            "reason": made.lost,
            "moves": made.moves,
            "exact": made.is_exact,
        },
        "moved",
    )


def _keys(peers: Sequence[PeerId]) -> list[str]:
    return [peer_key(peer) for peer in peers]


def _problem(error: PeerloomError) -> dict[str, str]:
    what, do = error.written
    return {"error": shown(what, program_from_anywhere), "do": shown(do or "", program_from_anywhere)}


def _refused(error: PeerloomError) -> Response:
    is_wrong = isinstance(error, UsageError)
    status = HTTPStatus.BAD_REQUEST if is_wrong else HTTPStatus.SERVICE_UNAVAILABLE
    return Response(msgspec.json.encode(_problem(error)), status, headers=(("cache-control", "no-store"),))


def _json(document: object) -> Response:
    return Response(msgspec.json.encode(document), headers=(("cache-control", "no-store"),))
