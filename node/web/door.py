"""The HTTP server of a node (its door) for its own machine: HTTP/1.1 by h11 on trio.

`node.web.page` has the pages, `node.web.guard` the access control. Every request is bounded in size and time,
and every connection in the resources that it may hold, so a slow, silent or hostile client costs a task and
some kilobytes. An answer is complete (`Response`) or a stream (`Streaming`). Either is cancelled as soon as
the client hangs up, even while it is being made.
"""

import ipaddress
import socket
import ssl
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from itertools import count
from math import inf
from urllib.parse import parse_qsl, unquote, urlsplit

import h11
import msgspec
import trio

from crypto.registers import Register, Silence
from crypto.token_buckets import prefix_of
from node.containment import contain
from node.forks import keep_from_children
from node.web.guard import HEADERS, RequestRefusal, refuse_stranger
from node.web.settings import WebSettings

_OWNER, _HERE = b"owner", prefix_of("127.0.0.1")
HEADER_BYTES_MAX = 16 << 10
BODY_BYTES_MAX = 64 << 10
"""Maximum size of a usual body. An action is a few names; a run's data never comes this way."""
BODIES_BYTES_MAX = 64 << 20
"""Maximum size of all longer bodies together, while they are read and answered."""
EARLY_BYTES_MAX = 16 << 10
"""Maximum number of bytes that a client may send of further requests while it waits for an answer."""
SEND_SECONDS_MAX = 20.0
"""A client that reads nothing for this long is disconnected; a page reconnects and continues."""
SEND_BUFFER_BYTES = 128 << 10
"""The system's send buffer for one client. Without a limit it grows to megabytes for a slow reader."""
DRAIN_SECONDS_MAX = 0.5
"""How long a refused client's further bytes are discarded, so that it reads the reason."""
QUERY_FIELDS_MAX = 32
_CHUNK_BYTES = 16 << 10

Send = Callable[[bytes], Awaitable[None]]
"""Sends a piece of a streamed body, and waits while the client reads slowly."""


@dataclass(frozen=True)
class HttpRequest:
    """One request. `headers` have names in lower case, and `path` is decoded. If a query name is repeated,
    its last value counts. `held` is closed once the answer is sent or the client has hung up."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: bytes = b""
    id: str = ""
    held: AsyncExitStack = field(default_factory=AsyncExitStack)


@dataclass(frozen=True)
class Response:
    """A complete answer."""

    body: bytes = b""
    status: HTTPStatus = HTTPStatus.OK
    content_type: str = "application/json"
    headers: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Streaming:
    """An answer that continues until `write` returns or the client hangs up."""

    write: Callable[[Send], Awaitable[None]]
    content_type: str
    headers: tuple[tuple[str, str], ...] = field(default=(("cache-control", "no-store"),))


Handler = Callable[[HttpRequest], Awaitable[Response | Streaming]]
Admit = Callable[[HttpRequest], int | Response]
"""Returns, for a request whose body was not read yet, the maximum size of the body, or the response if it
must not be read."""


def problem(status: HTTPStatus, reason: str) -> Response:
    """Return an answer that states an error."""
    return Response(msgspec.json.encode({"error": reason}), status, headers=(("cache-control", "no-store"),))


def _admit_short(_request: HttpRequest) -> int:
    return BODY_BYTES_MAX


def _explain(_path: str, refusal: RequestRefusal) -> Response:
    return problem(refusal.status, refusal.reason)


@dataclass(frozen=True)
class DoorRules:
    """The rules of an HTTP server. `guard` checks method, path and headers; `explain` formats a refusal for a
    path; with `tls` the server speaks only HTTPS."""

    is_owner: Callable[[HttpRequest], bool]
    new_id: Callable[[], str]
    admit: Admit = _admit_short
    guard: Callable[[str, str, dict[str, str]], RequestRefusal | None] = refuse_stranger
    explain: Callable[[str, RequestRefusal], Response] = _explain
    tls: ssl.SSLContext | None = None
    settings: WebSettings = field(default_factory=WebSettings)


class HttpServer:
    """Serves `handler` on `host` at `port`. If `port` is taken and the server `may_move`, it uses any free
    port."""

    def __init__(
        self, handler: Handler, host: str, port: int, rules: DoorRules, *, may_move: bool = True
    ) -> None:
        self.rules = rules
        self.bodies_bytes = 0
        """Size of the long bodies that are held now."""
        self._handler = handler
        self._host = host
        self._port_wanted = port
        self._may_move = may_move
        self._places: Register[_Connection] = Register(rules.settings.places)
        self._doorway: dict[_Connection, None] = {}
        # The newest connection comes last.
        self._numbers = count()
        self.port = 0
        self.turned_away = 0

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled. `port` is known once this has started. Raises OSError if no port is free."""
        try:
            listeners = await trio.open_tcp_listeners(self._port_wanted, host=self._host)
        except OSError:
            if not self._may_move:
                raise
            listeners = await trio.open_tcp_listeners(0, host=self._host)
        keep_from_children(*(listener.socket for listener in listeners))
        self.port = listeners[0].socket.getsockname()[1]
        async with trio.open_nursery() as nursery:
            await nursery.start(trio.serve_listeners, self._serve, listeners)
            task_status.started()

    async def _serve(self, stream: trio.SocketStream) -> None:
        keep_from_children(stream.socket)
        connection = _Connection(stream, self, _source_of(stream))
        now, name = connection.since, b"%d" % next(self._numbers)
        evicted = self._places.admit(now, connection, name, connection.source)
        if evicted is None:
            evicted = self._enter_doorway(connection)
        if evicted is None:
            self.turned_away += 1
            await trio.aclose_forcefully(stream)
            return
        for each in evicted:
            self.turned_away += 1
            each.scope.cancel()
        try:
            with contain("page connection"), connection.scope:
                stream.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
                await connection.run()
        finally:
            self._places.leave(connection)
            self._doorway.pop(connection, None)
            with trio.move_on_after(1.0, shield=True):
                await trio.aclose_forcefully(stream)

    def _enter_doorway(self, connection: "_Connection") -> "tuple[_Connection, ...] | None":
        """Give a connection a short time to identify itself although all places are taken. Return the
        connections that lose their doorway place for it, or None if it gets no place itself."""
        gone: tuple[_Connection, ...] = ()
        if len(self._doorway) >= self.rules.settings.doorway_max:
            found = self._crowded_out(connection)
            if found is None:
                return None
            del self._doorway[found]
            gone = (found,)
        self._doorway[connection] = None
        return gone

    def _crowded_out(self, new: "_Connection") -> "_Connection | None":
        """Return the connection that loses its place in a full doorway. If the new connection's source has
        fewer connections there than the source with the most, it is the newest of the latter. Otherwise it is
        the oldest whose time is over, of a source with at least as many. Sending bytes does not protect a
        place, because bytes cost nothing."""
        strangers = [each for each in self._doorway if not each.is_owner and each.silent_since < inf]
        counts = Counter(each.source for each in strangers)
        own, most = counts[new.source], max(counts.values(), default=0)
        if own + 1 < most:
            return next(each for each in reversed(strangers) if counts[each.source] == most)
        timed_out = (
            each
            for each in strangers
            if new.since - each.since >= self.rules.settings.doorway_seconds and counts[each.source] >= own
        )
        return next(timed_out, None)

    def note(self, connection: "_Connection", request: HttpRequest) -> None:
        """Mark a connection as the owner's, so that it takes precedence over unidentified ones."""
        if connection.is_owner or not self.rules.is_owner(request):
            return
        connection.is_owner = True
        if connection in self._places:
            # Give it a source of its own, so that it never counts as part of a crowd that must make room for
            # others.
            self._places.leave(connection)
            self._places.admit(trio.current_time(), connection, _OWNER, b"owner %d" % next(self._numbers))
            self._places.credit(connection)

    async def answer(self, request: HttpRequest) -> Response | Streaming:
        """Pass a request to the handler and return the answer."""
        return await self._handler(request)


class _Gone(Exception):
    """The client has hung up, or reads nothing."""


class _Connection:
    """One client, whose requests are served one after another."""

    def __init__(self, stream: trio.SocketStream, door: HttpServer, source: bytes) -> None:
        self.since = trio.current_time()
        self.source = source
        """The prefix of the client's address; all clients on this machine have the same one."""
        self.scope = trio.CancelScope()
        self.is_owner = False
        """Whether the client has presented the token or a key."""
        self._silence = Silence()
        self._door = door
        self._rules = door.rules
        tls = door.rules.tls
        self._stream: trio.SocketStream | trio.SSLStream[trio.SocketStream] = stream
        if tls is not None:
            self._stream = trio.SSLStream(stream, tls, server_side=True, https_compatible=True)
        self._wants_body = True
        self._id = ""
        self._path = ""
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=HEADER_BYTES_MAX)

    @property
    def silent_since(self) -> float:
        return self._silence.since

    async def run(self) -> None:
        try:
            while await self._serve_one():
                self._http.start_next_cycle()
        except* (_Gone, trio.BrokenResourceError, trio.ClosedResourceError):
            pass  # there is no client left to answer

    async def _serve_one(self) -> bool:
        """Serve one request; return whether another may follow."""
        self._wants_body, self._path = True, ""
        self._id = self._rules.new_id()
        body = bytearray()
        try:
            request = await self._read_in_time(body)
            if isinstance(request, RequestRefusal):
                await self._refuse(request)
            elif isinstance(request, Response):
                await self._end_with(request)
            elif request is not None:
                await self._reply(request)
        finally:
            self._count(-len(body))
        return self._http.our_state is h11.DONE and self._http.their_state is h11.DONE

    async def _read_in_time(self, body: bytearray) -> HttpRequest | Response | RequestRefusal | None:
        """Return the next request, or the reason why it is not served, or None if there is none."""
        try:
            with trio.fail_after(self._rules.settings.idle_seconds_max):
                await self._first_bytes()
            with trio.fail_after(self._rules.settings.request_seconds_max) as scope:
                return await self._read_request(body, scope)
        except h11.RemoteProtocolError as error:
            status = HTTPStatus(error.error_status_hint)
            return RequestRefusal(status, "this is not an HTTP/1.1 request that this node understands")
        except trio.TooSlowError:
            if self._http.their_state is h11.IDLE and not self._http.trailing_data[0]:
                return None  # between two requests an idle connection simply ends
            return RequestRefusal(HTTPStatus.REQUEST_TIMEOUT, "the request took too long")

    async def _reply(self, request: HttpRequest) -> None:
        """Answer a request while its client is connected. Raises _Gone if the client has hung up."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch_for_end, nursery.cancel_scope)
            async with request.held:
                await self._send_answer(await self._answer(request))
            nursery.cancel_scope.cancel()
        if self._http.our_state not in (h11.DONE, h11.MUST_CLOSE):
            raise _Gone

    async def _answer(self, request: HttpRequest) -> Response | Streaming:
        answer: Response | Streaming
        failure = RequestRefusal(
            HTTPStatus.INTERNAL_SERVER_ERROR, "the node failed while answering; see errors.log"
        )
        answer = self._rules.explain(request.path, failure)
        with contain("page"):
            answer = await self._door.answer(request)
        return answer

    # Reading

    async def _first_bytes(self) -> None:
        if not self._http.trailing_data[0] and self._http.their_state is h11.IDLE:
            self._http.receive_data(await self._receive())

    async def _receive(self) -> bytes:
        with self._silence.waiting(trio.current_time):
            return bytes(await self._stream.receive_some(_CHUNK_BYTES))

    async def _read_request(
        self, body: bytearray, scope: trio.CancelScope
    ) -> HttpRequest | Response | RequestRefusal | None:
        head = await self._event()
        if not isinstance(head, h11.Request):
            return None
        self._wants_body = head.method != b"HEAD"
        headers = {name.decode("ascii"): value.decode("latin-1") for name, value in head.headers}
        request = _request(head, headers, self._id)
        if isinstance(request, RequestRefusal):
            return request
        self._path = request.path
        if (stranger := self._rules.guard(request.method, request.path, headers)) is not None:
            return stranger
        self._door.note(self, request)
        allowed = self._rules.admit(request)
        if isinstance(allowed, Response):
            return allowed
        if allowed > BODY_BYTES_MAX:
            settings = self._rules.settings
            scope.deadline += settings.long_request_seconds_max - settings.request_seconds_max
        if headers.get("expect", "").lower() == "100-continue":
            continued = h11.InformationalResponse(status_code=100, headers=[])
            await self._send(self._http.send(continued))
        while not isinstance(event := await self._event(), h11.EndOfMessage):
            if not isinstance(event, h11.Data):
                return None
            body += event.data
            self._count(len(event.data))
            if len(body) > allowed:
                return RequestRefusal(
                    HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                    f"the body is too long; at most {allowed} bytes are allowed",
                )
            if len(body) > BODY_BYTES_MAX and self._door.bodies_bytes > BODIES_BYTES_MAX:
                return RequestRefusal(
                    HTTPStatus.SERVICE_UNAVAILABLE, "too many long requests are being served now. Try again"
                )
        return replace(request, body=bytes(body))

    def _count(self, size: int) -> None:
        self._door.bodies_bytes += size

    async def _event(self) -> object:
        while (event := self._http.next_event()) is h11.NEED_DATA:
            self._http.receive_data(await self._receive())
        return event

    # Writing

    async def _send_answer(self, answer: Response | Streaming) -> None:
        if isinstance(answer, Response):
            await self._send_whole(answer)
            return
        headers = (*answer.headers, ("content-type", answer.content_type), ("connection", "close"))
        head = h11.Response(status_code=200, headers=self._headers(headers))
        await self._send(self._http.send(head))
        if self._wants_body:
            await answer.write(self._send_piece)
        await self._send(self._http.send(h11.EndOfMessage()))

    async def _send_whole(self, answer: Response) -> None:
        headers = [*answer.headers, ("content-type", answer.content_type)]
        if answer.status is not HTTPStatus.NOT_MODIFIED:
            headers.append(("content-length", str(len(answer.body))))
        data = self._http.send(h11.Response(status_code=answer.status, headers=self._headers(headers))) or b""
        if self._wants_body and answer.body and answer.status is not HTTPStatus.NOT_MODIFIED:
            data += self._http.send(h11.Data(data=answer.body)) or b""
        await self._send(data + (self._http.send(h11.EndOfMessage()) or b""))

    async def _refuse(self, refusal: RequestRefusal) -> None:
        await self._end_with(self._rules.explain(self._path, refusal))

    async def _end_with(self, answer: Response) -> None:
        """Send the reason, if the protocol still allows an answer, and end the connection."""
        if self._http.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            return
        await self._send_whole(replace(answer, headers=(*answer.headers, ("connection", "close"))))
        if isinstance(self._stream, trio.SocketStream):
            await self._stream.send_eof()
        with trio.move_on_after(
            DRAIN_SECONDS_MAX
        ):  # if it closed with unread bytes, the system would discard the answer
            while await self._receive():
                pass

    async def _send_piece(self, data: bytes) -> None:
        await self._send(self._http.send(h11.Data(data=data)))

    async def _send(self, data: bytes | None) -> None:
        with trio.move_on_after(SEND_SECONDS_MAX) as scope, self._silence.waiting(trio.current_time):
            await self._stream.send_all(data or b"")
        if scope.cancelled_caught:
            raise _Gone

    async def _watch_for_end(self, scope: trio.CancelScope) -> None:
        """Cancel the answer once its client hangs up, or sends too many bytes of further requests."""
        early = 0
        with suppress(trio.BrokenResourceError):
            while early <= EARLY_BYTES_MAX and (data := await self._stream.receive_some(_CHUNK_BYTES)):
                early += len(data)
                self._http.receive_data(bytes(data))
        scope.cancel()

    def _headers(self, given: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
        return [*given, ("x-request-id", self._id), *HEADERS]


def _source_of(stream: trio.SocketStream) -> bytes:
    try:
        host = str(stream.socket.getpeername()[0])
    except OSError:  # it has hung up already
        return _HERE
    return _HERE if ipaddress.ip_address(host).is_loopback else prefix_of(host)


def _request(head: h11.Request, headers: dict[str, str], number: str) -> HttpRequest | RequestRefusal:
    try:
        target = urlsplit(head.target.decode("ascii"))
        fields = parse_qsl(target.query, keep_blank_values=True, max_num_fields=QUERY_FIELDS_MAX)
        path = unquote(target.path, errors="strict")
    except (ValueError, UnicodeDecodeError):
        return RequestRefusal(HTTPStatus.BAD_REQUEST, "this node does not understand the path")
    return HttpRequest(head.method.decode("ascii"), path, dict(fields), headers, id=number)
