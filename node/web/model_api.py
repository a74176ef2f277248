"""The HTTP door of models (their gateway), for existing clients, which may be pointed at any node of the
swarm.

    GET  /v1/models  /v1/models/NAME               services that answer now
    POST /v1/completions  /v1/chat/completions     OpenAI's forms
    POST /v1/responses                             the same company's form for agents, without a memory
    POST /v1/messages  /v1/messages/count_tokens   Anthropic's form
    POST /v1/embeddings                            vectors of texts, by encoders
    GET  /health  /openapi.json                    for everybody; all others need a key (`peerloom keys new`)

`node.web.forms` reads requests and writes answers, `node.web.answers` makes the answers, and
`node.web.quotas` decides when each request is served. An answer ends when its client hangs up, even while it
waits in the queue or for a long prompt to be read. Every stage then forgets it.
"""

from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from http import HTTPStatus
from math import ceil
from typing import Any, Protocol

import msgspec
import trio

from node.invocation import program_from_anywhere, shown
from node.seams import Seams
from node.web.answers import Event, RunningAnswers
from node.web.door import HttpRequest, Response, Send, Streaming
from node.web.forms import openapi
from node.web.forms.asking import (
    BEAT,
    AnswerEnd,
    AnswerFrame,
    AnswerRequest,
    AnswerWriter,
    AskedForm,
    CallPiece,
    FormProblem,
    TextPiece,
    read_form,
)
from node.web.forms.completions import (
    ChatRequest,
    ChatWriter,
    CompletionRequest,
    CompletionWriter,
    error_document,
)
from node.web.forms.embeddings import EmbeddingsRequest, Texts, read_embeddings
from node.web.forms.messages import MessagesRequest, MessagesWriter, message_error
from node.web.forms.responses import ResponsesRequest, ResponsesWriter
from node.web.guard import RequestRefusal
from node.web.keys import ApiKey, KeyRing
from node.web.quotas import QueueFull, RequestQueue, RequestTurn
from node.web.settings import WebSettings

READ_HERE_BYTES_MAX = 64 << 10
"""Maximum size of a body that is decoded in the event loop. A longer one takes milliseconds, which would
block the loop."""
HEARTBEAT_SECONDS = 15.0
QUEUE_SECONDS_MAX = 120.0
"""How long a request waits in the queue. The official clients give up after ten minutes."""
OPEN_PATHS = frozenset({"/health", "/openapi.json"})
"""Paths that need no key, because they reveal nothing about this swarm."""
NO_STORE = ("cache-control", "no-store")

FORMS: Mapping[str, tuple[type[AskedForm], Callable[[AnswerFrame, Any], AnswerWriter]]] = {
    "/v1/completions": (CompletionRequest, CompletionWriter),
    "/v1/chat/completions": (ChatRequest, ChatWriter),
    "/v1/responses": (ResponsesRequest, ResponsesWriter),
    "/v1/messages": (MessagesRequest, MessagesWriter),
}
COUNT_PATH = "/v1/messages/count_tokens"
MODELS_PATH = "/v1/models"
EMBEDDINGS_PATH = "/v1/embeddings"


class CountRequest(MessagesRequest, frozen=True, kw_only=True):
    """`/v1/messages/count_tokens`: a request whose tokens are counted, without an answer."""

    max_tokens: int = 1


class AnswerSource(Protocol):
    """The part of `node.web.answers.ServiceAnswers` that this file uses."""

    async def models(self) -> list[Mapping[str, Any]]: ...
    async def count(self, request: AnswerRequest) -> int: ...
    async def open(self, request: AnswerRequest, held: AsyncExitStack, owner: str = "") -> RunningAnswers: ...


class VectorSource(Protocol):
    """The part of `node.web.embeddings.ServiceVectors` that this file uses."""

    async def embed(self, request: EmbeddingsRequest, texts: Texts, held: AsyncExitStack) -> bytes: ...


class ModelApi:
    """The HTTP door of one node: keys, the queue, and the forms of requests."""

    def __init__(
        self,
        seams: Seams,
        answers: AnswerSource,
        vectors: VectorSource | None = None,
        settings: WebSettings | None = None,
    ) -> None:
        settings = settings or WebSettings()
        self._body_bytes_max = settings.body_bytes_max
        self.keys = KeyRing(seams)
        self.queue = RequestQueue(settings.waiting_max)
        self._seams = seams
        self._answers = answers
        self._vectors = vectors
        self._events: dict[RequestTurn, trio.Event] = {}
        self.on_turn: Callable[[str, float], None] = lambda _model, _seconds: None
        """Called for each request that starts being served, with the model's name and the seconds that it
        waited."""

    @staticmethod
    def serves(path: str) -> bool:
        """Return whether a path is one of these, or similar to one."""
        return path.startswith("/v1/") or path in OPEN_PATHS

    def admit(self, request: HttpRequest) -> int | Response:
        """Return the maximum size of a request's body. Without a key the body is not read."""
        if request.path in OPEN_PATHS:
            return 0
        if self.keys.find(request.headers) is None:
            return self.explain_problem(request.path, self._no_key(request))
        return self._body_bytes_max

    def _no_key(self, request: HttpRequest) -> FormProblem:
        given = "authorization" in request.headers or "x-api-key" in request.headers
        what = (
            ("this node does not know the key")
            if given
            else "the request needs a key: Authorization: Bearer KEY"
        )
        how = shown("make one with `peerloom keys new`", program_from_anywhere)
        return FormProblem(f"{what}; at this node, {how}", kind="key")

    async def answer(self, request: HttpRequest) -> Response | Streaming:
        """Answer one request that was admitted."""
        try:
            return await self._answer(request)
        except FormProblem as problem:
            return self.explain_problem(request.path, problem)

    async def _answer(self, request: HttpRequest) -> Response | Streaming:
        path, is_post = request.path, request.method == "POST"
        if not is_post and request.method not in ("GET", "HEAD"):
            raise FormProblem("use GET or POST")
        if path == "/health":
            return _json({"status": "ok"})
        if path == "/openapi.json":
            return _json(openapi.document())
        key = self.keys.find(request.headers)
        if key is None:
            raise self._no_key(request)
        if path in FORMS or path == COUNT_PATH:
            if not is_post:
                raise FormProblem(f"{path}: want POST")
            return await self._ask(request, key)
        if path == MODELS_PATH or path.startswith(MODELS_PATH + "/"):
            return await self._models(path.removeprefix(MODELS_PATH).removeprefix("/"))
        if path == EMBEDDINGS_PATH:
            if not is_post:
                raise FormProblem(f"{path}: want POST")
            return await self._embed(request, key)
        raise FormProblem(f"there is nothing at {path[:80]}; /openapi.json lists the paths", kind="missing")

    # Models

    async def _models(self, name: str) -> Response:
        rows = [_model(row) for row in await self._answers.models()]
        if not name:
            ends = {"first_id": rows[0]["id"], "last_id": rows[-1]["id"]} if rows else {}
            return _json({"object": "list", "data": rows, "has_more": False} | ends)
        found = next((row for row in rows if row["id"] == name), None)
        if found is None:
            raise FormProblem(f"no model has the name {name[:80]!r}", kind="missing", field="model")
        return _json(found)

    # Answers

    async def _ask(self, request: HttpRequest, key: ApiKey) -> Response | Streaming:
        if request.path == COUNT_PATH:
            _, asked = await self._read(request.body, CountRequest)
            await self._take_turn(request.held, key, asked.model)
            return _json({"input_tokens": await self._answers.count(asked)})
        kind, writer_of = FORMS[request.path]
        form, asked = await self._read(request.body, kind)
        await self._take_turn(request.held, key, asked.model)
        answers = await self._answers.open(asked, request.held, key.id)
        created = int(self._seams.clock.wall())
        writer = writer_of(
            AnswerFrame(request.id, created, form.model, answers.prompt_tokens, answers.usage.cached), form
        )
        if not form.is_streamed:
            return await _whole(writer, answers)

        async def write(send: Send) -> None:
            await _stream(writer, answers, send)

        return Streaming(write, "text/event-stream", (NO_STORE, ("x-accel-buffering", "no")))

    async def _embed(self, request: HttpRequest, key: ApiKey) -> Response:
        read = partial(read_embeddings, request.body)
        is_short = len(request.body) <= READ_HERE_BYTES_MAX
        asked, texts = read() if is_short else await self._seams.executor.run(read)
        if self._vectors is None:
            raise FormProblem("this node provides no embeddings", kind="missing", code="unsupported")
        await self._take_turn(request.held, key, asked.model)
        return Response(await self._vectors.embed(asked, texts, request.held), headers=(NO_STORE,))

    async def _read(self, body: bytes, kind: type[AskedForm]) -> tuple[AskedForm, AnswerRequest]:
        """Return a request in its own form, and as the common request. A long one is decoded in a thread.
        Raises FormProblem."""
        if len(body) <= READ_HERE_BYTES_MAX:
            return _asked(body, kind)
        return await self._seams.executor.run(partial(_asked, body, kind))

    async def _take_turn(self, held: AsyncExitStack, key: ApiKey, model: str) -> None:
        """Wait in the queue until the request may be served, and until `held` is closed count it. Raises
        FormProblem if too many wait."""
        began = self._seams.clock.monotonic()
        try:
            turn = self.queue.enter(began, key.id, key.in_flight_max)
        except QueueFull as full:
            raise FormProblem(
                f"{self.queue.waiting} requests wait already: {full}",
                kind="busy",
                retry_seconds=full.seconds,
            ) from None
        held.callback(self._leave, turn)
        if turn.at is None:
            await self._await_turn(turn)
        self.on_turn(model, self._seams.clock.monotonic() - began)

    async def _await_turn(self, turn: RequestTurn) -> None:
        self._events[turn] = trio.Event()
        with trio.move_on_after(QUEUE_SECONDS_MAX):
            await self._events[turn].wait()
        if turn.at is None:
            raise FormProblem(
                (
                    f"the request waited {QUEUE_SECONDS_MAX:.0f} s in the queue, because this "
                    "node has too many requests"
                ),
                kind="busy",
                retry_seconds=QUEUE_SECONDS_MAX / 2,
            )

    def _leave(self, turn: RequestTurn) -> None:
        self._events.pop(turn, None)
        for each in self.queue.leave(self._seams.clock.monotonic(), turn):
            if (event := self._events.pop(each, None)) is not None:
                event.set()

    # Problems

    def explain(self, path: str, refusal: RequestRefusal) -> Response:
        """Return a refusal of the HTTP server in the form that the clients of a path read."""
        is_ours = refusal.status >= HTTPStatus.INTERNAL_SERVER_ERROR
        problem = FormProblem(refusal.reason, kind="failed" if is_ours else "invalid")
        return replace(self.explain_problem(path, problem), status=refusal.status)

    def explain_problem(self, path: str, problem: FormProblem) -> Response:
        """Return a problem in the form that the clients of a path read."""
        is_message = path.startswith("/v1/messages")
        document = message_error(problem) if is_message else error_document(problem)
        headers = [NO_STORE]
        if problem.retry_seconds is not None:
            headers.append(("retry-after", str(ceil(problem.retry_seconds))))
        if problem.is_begun:
            headers.append(("x-should-retry", "false"))
        if problem.kind == "key":
            headers.append(("www-authenticate", "Bearer"))
        return Response(msgspec.json.encode(document), problem.status, headers=tuple(headers))


def _asked(body: bytes, kind: type[AskedForm]) -> tuple[AskedForm, AnswerRequest]:
    form = read_form(body, kind)
    return form, form.request()


async def _whole(writer: AnswerWriter, answers: RunningAnswers) -> Response:
    while (found := await answers.next()) is not None:
        _written(writer, found)
    return Response(writer.whole(answers.usage), headers=(NO_STORE,))


async def _stream(writer: AnswerWriter, answers: RunningAnswers, send: Send) -> None:
    """Send an answer as it comes. An error is sent as an event, because the status has already been sent."""
    await send(writer.begin())
    try:
        while True:
            data = BEAT
            with trio.move_on_after(HEARTBEAT_SECONDS):
                if (found := await answers.next()) is None:
                    break
                data = _written(writer, found)
                while (more := answers.next_nowait()) is not None:  # send the waiting events together
                    data += _written(writer, more)
            await send(data)
    except FormProblem as problem:
        await send(writer.failure(problem))
    else:
        await send(writer.finish(answers.usage))


def _written(writer: AnswerWriter, found: Event) -> bytes:
    match found:
        case TextPiece():
            return writer.piece(found)
        case CallPiece():
            return writer.call(found)
        case AnswerEnd():
            return writer.ending(found)


def _model(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a service in the model format of both companies' clients, with additional fields of the
    swarm."""
    created = int(row["at_milliseconds"]) // 1_000
    return {
        "id": row["name"],
        "object": "model",
        "created": created,
        "owned_by": row["publisher"],
        "type": "model",
        "display_name": row["name"],
        "created_at": datetime.fromtimestamp(created, UTC).isoformat().replace("+00:00", "Z"),
        "peerloom": {
            "service": row["service"],
            "context": row["context"],
            "takes_text": bool(row["text"]),
            "embedding": row.get("vector", 0),
            "stages": row["stages"],
        },
    }


def _json(document: object) -> Response:
    return Response(msgspec.json.encode(document), headers=(NO_STORE,))
