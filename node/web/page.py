"""The page of a node: the routing of paths on one HTTP door of this machine.

    /  /run  /plan  /models  /chat  /node  /events   one page; its script (static/) shows the view of the path
    /api/view  /api/stream                       a snapshot; snapshots and deltas as server-sent events
    /api/export                                  events by filter, a line of JSON each
    /api/run/RUN  /api/events  /api/whatif       a run's course; events by filter; a plan without some peers
    /api/services  /api/chat  ...                services, and answers to the page's owner (`node.web.chat`)
    /api/actions/...                             actions that change something
    /metrics                                     counters and gauges for Prometheus
    /v1/...  /health  /openapi.json              models, for clients with a key (`node.web.model_api`)
    /static/...                                  our own scripts and styles, and the vendored ones

Everything under /api/ needs the token of the link that the node prints. The token survives restarts, so that
an open page continues after one. The page listens only on this machine; serving models to other machines uses
a separate door. The page is not part of the node: it reads `State`, the history of events and the counters,
and acts through the same handlers as the command line. If it fails, it is restarted without effect on the
node.
"""

import ssl
from collections.abc import Iterator, Mapping
from contextlib import aclosing, suppress
from http import HTTPStatus
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from typing import Any, Literal, Protocol

import msgspec
import trio

from crypto.identity import parse_peer
from node import state_documents
from node.config import Config
from node.content.reading import kept_reading
from node.control import CommandHandler, Emit
from node.errors import PeerloomError, UsageError
from node.events import Event, PageOpened
from node.history import EventHistory
from node.invocation import program_from_anywhere, shown
from node.paths import short_path
from node.placement.inbound import Inbound
from node.runs.runs import Runs
from node.seams import Seams
from node.services.measurements import Measurements
from node.serving.serving import Serving
from node.settings import Web
from node.state import State
from node.text import way_text
from node.web import limits, metrics, views, whatif
from node.web.answers import ServiceAnswers
from node.web.assets import Assets
from node.web.chat import CHAT_BYTES_MAX, PageChat
from node.web.door import (
    BODY_BYTES_MAX,
    DoorRules,
    HttpRequest,
    HttpServer,
    Response,
    Send,
    Streaming,
    problem,
)
from node.web.embeddings import ServiceVectors
from node.web.guard import RequestRefusal, refuse_action, refuse_elsewhere, refuse_reader
from node.web.live import Live
from node.web.model_api import ModelApi
from node.web.prediction import Predictor
from node.web.settings import WebSettings
from node.web.starting import Starter

STREAMS_MAX = 32
"""Maximum number of open pages: a user's windows."""
EVENTS_ANSWERED_MAX = 2_000
"""Maximum number of events in one answer. An export continues where it ends."""
EXPORT_LINES = 200
"""Number of lines sent together. In between, the page waits for a slow reader."""
TOKEN_BYTES = 16
TOKEN_NAME = "page-token"  # noqa: S105 - the name of a file
"""Name of the blob that stores the token."""
PAGE_HOST = "127.0.0.1"
VIEWS = ("/", "/run", "/plan", "/models", "/chat", "/node", "/events")
CHAT_PATH = "/api/chat"
ACTIONS = {"stop": "runs.stop", "drop": "runs.drop", "save": "checkpoint.save", "leave": "leave"}
"""The page's actions, each with the command that executes it; `start` and `limits` are handled separately."""


class PageNode(Protocol):
    """The part of `node.runtime.Node` that the page uses."""

    config: Config
    inbound: Inbound
    measurements: Measurements
    seams: Seams
    serving: Serving

    @property
    def state(self) -> State: ...
    @property
    def history(self) -> EventHistory: ...
    @property
    def runs(self) -> Runs: ...
    @property
    def handlers(self) -> Mapping[str, CommandHandler]: ...
    @property
    def counters(self) -> dict[str, int]: ...
    def publish(self, event: Event) -> None: ...
    def limit(self, *, accept_runs: Literal["swarm", "never"]) -> None: ...


class Page:
    """Serves one node's page until cancelled. `token` is required by its views and actions."""

    def __init__(self, node: PageNode, settings: WebSettings | None = None) -> None:
        self._node = node
        self._settings = settings = settings or WebSettings()
        self.token = _kept_token(node.seams)
        self._assets = Assets()
        self.live = Live(
            node.history,
            boot=node.seams.entropy(8).hex(),
            state=lambda: node.state,
            counters=lambda: node.counters,
            limits=lambda: limits.document(node.config),
            links=self._links,
            ways=self._ways,
            wall=node.seams.clock.wall,
            deltas_kept_max=settings.deltas_kept_max,
        )
        self._starter = Starter(lambda: node.handlers["train"])
        self._predictor = Predictor(node)
        self.models = ModelApi(
            node.seams, ServiceAnswers(node.serving), ServiceVectors(node.serving), settings
        )
        self.models.on_turn = self.live.metrics.models.queued
        node.serving.generations.watch = self.live.metrics.models.between
        self.chat = PageChat(node, settings.chats_max)
        self._tls = _tls_of(node.config.web)
        self._streams = 0
        self._address = ""
        self._door: HttpServer | None = None
        self._version = _version()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled. Raises OSError if this machine has no port for the page."""
        web = self._node.config.web
        assert web.address is not None
        host, port, models = web.address.host, web.address.port, ""
        async with trio.open_nursery() as nursery:
            if web.is_shared:
                found = await self._open_shared(nursery, host, port)
                models = _url("http" if self._tls is None else "https", host, found)
                host, port = PAGE_HOST, port + 1 if port else 0
            self._door = door = HttpServer(self.answer, host, port, self._rules())
            await nursery.start(door.run)
            self._address = _url("http", host, door.port)
            self._node.publish(
                PageOpened(
                    at=self._node.seams.clock.wall(),
                    address=self._address,
                    port_wanted=port,
                    link=self.link,
                    models=models or self._address,
                )
            )
            nursery.start_soon(self.live.run)
            task_status.started()

    def _rules(self) -> DoorRules:
        return DoorRules(
            is_owner=self._is_owner,
            new_id=self._new_id,
            admit=self._admit,
            explain=self._explain,
            settings=self._settings,
        )

    async def _open_shared(self, nursery: trio.Nursery, host: str, port: int) -> int:
        """Serve models to other machines; return the port. The Host of these requests need not name this
        machine, and they cannot reach the page."""
        rules = DoorRules(
            is_owner=self._has_key,
            new_id=self._new_id,
            admit=self.models.admit,
            explain=self.models.explain,
            guard=refuse_elsewhere,
            tls=self._tls,
            settings=self._settings,
        )
        door = HttpServer(self.models.answer, host, port, rules)
        await nursery.start(door.run)
        return door.port

    def _admit(self, request: HttpRequest) -> int | Response:
        if ModelApi.serves(request.path):
            return self.models.admit(request)
        is_chat = request.path == CHAT_PATH and refuse_action(request.headers, self.token) is None
        return CHAT_BYTES_MAX if is_chat else BODY_BYTES_MAX

    def _explain(self, path: str, refusal: RequestRefusal) -> Response:
        if ModelApi.serves(path):
            return self.models.explain(path, refusal)
        return problem(refusal.status, refusal.reason)

    def _has_key(self, request: HttpRequest) -> bool:
        return self.models.keys.find(request.headers) is not None

    def _links(self) -> dict[str, float]:
        """Return the members that have proved their identity to this node, each with the duration of a join
        through it in seconds (0 if there was none)."""
        state, network = self._node.state, self._node.seams.network
        joined = {join.peer: join.seconds for join in state.joins if join.outcome == "ok"}
        return {
            views.peer_key(peer): round(joined.get(peer, 0.0), 6)
            for peer, member in state.members.items()
            if member.status in ("alive", "suspect") and network.host_of(peer) is not None
        }

    def _ways(self) -> dict[str, str]:
        """Return how each member is reached if it is not simply dialled: punched or through a relay, with the
        measured speed."""
        members = self._node.state.members
        found = {}
        for peer, member in members.items():
            path = self._node.inbound.path_to(peer) if member.status in ("alive", "suspect") else None
            if path is None or path["way"] == "direct":
                continue
            relay = None if path["relay"] is None else members.get(parse_peer(path["relay"]))
            name = (relay.name if relay is not None else "") or "a relay"
            found[views.peer_key(peer)] = way_text(path, name)
        return found

    async def tell(self, arguments: dict[str, Any], emit: Emit) -> object:  # noqa: ARG002
        """Answer the command `page` with its address and the token for this user's browser."""
        return {"schema": "peerloom/link/1", "address": self._address, "link": self.link}

    @property
    def link(self) -> str:
        """Return the address with the token, only for this user's browser: the part after # never
        leaves it."""
        return f"{self._address}/#token={self.token}"

    def _is_owner(self, request: HttpRequest) -> bool:
        """Return whether a request has the token or a key."""
        return refuse_reader(request.headers, request.query, self.token) is None or self._has_key(request)

    def _new_id(self) -> str:
        return self._node.seams.entropy(8).hex()

    async def answer(self, request: HttpRequest) -> Response | Streaming:
        """Answer one request that the guard has admitted."""
        path = request.path
        if ModelApi.serves(path):
            return await self.models.answer(request)
        if request.method == "POST":
            return await self._post(request)
        if request.method not in ("GET", "HEAD"):
            return problem(HTTPStatus.METHOD_NOT_ALLOWED, "use GET, HEAD or POST")
        if path in VIEWS or path.startswith("/run/"):
            return self._assets.serve("index.html", request.headers.get("if-none-match"))
        if path.startswith("/static/"):
            name, known = path.removeprefix("/static/"), request.headers.get("if-none-match")
            return self._assets.serve(name, known)
        if path == "/metrics":
            return self._metrics()
        refusal = refuse_reader(request.headers, request.query, self.token)
        if refusal is not None and path.startswith("/api/"):
            return problem(refusal.status, shown(refusal.reason, program_from_anywhere))
        return await self._look(path, request)

    async def _look(self, path: str, request: HttpRequest) -> Response | Streaming:
        """Answer a request for which this node must first ask other nodes."""
        if path == "/api/whatif":
            return await self._what_if(request)
        if path.startswith("/api/run/"):
            return await self._course(path.removeprefix("/api/run/"))
        if path == "/api/services":
            return await self.chat.services()
        if path == "/api/service-text":
            return await self.chat.text(request)
        return self._read(path, request)

    def _read(self, path: str, request: HttpRequest) -> Response | Streaming:
        if path == "/api/view":
            self.live.tick()
            return _json(self.live.snapshot())
        if path == "/api/stream":
            return self._stream(request)
        if path == "/api/export":
            return self._export(request)
        if path == "/api/events":
            return self._events(request)
        return problem(HTTPStatus.NOT_FOUND, "there is nothing here")

    async def _what_if(self, request: HttpRequest) -> Response:
        """Answer with a prediction of a run without some peers. It is based on the run's latest step and, if
        this node has its graph, on the planner."""
        run = request.query.get("run", "")
        view = self._node.state.runs.get(run)
        if view is None:
            return problem(HTTPStatus.NOT_FOUND, "this node does not know the run")
        without = frozenset(request.query.get("without", "").split(",")) - {""}
        document = whatif.document(self._node.state, view, without)
        return _json(
            msgspec.json.encode({**document, "planned": await self._predictor.predict(run, without)})
        )

    # Live

    def _stream(self, request: HttpRequest) -> Response | Streaming:
        if self._streams >= STREAMS_MAX:
            return problem(HTTPStatus.SERVICE_UNAVAILABLE, f"{STREAMS_MAX} pages are open already")
        after = self._resumed(request.headers.get("last-event-id") or request.query.get("after", ""))

        async def write(send: Send) -> None:
            self._streams += 1
            try:
                with self.live.watching():
                    await send(b"retry: 1000\n\n")
                    async with aclosing(self.live.follow(after)) as found:
                        async for number, kind, data in found:
                            await send(self._message(number, kind, data))
            finally:
                self._streams -= 1

        headers = (("cache-control", "no-store"), ("x-accel-buffering", "no"))
        return Streaming(write, "text/event-stream", headers)

    def _message(self, number: int, kind: str, data: bytes) -> bytes:
        if kind == "beat":
            return b": beat\n\n"
        # msgspec writes no line breaks, so one data line is the whole message.
        return b"event: %s\nid: %s.%d\ndata: %s\n\n" % (kind.encode(), self.live.boot.encode(), number, data)

    def _resumed(self, text: str) -> int | None:
        """Return the last number that a page has seen since the node started; None for a new page."""
        boot, _, number = text.partition(".")
        is_number = number.isascii() and number.isdigit() and len(number) <= 15
        return int(number) if boot == self.live.boot and is_number else None

    # Reading

    async def _course(self, run: str) -> Response:
        view = self._node.state.runs.get(run)
        if view is None:
            return problem(HTTPStatus.NOT_FOUND, "this node does not know the run")
        reading = await kept_reading(self._node.seams, run)
        self.live.tick()
        course = self.live.charts.courses.get(run)
        document = {
            "schema": "peerloom/course/1",
            "number": self.live.number,
            "run": views.run_row(view),
            "course": course.document() if course is not None else None,
            "reading": [] if reading is None else reading.lines(),
        }
        return _json(msgspec.json.encode(document))

    def _events(self, request: HttpRequest) -> Response:
        """Answer with events, filtered by `after` (a number), `kind`, `text` (in the event's JSON) and
        `count`."""
        after, count = request.query.get("after", "0"), request.query.get("count", "500")
        if not all(text.isascii() and text.isdigit() and len(text) <= 15 for text in (after, count)):
            return problem(HTTPStatus.BAD_REQUEST, "after and count must be whole numbers")
        rows = list(islice(self._found(request, int(after)), min(int(count), EVENTS_ANSWERED_MAX)))
        number = rows[-1][0] if rows else self._node.history.last
        document = {
            "schema": "peerloom/events/1",
            "dropped": self._node.history.dropped,
            "next": number,
            "last": self._node.history.last,
            "events": [msgspec.Raw(row) for _, row in rows],
        }
        return _json(msgspec.json.encode(document))

    def _export(self, request: HttpRequest) -> Streaming:
        """Answer with all kept events that match the filter, one on each line."""
        rows = [row for _, row in self._found(request, 0)]

        async def write(send: Send) -> None:
            for start in range(0, len(rows), EXPORT_LINES):
                await send(b"".join(row + b"\n" for row in rows[start : start + EXPORT_LINES]))

        name = ("content-disposition", 'attachment; filename="events.jsonl"')
        return Streaming(write, "application/jsonl", (name, ("cache-control", "no-store")))

    def _found(self, request: HttpRequest, after: int) -> Iterator[tuple[int, bytes]]:
        """Yield (number, JSON) of the events that match a request's `kind` and `text`."""
        kind, text = request.query.get("kind", ""), request.query.get("text", "").lower().encode()
        for number, event in self._node.history.after(after):
            if not kind or type(event).__name__ == kind:
                row = msgspec.json.encode({"number": number, **state_documents.event_document(event)})
                if text in row.lower():
                    yield number, row

    def _metrics(self) -> Response:
        self.live.tick()
        own = {
            "page_watchers": float(self.live.watchers),
            "page_connections_turned_away": float(self._door.turned_away) if self._door else 0.0,
            "events_forgotten": float(self._node.history.dropped),
            "model_requests_going": float(self.models.queue.going),
            "model_requests_waiting": float(self.models.queue.waiting),
        }
        held = self._node.serving.hosting.own()
        text = self.live.metrics.text(self._node.state, self._node.counters, own, self._version, held)
        return Response(text, content_type=metrics.CONTENT_TYPE, headers=(("cache-control", "no-store"),))

    # Actions

    async def _post(self, request: HttpRequest) -> Response | Streaming:
        name = request.path.removeprefix("/api/actions/")
        if name == request.path != CHAT_PATH:
            return problem(HTTPStatus.METHOD_NOT_ALLOWED, "only actions may be posted")
        refusal = refuse_action(request.headers, self.token)
        if refusal is not None:
            return problem(refusal.status, shown(refusal.reason, program_from_anywhere))
        return await (self.chat.answer(request) if name == CHAT_PATH else self._act(request, name))

    async def _act(self, request: HttpRequest, name: str) -> Response:
        handler = self._action(name)
        if handler is None:
            return problem(HTTPStatus.NOT_FOUND, "there is no such action")
        try:
            arguments = msgspec.json.decode(request.body or b"{}", type=dict[str, str])
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return problem(HTTPStatus.BAD_REQUEST, "the body must be a JSON object of texts")
        try:
            result = await handler(dict(arguments), _ignore)
        except PeerloomError as error:
            return problem(HTTPStatus.CONFLICT, shown(error.written[0], program_from_anywhere))
        return _json(msgspec.json.encode({"result": result}))

    def _action(self, name: str) -> CommandHandler | None:
        own = {"start": self._start, "limits": self._limit}
        return own.get(name) or self._node.handlers.get(ACTIONS.get(name, ""))

    async def _start(self, arguments: dict[str, Any], emit: Emit) -> object:  # noqa: ARG002
        return await self._starter.start(str(arguments.get("text", "")))

    async def _limit(self, arguments: dict[str, Any], emit: Emit) -> object:  # noqa: ARG002
        """Set whether this node takes stages of others, until it stops. Present stages stay."""
        accept_runs = str(arguments.get("accept_runs", ""))
        if accept_runs not in ("swarm", "never"):
            raise UsageError("accept_runs: must be swarm or never")
        self._node.limit(accept_runs="swarm" if accept_runs == "swarm" else "never")
        return limits.document(self._node.config)


def _kept_token(seams: Seams) -> str:
    """Return the token of the previous start, or a new one. It is stored next to the keys with the same file
    modes."""
    kept = seams.storage.read(TOKEN_NAME) or b""
    if len(kept) == 2 * TOKEN_BYTES and kept.isalnum():
        return kept.decode()
    token = seams.entropy(TOKEN_BYTES).hex()
    with suppress(OSError):  # a full disk must not stop the page
        seams.storage.write(TOKEN_NAME, token.encode())
    return token


def _tls_of(web: Web) -> ssl.SSLContext | None:
    """Return the TLS context for HTTPS; None without HTTPS. Raises UsageError if the certificate cannot be
    used."""
    if web.cert is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(web.cert)
    except OSError as error:  # ssl's errors are a subclass
        reason = (error.strerror or str(error)).lower()
        raise UsageError(
            f"--web-cert {short_path(web.cert)}: {reason}",
            "use a PEM file with a certificate, its chain and its key",
        ) from None
    return context


def _url(scheme: str, host: str, port: int) -> str:
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def _version() -> str:
    try:
        return version("peerloom")
    except PackageNotFoundError:
        return "unknown"


async def _ignore(event: object) -> None:
    """Ignore a command's events, which are on the page already."""
    del event


def _json(data: bytes) -> Response:
    return Response(data, headers=(("cache-control", "no-store"),))
