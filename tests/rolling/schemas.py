"""The messages of nodes as a record of each protocol, for the previous version and for this one.

`previous.json` has the record of the previous version. `previous.tar.xz` has its packages as in its wheel
(without the simulator, the page's files and the demo's weights). A node must speak with nodes of both
versions. So if a message changes, its protocol gets a new name: `/peerloom/serve/1` became
`/peerloom/serve/2`, and this version serves both. If the previous version reads a changed message correctly
all the same, the change may instead stand in `COMPATIBLE`, with the reason.

`python -m tests.rolling.schemas` prints what has changed since. With `--release VERSION` it records the
messages of this version, for the next: see CONTRIBUTING.md.
"""

import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import dht.messages
import gossip.swim
from dht.capabilities import Advert
from node.checkpoints import replication
from node.content import blobs, directory
from node.protocols import checkpoint
from node.protocols import runs as runs
from node.seams import StreamLimits
from node.services import metadata
from node.services.relays.finding import RelayRecord
from node.transport import beacon, router
from partition.plan.change import Change
from partition.plan.observed import Observed
from partition.plan.plan import Plan
from partition.plan.rates import Calibration
from tests.hostile.wire import FACTS, PROTOCOLS, PURPOSES, structs
from tests.protocol_page import default, description, parts_of, shown

FOLDER = Path(__file__).parent
RECORD = FOLDER / "previous.json"
ARCHIVE = FOLDER / "previous.tar.xz"

CARRIED: Mapping[str, tuple[type, ...]] = {
    gossip.swim.PROTOCOL: (metadata.Metadata,),
    dht.messages.PROTOCOL: (
        Advert,
        Calibration,
        Observed,
        replication.CheckpointOffer,
        directory.SubkeyRow,
        RelayRecord,
    ),
    runs.RUNS_PROTOCOL: (Plan,),
    runs.PIPELINE_PROTOCOL: (Change,),
    blobs.BLOBS_PROTOCOL: (checkpoint.StatePart,),
}
"""Structs that a protocol carries as bytes, which the receiver decodes again."""

UNNAMED: Mapping[str, tuple[type, ...]] = {
    "the hello of a connection": (router.Hello, router.HelloAnswer),
    "the beacon of the local network": (beacon.Beacon,),
}
"""Messages that are sent before any protocol name. No version of them can be chosen, so they may only
grow."""

GOAL_FIELDS = {
    f"RevisionBody.{field}": "a field at the end, which only the requester's own node uses"
    for field in (
        "samples_per_second: float >= 0 <= 1,000,000,000; without it `0.0`",
        "goal_seconds: int >= 0 <= 86,400; without it `0`",
    )
}

FORMER_NAMES: Mapping[str, str] = {
    "AcceptedReceipt": "Accepted",
    "AdvertisedStanding": "Standing",
    "ArrayRow": "Row",
    "BlobAbsent": "Absent",
    "CheckpointOffer": "Offer",
    "ChunkRequest": "Ask",
    "ColumnRefusal": "Refusal",
    "ConclusionRefused": "Refused",
    "FrameRow": "Row",
    "GroupMember": "Member",
    "HeldPart": "Held",
    "HelloAnswer": "Answer",
    "ModelEvaluated": "Evaluated",
    "NoReceipt": "Nothing",
    "NoState": "Nothing",
    "ObservedAddresses": "Observed",
    "OperatorPace": "Pace",
    "PieceRefused": "Refused",
    "PieceRequest": "Ask",
    "PiecesHeld": "Have",
    "PrepareStage": "Prepare",
    "PunchOffer": "Offer",
    "ServiceRow": "Row",
    "ShownReceipts": "Shown",
    "SnapshotTable": "Table",
    "SpanRequest": "Ask",
    "StallQuestion": "Ask",
    "StateOffer": "Offer",
    "StateRequest": "Ask",
    "UnitWork": "Work",
}
"""Names of structs in this version, and their names in the previous version. Such names are not sent on the
wire."""

COMPATIBLE: Mapping[str, Mapping[str, str]] = {
    gossip.swim.PROTOCOL: {
        "AliveBody.circuits: list <= 8 of (text <= 200); without it empty": (
            "a field at the end, which a version without relays skips. Among "
            "`addresses` it would refuse such an address, together with the fact and "
            "the peer that passed it on"
        ),
    },
    dht.messages.PROTOCOL: {
        "SettingsBody: new": (
            "a value under a key of its own, which a node stores like any other; only "
            "nodes that follow a key read the value"
        ),
        "SharedSetting: new": "used only in SettingsBody",
        "RelayRecord: new": "a value under keys of its own, which a node stores like any other",
    },
    "/peerloom/services/1": {
        "Row.is_stopgap: bool; without it `False`": (
            "a field at the end; the previous version treats such a member like any other that answers"
        ),
        "ServiceManifest.version: one of 1, 2; required": (
            "2 is written only for encoders, which the previous version could not "
            "hold: it refuses the service"
        ),
        "ServiceManifest.vector: int >= 0 <= 65,536; without it `0`": (
            "a field at the end, 0 in all manifests of version 1"
        ),
    },
    runs.RUNS_PROTOCOL: GOAL_FIELDS,
    runs.PIPELINE_PROTOCOL: GOAL_FIELDS,
    "the hello of a connection": {
        'Hello.kind: one of "identify", "message", "path", "stream"; required': (
            "a path is offered to a peer that cannot be dialled back. The previous "
            "version hangs up, and the offer counts as refused, so the peer is reached "
            "as before there were paths"
        ),
    },
}
"""For each protocol: the changed lines of its record, and why each change does not mislead the previous
version."""

Record = dict[str, list[str]]


def fields(cls: type) -> Iterator[str]:
    """Yield the record of one struct: how it is written, then its fields in order."""
    found = description(cls)
    form = "array" if found.array_like else "map"
    tag = "" if found.tag is None else f", tag {found.tag}"
    signed = f", signed for {PURPOSES[cls]}" if cls in PURPOSES else ""
    yield f"{cls.__name__}: {form}{tag}{signed}"
    for field in found.fields:
        value = default(field)
        without = value if value == "required" else f"without it {value}"
        yield f"{cls.__name__}.{field.encode_name}: {shown(field.type)}; {without}"


def limits_text(limits: StreamLimits) -> str:
    """Return the limits that a sender must observe on one stream."""
    return f"a message of at most {limits.message_bytes_max:,} bytes"


def record() -> dict[str, Record]:
    """Return the record of this version: for each protocol its lines, in groups of one struct each."""
    found: dict[str, Record] = {}
    for protocol in PROTOCOLS:
        unions: tuple[Any, ...] = (protocol.said, protocol.answered, protocol.datagrams)
        kinds = tuple(cls for union in unions for cls in structs(union))
        kinds += FACTS.get(protocol.name, ()) + CARRIED.get(protocol.name, ())
        found[protocol.name] = _of(kinds)
        if protocol.said is not None:
            payloads = ", payloads beside it" if protocol.payloads else ""
            found[protocol.name]["streams"] = [f"streams: {limits_text(protocol.limits)}{payloads}"]
    for name, classes in UNNAMED.items():
        found[name] = _of(classes)
    return found


def as_before(now: dict[str, Record]) -> dict[str, Record]:
    """Return the record of this version, with structs named as in the previous version."""

    def former(text: str) -> str:
        return re.sub(r"\w+", lambda word: FORMER_NAMES.get(word[0], word[0]), text)

    return {
        protocol: {former(name): [former(line) for line in lines] for name, lines in said.items()}
        for protocol, said in now.items()
    }


def _of(kinds: tuple[type, ...]) -> Record:
    known = set(kinds)
    every = dict.fromkeys((*kinds, *parts_of(kinds, known)))
    return {cls.__name__: list(fields(cls)) for cls in sorted(every, key=lambda each: each.__name__)}


def changes(before: Record, now: Record) -> list[str]:
    """Return the new lines, and, each with a minus sign in front, the lines that are gone or have moved."""
    found: list[str] = []
    for name in sorted(before.keys() | now.keys()):
        old, new = before.get(name, []), now.get(name, [])
        if not old:
            found.append(f"{name}: new")
            continue
        found += [f"- {line}" for line in old if line not in new and not _is_replaced(line, new)]
        found += [line for line in new if line not in old]
        is_array = bool(new) and ": array" in new[0]
        if is_array and _kept(old, new) != [_field(line) for line in new][: len(_kept(old, new))]:
            found.append(f"- {name}: the order of its fields has changed")
    return found


def _field(line: str) -> str:
    return line.split(":", 1)[0]


def _kept(old: list[str], new: list[str]) -> list[str]:
    """Return the fields of `old` that still exist, in their former order."""
    names = {_field(line) for line in new}
    return [_field(line) for line in old if _field(line) in names]


def _is_replaced(line: str, new: list[str]) -> bool:
    return any(_field(each) == _field(line) for each in new)


def previous() -> dict[str, Record]:
    """Return the record of the previous version."""
    found: dict[str, Record] = json.loads(RECORD.read_text(encoding="utf-8"))["protocols"]
    return found


def undeclared() -> list[str]:
    """Return, one line each, what changed since the previous version under an unchanged name and without a
    reason."""
    lines, before, now = [], previous(), as_before(record())
    for name in sorted(before.keys() & now.keys()):
        allowed = COMPATIBLE.get(name, {})
        lines += [f"{name}: {line}" for line in changes(before[name], now[name]) if line not in allowed]
    return lines


def main() -> None:
    """Print what changed, or record this version for the next one."""
    if sys.argv[1:2] == ["--release"] and len(sys.argv) == 3:
        document = {"version": sys.argv[2], "protocols": record()}
        RECORD.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        return
    for line in undeclared():
        print(line)  # noqa: T201 - a program for a person


if __name__ == "__main__":
    main()
