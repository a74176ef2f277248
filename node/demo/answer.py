"""The end of a demo: a model split over two nodes answers, one of the nodes is killed, and the text
continues.

The model was trained by this software (`words/RUN.toml`) and knows some paragraphs of Python's documentation
by heart, byte by byte. Nothing is staged: the service is published, found and asked in the same way as by
`peerloom serve` and `generate`.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from node.cli.client import ask, request
from node.cli.render import seconds_text
from node.demo.processes import LOOK_SECONDS, SwarmProcesses
from node.demo.screen import DemoScreen
from node.errors import PeerloomError, RunFailed

WORDS = Path(__file__).with_name("words") / "words.peerloom"
SERVICE = "words"
PROMPT = "Deletion of a name"
TOKENS = 220
"""Length of the answer. The model's context is 256 bytes, including the prompt."""
KILL_AFTER = 60
"""Number of bytes of the answer after which a node is killed: in the middle of a sentence."""
SECONDS_MAX = 120.0
"""Time limit for a service to start, or for one token. Processes load torch, which takes long on a busy
machine."""
LINE = 6
_LABEL = "asking a model split over two nodes"


@dataclass
class Answered:
    """An answer: its text, the nodes that gave it, and the cost of the kill."""

    text: str = ""
    said_before: str = ""
    victim: str = ""
    moves: int = 0
    pause_seconds: float = 0.0
    first_seconds: float | None = None
    tokens_per_second: float | None = None
    is_same: bool = False
    nodes: list[str] = field(default_factory=list)

    def document(self) -> dict[str, Any]:
        """Return the answer as a value of `result.json`."""
        return {
            "prompt": PROMPT,
            "text": self.text,
            "said_before_kill": self.said_before,
            "nodes": self.nodes,
            "killed_name": self.victim,
            "moves": self.moves,
            "pause_seconds": round(self.pause_seconds, 3),
            "first_seconds": self.first_seconds,
            "tokens_per_second": self.tokens_per_second,
            "is_same": self.is_same,
        }

    def lines(self, width: int = 76) -> list[str]:
        """Return the answer as lines for a person, marking the position at which the node was killed."""
        from textwrap import wrap

        shown = f"{self.said_before}[{self.victim} is killed]{self.text[len(self.said_before) :]}"
        return wrap(" ".join(f"{PROMPT}{shown}".split()), width)


class SplitAnswer:
    """The part of a demo in which a split model answers. Raises PeerloomError, or Stopped."""

    def __init__(self, swarm: SwarmProcesses, screen: DemoScreen, pause: Callable[[float], None]) -> None:
        self._swarm = swarm
        self._screen = screen
        self._pause = pause
        self.found = Answered()

    def play(self, door: str) -> Answered:
        """Publish the service at node `door`, ask it there, and kill a different one of its nodes."""
        found, folder = self.found, self._swarm.nodes[door].data_dir
        self._screen.update(LINE, _LABEL, "loading its stages...")
        document = self._serve(folder)
        names = {node.peer: node.name for node in self._swarm.nodes.values()}
        found.nodes = [names[row["peer"]] for rows in document["stages"] for row in rows]
        victims = [name for name in found.nodes if name != door]
        if not victims:
            raise RunFailed("the model was not split over two nodes")
        self._ask(folder, victims[0])
        text, found.victim = found.text, victims[0]
        self._ask(folder, "")
        found.is_same, found.text = found.text == text, text
        if not found.moves or not found.is_same:
            raise RunFailed("the answer did not go on as it would have without the kill")
        pause = seconds_text(found.pause_seconds)
        told = f"{found.victim} killed in mid-sentence, the text went on after {pause}"
        self._screen.finish(LINE, _LABEL, told)
        return found

    def _serve(self, folder: Path) -> dict[str, Any]:
        """Publish the service. The call runs in a thread, so that Ctrl-C works meanwhile."""
        arguments = {"model": str(WORDS), "wish": {"name": SERVICE, "stages": 2}}
        outcome: SimpleQueue[dict[str, Any] | PeerloomError] = SimpleQueue()

        def serve() -> None:
            try:
                outcome.put(ask(folder, "serve", arguments, seconds=SECONDS_MAX))
            except PeerloomError as error:
                outcome.put(error)

        threading.Thread(target=serve, daemon=True).start()
        while outcome.empty():
            self._pause(LOOK_SECONDS)
        found = outcome.get()
        if isinstance(found, PeerloomError):
            raise found
        return found

    def _ask(self, folder: Path, victim: str) -> None:
        """Ask the service to continue the prompt. If `victim` is given, kill that node during the answer."""
        found = self.found
        question = {"prompt": PROMPT, "tokens_max": TOKENS, "temperature": 0.0, "stops": ["\n"]}
        arguments = {"service": SERVICE, "question": question}
        found.text, heard = "", time.monotonic()
        for reply in request(folder, "generate", arguments, seconds=SECONDS_MAX):
            self._pause(0.0)
            if victim and found.said_before:
                found.pause_seconds = max(found.pause_seconds, time.monotonic() - heard)
            heard = time.monotonic()
            found.text += reply.get("event", {}).get("piece", "")
            self._screen.update(LINE, _LABEL, f"{PROMPT}{found.text}"[-60:])
            if victim and not found.said_before and len(found.text) >= KILL_AFTER:
                found.said_before = found.text
                self._swarm.kill(victim)
            if victim and (result := reply.get("result")) is not None:
                found.moves = result["moves"]
                found.first_seconds = result["first_seconds"]
                found.tokens_per_second = result["tokens_per_second"]
