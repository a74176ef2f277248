"""Two real nodes and all views of them: `page`, `events`, `top`, `report`, and the page over HTTP."""

import base64
import json
import time
import urllib.error
import urllib.request
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from node.demo.processes import SwarmProcesses
from node.main import run


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SwarmProcesses]:
    """Yield two nodes, of which only a has a page."""
    nodes = SwarmProcesses(
        tmp_path_factory.mktemp("nodes"), "watching", time.sleep, with_page="a", calibrate=False
    )
    try:
        nodes.launch("ab")
        first = nodes.start("a", None)
        nodes.start("b", first.address)
        until = time.monotonic() + 30
        while nodes.status("a")["members_alive"] < 1 or nodes.status("a")["page"] is None:
            assert time.monotonic() < until
        yield nodes
    finally:
        nodes.close()


def folder(swarm: SwarmProcesses, name: str) -> str:
    return str(swarm.nodes[name].data_dir)


def test_page_prints_a_link_with_a_token(swarm: SwarmProcesses, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["page", "--data-dir", folder(swarm, "a")]) == 0
    link = capsys.readouterr().out.strip()
    address, _, token = link.partition("/#token=")
    assert address == swarm.status("a")["page"]
    for given, status in (("", 401), (token, 409)):
        with pytest.raises(urllib.error.HTTPError) as refused:
            act(address, "stop", given)
        assert refused.value.code == status
        refused.value.close()
    with urllib.request.urlopen(f"{address}/metrics") as answer:
        assert b'peerloom_members{status="alive"} 1.0' in answer.read()


def act(address: str, name: str, token: str) -> None:
    headers = {"content-type": "application/json", "x-peerloom-token": token}
    body = json.dumps({"run": "f" * 16}).encode()
    request = urllib.request.Request(f"{address}/api/actions/{name}", body, headers)
    urllib.request.urlopen(request).close()


def test_the_page_command_says_if_a_node_has_no_page(
    swarm: SwarmProcesses, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["page", "--data-dir", folder(swarm, "b")]) != 0
    assert "has no page" in capsys.readouterr().err


def test_events_are_listed_by_kind_and_age(swarm: SwarmProcesses, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["events", "--json", "--data-dir", folder(swarm, "a")]
    assert run([*arguments, "--kind", "memberjoined", "--since", "1h"]) == 0
    (joined,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert (joined["kind"], joined["name"]) == ("MemberJoined", "b")
    assert run([*arguments, "--since", "0s"]) == 0
    assert capsys.readouterr().out == ""
    assert run([*arguments, "--find", "no event holds this"]) == 0
    assert capsys.readouterr().out == ""
    assert run([*arguments, "--kind", "MemberJoind"]) == 2
    assert "did you mean 'MemberJoined'" in capsys.readouterr().err


def test_top_prints_one_screen_without_a_terminal(
    swarm: SwarmProcesses, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["top", "--data-dir", folder(swarm, "a")]) == 0
    text = capsys.readouterr().out
    assert "swarm watching: 1 alive" in text
    assert "b joined" not in text.splitlines()[0]


def test_a_report_contains_diagnostics_and_no_key(swarm: SwarmProcesses, tmp_path: Path) -> None:
    out = tmp_path / "report.zip"
    assert run(["report", "--out", str(out), "--data-dir", folder(swarm, "a")]) == 0
    with zipfile.ZipFile(out) as archive:
        held = {name: archive.read(name) for name in archive.namelist()}
    assert {"versions.json", "status.json", "peers.json", "events.jsonl"} <= set(held)
    assert json.loads(held["status.json"])["name"] == "a"
    assert b"MemberJoined" in held["events.jsonl"]
    everything = b"".join(held.values())
    for name in ("identity.key", "static.key"):
        key = (swarm.nodes["a"].data_dir / name).read_bytes()
        for form in (key, key.hex().encode(), base64.b64encode(key)):
            assert form not in everything
    assert b"token" not in everything


def test_a_node_outside_a_run_watches_it_to_the_end(
    swarm: SwarmProcesses, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["config", "set", "accept_runs", "never", "--data-dir", folder(swarm, "b")]) == 0
    file = tmp_path / "run.toml"
    file.write_text('model = "simple-cnn"\n[train]\nsteps = 60\n[plan]\nstages = 1\nreplicas = 1\n')
    assert run(["train", str(file), "--detach", "--json", "--data-dir", folder(swarm, "a")]) == 0
    asked = json.loads(capsys.readouterr().out.splitlines()[-1])["run"]
    assert run(["runs", "watch", asked, "--data-dir", folder(swarm, "b")]) == 0
    watched = capsys.readouterr()
    assert f"{asked}  simple-cnn on digits  " in watched.out
    assert "takes no part in the run" in watched.err
    assert f"{asked}  simple-cnn on digits  done  step 60 of 60" in watched.err


def test_a_report_can_be_made_without_a_running_node(tmp_path: Path) -> None:
    out = tmp_path / "report.zip"
    assert run(["report", "--out", str(out), "--data-dir", str(tmp_path)]) == 0
    with zipfile.ZipFile(out) as archive:
        assert "node.txt" in archive.namelist()
