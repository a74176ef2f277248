"""The log of events: one line for each event, filtered by level and area, rotated, and readable only by this
user."""

import json
import stat
from pathlib import Path

import pytest

from node import config, eventlog
from node.errors import UsageError
from node.event_kinds import EVENT_KINDS
from node.eventlog import EventLog, area_of, read_levels
from node.events import MemberLost, RunEnded
from node.state_documents import event_document
from tests.node.web.world import STARTED, joined, peer, run_events, started

HAPPENED = [
    started(),
    joined(1),
    *run_events(),
    MemberLost(at=STARTED, peer=peer(1), reason="50 % of acks\nmissed"),
    RunEnded(at=STARTED, run="ab" * 8, outcome="failed", detail="no provider"),
]


def written(folder: Path, style: eventlog.Format, levels: str) -> list[str]:
    log = EventLog(folder, style, read_levels(levels))
    for event in HAPPENED:
        log.write(event_document(event))
    log.close()
    path = folder / eventlog.LOG_NAME
    return path.read_text().splitlines() if path.exists() else []


def test_each_event_is_one_line_of_json(tmp_path: Path) -> None:
    lines = [json.loads(line) for line in written(tmp_path, "json", "")]
    assert [line["kind"] for line in lines] == [type(event).__name__ for event in HAPPENED]
    assert lines[-2] | {"area": "swarm", "level": "warning", "reason": "50 % of acks\nmissed"} == lines[-2]
    assert stat.S_IMODE((tmp_path / eventlog.LOG_NAME).stat().st_mode) == 0o600


def test_each_event_is_one_line_of_text(tmp_path: Path) -> None:
    lines = written(tmp_path, "text", "")
    assert len(lines) == len(HAPPENED)
    assert "warning swarm  MemberLost" in lines[-2]
    assert r'reason="50 % of acks\nmissed"' in lines[-2]


@pytest.mark.parametrize(
    ("levels", "kinds"),
    [
        ("warning", ["MemberLost", "RunEnded"]),
        ("swarm=off,runs=error", ["NodeStarted", "RunEnded"]),
        ("off", []),
    ],
)
def test_each_area_may_have_its_own_level(tmp_path: Path, levels: str, kinds: list[str]) -> None:
    assert [json.loads(line)["kind"] for line in written(tmp_path, "json", levels)] == kinds


def test_the_log_file_is_rotated(tmp_path: Path) -> None:
    log = EventLog(tmp_path, "json", read_levels(""), bytes_max=4_000)
    for _ in range(200):
        log.write(event_document(joined(1)))
    log.close()
    sizes = [path.stat().st_size for path in tmp_path.iterdir()]
    assert len(sizes) == 1 + eventlog.LOGS_KEPT
    assert max(sizes) <= 4_000


def test_every_kind_of_event_has_an_area() -> None:
    assert {area_of(name) for name in EVENT_KINDS} == set(eventlog.AREAS)


@pytest.mark.parametrize("text", ["loud", "swarm=loud", "moon=info", "=info="])
def test_unknown_levels_are_refused(text: str) -> None:
    with pytest.raises(UsageError):
        config.resolve({"log_levels": text}, {})
