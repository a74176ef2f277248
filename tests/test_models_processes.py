"""The HTTP door of models with real nodes: three processes, two stages and a spare, and plain HTTP clients."""

import http.client
import json
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from threading import Event
from typing import Any
from urllib.parse import urlsplit

import pytest

from node.cli.client import ask
from node.demo.processes import SwarmProcesses
from partition.capture.models.model_spec import capture_built_in

NAMES = "abc"
SECONDS_MAX = 60.0
"""On a machine that is three times slower than ours, and busy."""
FREE_SECONDS_MAX = 0.1
"""Until every stage has forgotten an answer that its client has left."""
ASKED = {"model": "words", "prompt": "Once upon a time", "max_tokens": 60, "seed": 7}


class Door:
    """The HTTP door of one node, and a key for it."""

    def __init__(self, swarm: SwarmProcesses, name: str) -> None:
        self.folder = swarm.folder / name
        self.url = ask(self.folder, "page")["address"]
        self.key = ask(self.folder, "keys.new", {"name": "test"})["key"]

    def post(self, path: str, body: Mapping[str, Any]) -> tuple[http.client.HTTPConnection, Any]:
        """A connection, and the response that has begun on it."""
        connection = http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=SECONDS_MAX)
        headers = {"content-type": "application/json", "authorization": f"Bearer {self.key}"}
        connection.request("POST", path, json.dumps(body), headers)
        return connection, connection.getresponse()

    def whole(self, path: str, body: Mapping[str, Any]) -> Any:
        connection, response = self.post(path, body)
        with closing(connection):
            document = json.loads(response.read())
            assert response.status == 200, document
            return document

    def stream(self, body: Mapping[str, Any], *, at: int = -1, disturb: Callable[[], object] = bool) -> str:
        """The text of a stream; `disturb` is called after `at` of its events."""
        connection, response = self.post("/v1/completions", {**body, "stream": True})
        pieces: list[str] = []
        with closing(connection):
            for line in response:
                if line.startswith(b"data: {"):
                    pieces += [choice["text"] for choice in json.loads(line[6:])["choices"]]
                    if len(pieces) == at:
                        disturb()
                elif line.startswith(b"data:"):
                    assert line.strip() == b"data: [DONE]"
        return "".join(pieces)

    def sessions(self) -> int:
        (service,) = ask(self.folder, "services", seconds=SECONDS_MAX)["services"]
        return sum(row["sessions"] for rows in service["stages"] for row in rows)


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SwarmProcesses]:
    """Three nodes, of which the first has published a gpt of two stages; the last one has the page."""
    folder = tmp_path_factory.mktemp("models")
    processes = SwarmProcesses(folder, "models", time.sleep, calibrate=False, with_page=NAMES[0])
    try:
        processes.launch(NAMES)
        captured = capture_built_in("gpt", (1024,), 256, options={"layers": 2, "heads": 2, "width": 32})
        (folder / "words.peerloom").write_bytes(captured.data)
        first = processes.start(NAMES[0], None)
        for name in NAMES[1:]:
            processes.start(name, first.address)
        until(lambda: all(len(ask(folder / name, "peers")["peers"]) == 2 for name in NAMES))
        asked = {"model": str(folder / "words.peerloom"), "wish": {"stages": 2}}
        ask(folder / "a", "serve", asked, seconds=SECONDS_MAX)
        yield processes
    finally:
        processes.close()


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + SECONDS_MAX
    while not holds():
        assert time.monotonic() < end, "it did not come to that in time"
        Event().wait(0.1)


def test_a_stream_survives_sigkill_of_a_stages_node(swarm: SwarmProcesses) -> None:
    door = Door(swarm, "a")
    whole = door.whole("/v1/completions", ASKED)
    assert whole["usage"]["completion_tokens"] == 60
    text = whole["choices"][0]["text"]
    assert door.stream(ASKED) == text
    assert "\ufffd" not in json.dumps(door.whole("/v1/completions", {**ASKED, "logprobs": 2}), ensure_ascii=True)
    if shutil.which("curl"):
        command = ["curl", "-sS", f"{door.url}/v1/completions", "-H", f"Authorization: Bearer {door.key}"]
        command += ["-H", "Content-Type: application/json", "-d", json.dumps(ASKED)]
        said = subprocess.run(command, capture_output=True, check=True, timeout=SECONDS_MAX).stdout
        assert json.loads(said)["choices"][0]["text"] == text
    leave_in_mid_answer(door)
    names = {node.peer: name for name, node in swarm.nodes.items()}
    (service,) = ask(door.folder, "services", seconds=SECONDS_MAX)["services"]
    holders = [names[row["peer"]] for rows in service["stages"] for row in rows]
    victim = next(name for name in holders if name != "a")
    assert door.stream(ASKED, at=10, disturb=lambda: swarm.kill(victim)) == text


def leave_in_mid_answer(door: Door) -> None:
    """Hang up on an answer that streams, on one that does not, and on one whose prompt is being read."""
    until(lambda: not door.sessions())
    long = {**ASKED, "max_tokens": 900}
    for body in ({**long, "stream": True}, long, {**long, "prompt": "x" * 1000, "max_tokens": 8}):
        connection = http.client.HTTPConnection(urlsplit(door.url).netloc, timeout=SECONDS_MAX)
        headers = {"content-type": "application/json", "authorization": f"Bearer {door.key}"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        if body.get("stream"):
            assert connection.getresponse().read(64)
        until(lambda: door.sessions() > 0)
        connection.close()
        began = time.monotonic()
        until_free(door)
        print("free after", time.monotonic() - began)


def until_free(door: Door) -> None:
    end = time.monotonic() + SECONDS_MAX
    while door.sessions():
        assert time.monotonic() < end
