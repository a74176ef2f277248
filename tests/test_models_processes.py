"""The HTTP API of models with real nodes: a transformers folder in two stages, requested at a third node."""

import http.client
import json
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from threading import Event
from typing import Any
from urllib.parse import urlsplit

import jsonschema
import pytest

from node.cli.client import ask
from node.demo.processes import SwarmProcesses
from node.main import run
from tests.test_serving_text_processes import answer_of, make_folder

NAMES = "abcd"
DOOR = "d"
SECONDS_MAX = 60.0
"""Seconds allowed on a machine that is three times slower than ours, and busy."""
TOKENS = 40
TURNS = [{"role": "system", "content": "You know Python."}, {"role": "user", "content": "What is été?"}]
CHAT: dict[str, Any] = {"model": "tiny", "messages": TURNS, "max_tokens": TOKENS, "temperature": 0}


class HttpClient:
    """A client of one node's server, with a key for it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = ask(folder, "page")["address"]
        self.key = ask(folder, "keys.new", {"name": "test"})["key"]

    def post(self, path: str, body: Mapping[str, Any]) -> http.client.HTTPConnection:
        """Return a connection on which a request has been sent."""
        connection = http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=SECONDS_MAX)
        headers = {"content-type": "application/json", "authorization": f"Bearer {self.key}"}
        connection.request("POST", path, json.dumps(body), headers)
        return connection

    def whole(self, path: str, body: Mapping[str, Any]) -> Any:
        with closing(self.post(path, body)) as connection:
            response = connection.getresponse()
            document = json.loads(response.read())
            assert response.status == 200, document
            return document

    def chat(self, body: Mapping[str, Any], *, at: int = -1, disturb: Callable[[], object] = bool) -> str:
        """Return the text of a streamed chat; `disturb` is called after `at` of its pieces."""
        pieces: list[str] = []
        with closing(self.post("/v1/chat/completions", {**body, "stream": True})) as connection:
            for line in connection.getresponse():
                if line.startswith(b"data: {"):
                    document = json.loads(line[6:])
                    assert "choices" in document, document
                    (choice,) = document["choices"]
                    pieces.append(choice["delta"].get("content") or "")
                    if len(pieces) == at:
                        disturb()
                elif line.startswith(b"data:"):
                    assert line.strip() == b"data: [DONE]"
        return "".join(pieces)

    def service(self) -> Any:
        (service,) = ask(self.folder, "services", seconds=SECONDS_MAX)["services"]
        return service

    def sessions(self) -> int:
        return sum(row["sessions"] for rows in self.service()["stages"] for row in rows)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[SwarmProcesses, Path, Any, Any]]:
    """Yield four nodes; the first has published a folder in two stages, the last holds no stage and serves
    the API."""
    folder = tmp_path_factory.mktemp("models")
    swarm = SwarmProcesses(folder / "nodes", "models", time.sleep, calibrate=False, with_page=DOOR)
    (folder / "nodes").mkdir()
    try:
        swarm.launch(NAMES)
        path = folder / "tiny"
        model, known = make_folder(path)
        first = swarm.start(NAMES[0], None)
        for name in NAMES[1:]:
            swarm.start(name, first.address, ["--observer"] if name == DOOR else [])
        until(lambda: all(swarm.status(name)["members_alive"] == len(NAMES) - 1 for name in NAMES))
        assert run(["serve", str(path), "--stages", "2", "--data-dir", str(folder / "nodes/a")]) == 0
        yield swarm, path, model, known
    finally:
        swarm.close()


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + SECONDS_MAX
    while not holds():
        assert time.monotonic() < end, "the condition did not hold in time"
        Event().wait(0.02)


@pytest.mark.slow
def test_a_node_without_a_stage_answers_like_transformers(
    served: tuple[SwarmProcesses, Path, Any, Any],
) -> None:
    swarm, _, model, known = served
    client = HttpClient(swarm.folder / DOOR)
    ids = known.apply_chat_template(TURNS, add_generation_prompt=True, return_dict=False)
    begins = known.decode(answer_of(model, ids, [0], TOKENS), skip_special_tokens=True)
    document = client.whole("/v1/chat/completions", CHAT)
    # In bfloat16, the answers are compared up to the first step at which rounding may decide.
    wanted = document["choices"][0]["message"]["content"]
    assert len(begins) > 5
    assert wanted.startswith(begins)
    assert document["usage"]["prompt_tokens"] == len(ids)
    assert client.chat(CHAT) == wanted
    asked = {"model": "tiny", "input": TURNS, "max_output_tokens": TOKENS, "temperature": 0, "store": False}
    assert client.whole("/v1/responses", asked)["output"][0]["content"][0]["text"] == wanted
    asked = {"model": "tiny", "system": TURNS[0]["content"], "messages": TURNS[1:], "max_tokens": TOKENS}
    assert client.whole("/v1/messages", asked | {"temperature": 0})["content"][0]["text"] == wanted
    if shutil.which("curl"):
        command = ["curl", "-sS", f"{client.url}/v1/chat/completions", "-H", f"x-api-key: {client.key}"]
        command += ["-H", "Content-Type: application/json", "-d", json.dumps(CHAT)]
        said = subprocess.run(command, capture_output=True, check=True, timeout=SECONDS_MAX).stdout
        assert json.loads(said)["choices"][0]["message"]["content"] == wanted
    # The client disconnects in mid-stream, and every stage forgets the session.
    connection = client.post("/v1/chat/completions", CHAT | {"max_tokens": 200, "stream": True})
    assert connection.getresponse().read(64)
    connection.close()
    until(lambda: not client.sessions())
    # Each token has its probability and bytes; the joined bytes are the text.
    told = client.whole("/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 3})
    rows = told["choices"][0]["logprobs"]["content"]
    assert bytes(byte for row in rows for byte in row["bytes"]).decode("utf-8", "replace") == wanted
    assert all(row["top_logprobs"][0]["logprob"] == row["logprob"] for row in rows)
    assert told["choices"][0]["message"]["content"] == wanted
    # A stage dies in mid-stream; both a free text and one constrained to a schema continue.
    long = CHAT | {"max_tokens": 150, "temperature": 1.0, "seed": 3}
    schema = {"type": "array", "items": {"enum": ["alpha", "beta", "été"]}, "minItems": 12, "maxItems": 14}
    # JSON without white space is requested, because an untrained model would fill all its tokens with white
    # space.
    grammar = """start: "[" item ("," item){11,13} "]"\nitem: "\\"alpha\\"" | "\\"beta\\"" | "\\"été\\"" """
    held = long | {"max_tokens": 200, "structured_outputs": {"grammar": grammar}}
    undisturbed = client.chat(long), client.chat(held)
    jsonschema.validate(json.loads(undisturbed[1]), schema)
    names = {node.peer: name for name, node in swarm.nodes.items()}
    holders = [names[row["peer"]] for rows in client.service()["stages"] for row in rows]
    assert DOOR not in holders
    with ThreadPoolExecutor(1) as threads:
        text = threads.submit(client.chat, long)
        found = client.chat(held, at=8, disturb=lambda: swarm.kill(holders[-1]))
        assert (text.result(SECONDS_MAX), found) == undisturbed
