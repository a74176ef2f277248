"""The exchange of spans among members of a run: `/peerloom/traces/1`.

A stream carries many requests. An answer gives the times at which the request arrived and the answer left, by
the responder's clock. From the shortest round trip the asker computes the offset of that clock, as in NTP
(RFC 5905, section 8). So the spans of all machines can be shown on one time axis, exact to half of that round
trip.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import msgspec
import trio

from crypto.encoding import decode, encode
from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId, peer_text
from node.errors import StreamClosed, Unreachable
from node.pipeline.spans import Span, Spans, trace_id
from node.protocols.calls import conversation
from node.protocols.manifest import run_text
from node.seams import Seams, Stream
from partition.plan.plan import Hash

TRACES_PROTOCOL = "/peerloom/traces/1"
SPANS_ANSWERED_MAX = 4_096
"""Maximum number of spans in one answer: about 200 KB."""
STEPS_ASKED_MAX = 1_024
REQUESTS_MAX = 64
"""Maximum number of requests on one stream. An asker needs a few round trips and some pages of spans."""
REQUEST_SECONDS_MAX = 5.0
COLLECT_SECONDS_MAX = 10.0
ROUND_TRIPS = 5
REQUEST_BYTES_MAX = 1_024
ANSWER_BYTES_MAX = 1 << 20
_WHOLE = 10**9


class SpanRequest(msgspec.Struct, frozen=True, tag="Ask"):
    """A request for the spans of a range of a run's steps, without the first `skip` spans. With `count` 0 it
    only asks for the time."""

    run: Hash
    first: Annotated[int, msgspec.Meta(ge=0, le=2**53)]
    last: Annotated[int, msgspec.Meta(ge=0, le=2**53)]
    skip: Annotated[int, msgspec.Meta(ge=0, le=1 << 20)] = 0
    count: Annotated[int, msgspec.Meta(ge=0, le=SPANS_ANSWERED_MAX)] = 0


class Told(msgspec.Struct, frozen=True, tag=True):
    """An answer. `received` and `sent` are Unix times in nanoseconds. Peers outside the run get no spans."""

    received: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
    sent: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
    spans: Annotated[tuple[Span, ...], msgspec.Meta(max_length=SPANS_ANSWERED_MAX)] = ()


class Traces:
    """The trace service of this node: it answers other nodes and asks them."""

    def __init__(
        self, seams: Seams, spans: Spans, refuse: Callable[[PeerId, RemoteProtocolError], None]
    ) -> None:
        self._seams = seams
        self._spans = spans
        self._refuse = refuse
        seams.network.handle(TRACES_PROTOCOL, self.serve)

    async def serve(self, stream: Stream) -> None:
        """Answer the requests of one stream."""
        try:
            for _ in range(REQUESTS_MAX):
                with trio.move_on_after(REQUEST_SECONDS_MAX) as waiting:
                    request: SpanRequest = decode(
                        await stream.receive(), SpanRequest, bytes_max=REQUEST_BYTES_MAX
                    )
                if waiting.cancelled_caught:
                    return
                received = self._now()
                spans = self._answer(stream.peer, request)
                with trio.move_on_after(REQUEST_SECONDS_MAX):
                    await stream.send(encode(Told(received, self._now(), spans)))
        except RemoteProtocolError as error:
            self._refuse(stream.peer, error)
        except StreamClosed:
            return

    def _answer(self, peer: PeerId, request: SpanRequest) -> tuple[Span, ...]:
        if not request.count or not self._spans.may_ask(request.run, peer):
            return ()
        last = min(request.last, request.first + STEPS_ASKED_MAX)
        found = list(self._spans.of(request.run, request.first, last))
        return tuple(found[request.skip : request.skip + request.count])

    def _now(self) -> int:
        return int(self._seams.clock.wall() * _WHOLE)

    async def collect(
        self, run: bytes, peers: Sequence[PeerId], first: int, last: int
    ) -> list[dict[str, Any]]:
        """Return the spans of every peer with the offset of its clock from this node's, or with the error."""
        rows: dict[PeerId, dict[str, Any]] = {}

        async def visit(peer: PeerId) -> None:
            try:
                rows[peer] = await self._visit(run, peer, first, last)
            except (Unreachable, StreamClosed, RemoteProtocolError) as error:
                rows[peer] = {"error": str(error)[:200], "spans": []}

        async with trio.open_nursery() as nursery:
            for peer in peers:
                nursery.start_soon(visit, peer)
        return [{"peer": peer, **rows[peer]} for peer in peers]

    async def _visit(self, run: bytes, peer: PeerId, first: int, last: int) -> dict[str, Any]:
        if peer == self._seams.network.peer:
            spans = list(self._spans.of(run, first, last))
            return {"offset_seconds": 0.0, "round_trip_seconds": 0.0, "spans": spans}
        network, seconds = self._seams.network, COLLECT_SECONDS_MAX
        talk = conversation(
            network, peer, TRACES_PROTOCOL, seconds=seconds, message_bytes_max=ANSWER_BYTES_MAX
        )
        async with talk as stream:
            timed = [await self._time(stream, run) for _ in range(ROUND_TRIPS)]
            trip, offset = min(timed)
            spans = []
            while len(spans) < SPANS_ANSWERED_MAX * (REQUESTS_MAX - ROUND_TRIPS - 1):
                ask = SpanRequest(run, first, last, len(spans), SPANS_ANSWERED_MAX)
                told = await self._call(stream, ask)
                spans += told.spans
                if len(told.spans) < SPANS_ANSWERED_MAX:
                    break
        return {
            "offset_seconds": offset / _WHOLE,
            "round_trip_seconds": trip / _WHOLE,
            "spans": spans,
        }

    async def _time(self, stream: Stream, run: bytes) -> tuple[int, int]:
        """Return (round trip, offset of the other clock), in nanoseconds."""
        asked = self._now()
        told = await self._call(stream, SpanRequest(run, 0, 0))
        answered = self._now()
        trip = max(0, (answered - asked) - (told.sent - told.received))
        return trip, ((told.received - asked) + (told.sent - answered)) // 2

    async def _call(self, stream: Stream, request: SpanRequest) -> Told:
        await stream.send(encode(request))
        return decode(await stream.receive(), Told, bytes_max=ANSWER_BYTES_MAX)


def trace_document(
    run: bytes, rows: Sequence[Mapping[str, Any]], names: Mapping[PeerId, str]
) -> dict[str, Any]:
    """Return spans by peer, all on the asker's clock. Schema `peerloom/trace/1`.

    `step` counts from 0; `step_number` counts from 1, as screens do. `layers` are those of the stage at that
    time: the first layer, and the one after the last.
    """
    return {
        "schema": "peerloom/trace/1",
        "run": run_text(run),
        "peers": [
            {
                **row,
                "peer": peer_text(row["peer"]),
                "name": names.get(row["peer"], ""),
                "spans": [
                    {
                        "trace": trace_id(run, span.step).hex(),
                        "step": span.step,
                        "step_number": span.step + 1,
                        "stage": span.stage,
                        "layers": [span.first_layer, span.last_layer],
                        "microbatch": span.microbatch,
                        "kind": span.kind,
                        "begun_seconds": span.begun / _WHOLE - row.get("offset_seconds", 0.0),
                        "seconds": span.lasted / _WHOLE,
                        "busy_seconds": span.busy / _WHOLE,
                    }
                    for span in row["spans"]
                ],
            }
            for row in rows
        ],
    }
