"""Traces in common formats: a Chrome trace (Perfetto, chrome://tracing) and OTLP as JSON. No I/O.

Both are made from the document of the command `runs.trace`. All its spans already have times of the same
clock.
"""

import json
import urllib.request
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from blake3 import blake3

from node.cli.render import short_id
from node.errors import UsageError

OTLP_SECONDS_MAX = 10.0


def chrome_trace(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the trace of some steps: a process for each peer, a thread for each stage, an arrow for each
    frame."""
    rows: list[dict[str, Any]] = []
    passes: dict[tuple[int, int, str], list[dict[str, Any]]] = {}
    for number, peer in enumerate(document["peers"], start=1):
        name = f"{peer['name'] or short_id(peer['peer'])}"
        rows.append({"ph": "M", "name": "process_name", "pid": number, "args": {"name": name}})
        cuts: dict[int, list[tuple[int, int]]] = {}
        for span in peer["spans"]:
            cuts.setdefault(span["stage"], []).append(tuple(span["layers"]))
        for stage, layers in sorted(cuts.items()):
            label = {"name": f"stage {stage + 1}{_layers_text(layers)}"}
            rows.append({"ph": "M", "name": "thread_name", "pid": number, "tid": stage + 1, "args": label})
        for span in peer["spans"]:
            row = {
                "ph": "X",
                "cat": span["kind"],
                "name": _name(span),
                "pid": number,
                "tid": span["stage"] + 1,
                "ts": round(span["begun_seconds"] * 1e6, 3),
                "dur": round(span["seconds"] * 1e6, 3),
                "args": {
                    "step": span["step_number"],
                    "microbatch": span["microbatch"],
                    "layers": span["layers"],
                    "busy_us": round(span["busy_seconds"] * 1e6, 3),
                    "trace": span["trace"],
                },
            }
            rows.append(row)
            if span["kind"] in ("forward", "backward"):
                passes.setdefault((span["step"], span["microbatch"], span["kind"]), []).append(row)
    for (step, microbatch, kind), found in passes.items():
        rows += _arrows(f"{step}.{microbatch}.{kind}", found, is_forward=kind == "forward")
    return {
        "traceEvents": rows,
        "displayTimeUnit": "ms",
        "otherData": {
            "run": document["run"],
            "clocks": {
                peer["name"] or peer["peer"]: {
                    "offset_seconds": peer.get("offset_seconds"),
                    "round_trip_seconds": peer.get("round_trip_seconds"),
                    "error": peer.get("error"),
                }
                for peer in document["peers"]
            },
        },
    }


def _layers_text(layers: list[tuple[int, int]]) -> str:
    """Return the layers that a stage had over time, or "" if they are unknown."""
    texts = [f"{first + 1}-{last}" for first, last in dict.fromkeys(layers) if last]
    return f" (layers {', then '.join(texts)})" if texts else ""


def _arrows(name: str, rows: list[dict[str, Any]], *, is_forward: bool) -> list[dict[str, Any]]:
    """Return arrows from each stage's pass of a micro-batch to the next stage's pass; in the other direction
    for gradients."""
    ordered = sorted(rows, key=lambda row: (row["tid"] if is_forward else -row["tid"], row["ts"]))
    arrows = []
    for earlier, later in pairwise(ordered):
        if earlier["tid"] == later["tid"]:
            continue  # the same stage again: a replay, which no frame between stages caused
        common = {"cat": "frame", "name": "frame", "id": f"{name}.{earlier['tid']}"}
        end = earlier["ts"] + earlier["dur"]
        arrows.append({**common, "ph": "s", "pid": earlier["pid"], "tid": earlier["tid"], "ts": end})
        where = {"pid": later["pid"], "tid": later["tid"], "ts": later["ts"]}
        arrows.append({**common, "ph": "f", "bp": "e", **where})
    return arrows


def otlp_trace(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the trace as the body of a POST to an OTLP collector's `/v1/traces` (OTLP 1.x, JSON)."""
    resources = []
    for peer in document["peers"]:
        spans = [_otlp_span(document["run"], peer["peer"], span) for span in peer["spans"]]
        attributes = [_attribute("service.name", "peerloom"), _attribute("service.instance.id", peer["peer"])]
        attributes.append(_attribute("host.name", peer["name"] or peer["peer"]))
        if spans:
            scoped = {"scope": {"name": "peerloom"}, "spans": spans}
            resources.append({"resource": {"attributes": attributes}, "scopeSpans": [scoped]})
    return {"resourceSpans": resources}


def _otlp_span(run: str, peer: str, span: Mapping[str, Any]) -> dict[str, Any]:
    begun = round(span["begun_seconds"] * 1e9)
    unique = f"{run} {peer} {span['step']} {span['stage']} {span['microbatch']} {span['kind']} {begun}"
    return {
        "traceId": span["trace"],
        "spanId": blake3(unique.encode()).hexdigest()[:16],
        "name": _name(span),
        "kind": 1,
        "startTimeUnixNano": str(begun),
        "endTimeUnixNano": str(begun + round(span["seconds"] * 1e9)),
        "attributes": [
            _attribute("peerloom.run", run),
            _attribute("peerloom.step", span["step_number"]),
            _attribute("peerloom.stage", span["stage"]),
            _attribute("peerloom.microbatch", span["microbatch"]),
            _attribute("peerloom.layers", "{}-{}".format(*span["layers"])),
        ],
    }


def _attribute(key: str, value: str | int) -> dict[str, Any]:
    kind = "intValue" if isinstance(value, int) else "stringValue"
    return {"key": key, "value": {kind: str(value)}}


def _name(span: Mapping[str, Any]) -> str:
    return span["kind"] if span["microbatch"] < 0 else f"{span['kind']} {span['microbatch']}"


def send_otlp(url: str, document: Mapping[str, Any]) -> None:
    """POST a trace to a collector. Raises UsageError if the URL is invalid, or the collector refused it."""
    if not url.startswith(("http://", "https://")):
        raise UsageError(f"--otlp {url}: want a URL such as http://127.0.0.1:4318/v1/traces")
    request = urllib.request.Request(  # noqa: S310 - http and https alone, checked above
        url, json.dumps(otlp_trace(document)).encode(), {"content-type": "application/json"}, method="POST"
    )
    try:
        with urllib.request.urlopen(request, timeout=OTLP_SECONDS_MAX):  # noqa: S310 - as above
            return
    except (OSError, ValueError) as error:
        raise UsageError(f"--otlp {url}: {error}") from None
