"""Traces: spans of all machines of a run on one clock, only for its members, for Chrome and OTLP."""

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from crypto.encoding import decode, encode
from crypto.errors import RemoteProtocolError
from crypto.identity import Identity
from node.cli.trace import chrome_trace, otlp_trace, send_otlp
from node.commands import Commands
from node.errors import UsageError
from node.events import RunPlanned
from node.pipeline.spans import SPANS_KEPT_MAX, Span, Spans, trace_id
from node.runs.traces import ANSWER_BYTES_MAX, TRACES_PROTOCOL, SpanRequest, Told, trace_document
from partition.plan.plan import NO_HASH, Plan, StagePlan
from sim.worlds.scheduling import run_virtually
from tests.stack import manifest, swarm, train

SPAN = Span(3, 1, 7, "forward", 1_000, 2_000, 1_500)


def test_a_microbatch_is_traced_in_all_stages_of_all_machines() -> None:
    async def main() -> None:
        async with swarm("abcde", preset="lan") as group:
            run, seen = await train(group, "a", manifest(steps=3))
            asker = group.nodes["a"]
            plan = next(event for event in seen if isinstance(event, RunPlanned))
            peers = [peer for stage in plan.stages for peer in stage]
            rows = await asker.runs.traces.collect(run.id, peers, 0, 2)
            names = {node.peer: name for name, node in group.nodes.items()}
            document = trace_document(run.id, rows, names)
            assert [row.get("error") for row in rows] == [None] * len(peers)
            passes = {
                (span["step"], span["microbatch"], span["stage"], span["kind"])
                for peer in document["peers"]
                for span in peer["spans"]
            }
            for number in range(3 * 8):
                step = number // 8
                assert {(step, number, 0, "forward"), (step, number, 1, "forward")} <= passes
                assert (step, number, 0, "backward") in passes
            assert {span["trace"] for peer in document["peers"] for span in peer["spans"]} >= {
                trace_id(run.id, step).hex() for step in range(3)
            }
            assert max(abs(row["offset_seconds"]) for row in rows) < 0.001
            arrows = [row for row in chrome_trace(document)["traceEvents"] if row["ph"] == "s"]
            assert len(arrows) >= 3 * 8

    run_virtually(main)


def test_a_requester_without_a_stage_can_trace_its_ended_run() -> None:
    async def main() -> None:
        async with swarm("abcde", preset="lan") as group:
            run, seen = await train(group, "a", manifest(steps=3))
            asker = group.nodes["a"]
            plan = next(event for event in seen if isinstance(event, RunPlanned))
            assert all(asker.peer not in stage for stage in plan.stages)
            with trio.fail_after(60):
                while asker.runs.members:  # noqa: ASYNC110 - virtual time: waiting costs nothing
                    await trio.sleep(0.1)

            async def nothing(_event: object) -> None:
                await trio.lowlevel.checkpoint()

            found: Any = await Commands(asker).handlers["runs.trace"]({"run": run.text}, nothing)
            assert len(found["peers"]) == 4
            assert all(peer["spans"] for peer in found["peers"]), found

    run_virtually(main)


def test_nodes_outside_a_run_get_no_spans() -> None:
    async def main() -> None:
        async with swarm("abcdef", preset="lan") as group:
            run, seen = await train(group, "a", manifest(steps=1))
            plan = next(event for event in seen if isinstance(event, RunPlanned))
            inside = {peer for stage in plan.stages for peer in stage} | set(plan.trainers) | {plan.trainer}
            outsider = next(node for node in group.nodes.values() if node.peer not in inside)
            rows = await outsider.runs.traces.collect(run.id, sorted(inside)[:2], 0, 9)
            assert [row["spans"] for row in rows] == [[], []]
            assert all("round_trip_seconds" in row for row in rows)

    run_virtually(main)


def test_a_hostile_request_is_refused_and_counted() -> None:
    async def main() -> None:
        async with swarm("ab", preset="lan") as group:
            a, b = group.nodes["a"], group.nodes["b"]
            stream = await a.network.open(b.peer, TRACES_PROTOCOL)
            await stream.send(b"\xc1")
            with trio.move_on_after(30):
                await trio.sleep(1)
            assert b.counters["protocol_errors"] == 1
            await stream.aclose()

    run_virtually(main)


numbers = st.integers(0, 2**53)


@given(
    st.builds(
        Span,
        st.integers(-1, 2**53),
        st.integers(0, 4_096),
        st.integers(-1, 2**53),
        st.sampled_from(["forward", "backward", "apply", "other"]),
        st.integers(0, 2**63 - 1),
        st.integers(0, 2**63 - 1),
        st.integers(0, 2**63 - 1),
    )
)
def test_encoded_spans_decode_to_the_same_spans(span: Span) -> None:
    told = Told(1, 2, (span,))
    assert decode(encode(told), Told, bytes_max=ANSWER_BYTES_MAX) == told


@given(st.binary(max_size=300))
def test_decoding_arbitrary_bytes_gives_a_refusal_at_worst(data: bytes) -> None:
    for kind in (SpanRequest, Told):
        try:
            decode(data, kind, bytes_max=ANSWER_BYTES_MAX)
        except RemoteProtocolError:
            continue


def test_the_number_of_spans_is_bounded() -> None:
    spans = Spans()
    for number in range(SPANS_KEPT_MAX + 100):
        spans.add(b"r" * 32, Span(number, 0, 0, "forward", 0, 0, 0))
    assert len(list(spans.of(b"r" * 32, 0, 10**9))) == SPANS_KEPT_MAX


def test_holders_under_earlier_plans_still_exchange_spans() -> None:
    spans, run = Spans(), b"r" * 32
    peers = [Identity(bytes([number]) * 32).peer for number in range(3)]

    def plan(*replicas: bytes) -> Plan:
        stages = tuple(StagePlan(number, number + 1, (peer,), (1,)) for number, peer in enumerate(replicas))
        return Plan(run, NO_HASH, 0, tuple(sorted(replicas)), replicas[:1], 1, stages)

    spans.admit(plan(peers[0], peers[1]))
    spans.admit(plan(peers[0], peers[2]))
    assert spans.holders(run, peers) == [peers[0], peers[2], peers[1]]
    assert spans.holders(run, ()) == [peers[0], peers[2]], "the trace asks holders that have departed"
    assert all(spans.may_ask(run, peer) for peer in peers)


def document() -> dict[str, object]:
    other = Span(3, 0, 7, "forward", 0, 900, 900)
    known = {"offset_seconds": 0.0, "round_trip_seconds": 0.0}
    rows: list[dict[str, Any]] = [
        {**known, "peer": b"\1" * 32, "spans": [other]},
        {**known, "peer": b"\2" * 32, "spans": [SPAN], "offset_seconds": 5e-7},
        {"peer": b"\3" * 32, "error": "gone", "spans": []},
    ]
    return trace_document(b"r" * 32, rows, {})


def test_a_frame_is_drawn_as_an_arrow_between_stages_on_one_clock() -> None:
    events = chrome_trace(document())["traceEvents"]
    begin = next(event for event in events if event["ph"] == "s")
    end = next(event for event in events if event["ph"] == "f")
    assert (begin["pid"], begin["tid"], end["pid"], end["tid"]) == (1, 1, 2, 2)
    assert begin["id"] == end["id"]
    assert {event["args"]["step"] for event in events if event["ph"] == "X"} == {4}, (
        "steps are not numbered as on screens"
    )
    assert end["ts"] == pytest.approx(0.5)  # 1 us on its own clock, which is half a us ahead


def test_a_collector_gets_all_spans_in_one_trace() -> None:
    received: list[bytes] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *arguments: object) -> None:
            """Log nothing."""

    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        send_otlp(f"http://127.0.0.1:{server.server_port}/v1/traces", document())
        thread.join()
    spans = [
        span
        for resource in json.loads(received[0])["resourceSpans"]
        for scope in resource["scopeSpans"]
        for span in scope["spans"]
    ]
    assert {span["traceId"] for span in spans} == {trace_id(b"r" * 32, 3).hex()}
    assert len({span["spanId"] for span in spans}) == 2
    assert json.loads(received[0]) == otlp_trace(document())


def test_an_unreachable_collector_is_a_usage_error() -> None:
    with pytest.raises(UsageError):
        send_otlp("file:///etc/passwd", document())
    with pytest.raises(UsageError):
        send_otlp("http://127.0.0.1:1/v1/traces", document())
