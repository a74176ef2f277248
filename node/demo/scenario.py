"""The scenario of a demo, line by line: start the nodes, train, kill a node, fetch the result.

Nothing is staged: the nodes are ordinary processes (`node.demo.processes`), asked over their control channels
like by `peerloom train`. This file only starts, watches and kills.
"""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from node.cli.client import GoneAway, ask, request
from node.cli.render import seconds_text
from node.cli.signals import StopFlag
from node.demo.capture_process import Capturing
from node.demo.processes import LOOK_SECONDS, SwarmProcesses
from node.demo.report import Event, Story, choose_victim
from node.demo.screen import DemoScreen, loss_text, pace_text
from node.demo.weights_file import check_weights
from node.errors import PeerloomError, RunFailed
from node.invocation import command_span, shown

NAMES = ("a", "b", "c", "d", "e")
PAGE_NODE = "d"
"""The node whose page shows the demo. The starter leaves, and the other nodes are more likely to be
killed."""
STARTER = "e"
"""The node that requests the run, and so is its trainer. The other four compute its stages."""
MODEL = "simple-cnn"
STEPS = 300
"""Number of steps of 128 samples: about 27 passes over the 1,437 digits."""
RUN_FILE = """\
# What `peerloom demo` trained. By hand: {train}
model = "{model}"
data = "digits"

[train]
steps = {steps}
batch = 128
microbatch = 16
optimizer = "adam"
learning_rate = 0.003
seed = 27

[plan]
stages = 2
replicas = 2
"""
"""The seed fixes the initial parameters, the order of samples and dropout. The order of sums is not fixed,
and the kill changes it. The seed is the best of three by accuracy, so the accuracy is slightly flattered."""
MEETING_SECONDS_MAX = 30.0
"""Time limit until every node knows every other; gossip takes a second."""
PLACING_SECONDS_MAX = 150.0
"""Time limit for the first step: four processes load torch, which takes long on a busy machine."""
STEP_SECONDS_MAX = 60.0
"""Seconds without a step after which the run counts as lost."""
_TICK_SECONDS = 0.1
_TRAINING = "training on digits"


def run_text(path: Path, steps: int) -> str:
    """Return the text of the RUN.toml that will be written to `path`."""
    train = shown(command_span("train", str(path)))
    return RUN_FILE.format(train=train, model=MODEL, steps=steps)


class Play:
    """One demo. Call the methods in order. Each raises PeerloomError, or Stopped."""

    def __init__(
        self,
        swarm: SwarmProcesses,
        capturing: Capturing,
        screen: DemoScreen,
        story: Story,
        stop: StopFlag,
    ) -> None:
        self._swarm = swarm
        self._screen = screen
        self._story = story
        self._stop = stop
        self._capturing = capturing
        self._inbox: SimpleQueue[Event | PeerloomError] = SimpleQueue()
        self._heard = time.monotonic()
        self._has_told_of_recovery = False

    def start_nodes(self) -> None:
        """Start five nodes; each joins through the previous one. Return once all know each other."""
        label, begun = f"starting {len(NAMES)} nodes on 127.0.0.1", time.monotonic()
        self._capturing.start()
        self._screen.update(1, label, "...")
        self._swarm.launch(NAMES)
        join = None
        for number, name in enumerate(NAMES, start=1):
            join = self._swarm.start(name, join).address
            self._screen.update(1, label, f"{' '.join(NAMES[:number])} ...")
        until = time.monotonic() + MEETING_SECONDS_MAX
        while any(self._swarm.status(name)["members_alive"] < len(NAMES) - 1 for name in NAMES):
            self._swarm.check()
            if time.monotonic() > until:
                raise PeerloomError(f"the nodes did not all meet within {MEETING_SECONDS_MAX:.0f} s")
            self._stop.pause(LOOK_SECONDS)
        took = seconds_text(time.monotonic() - begun)
        self._screen.finish(1, label, f"{' '.join(NAMES)} joined in {took}, each through another")
        if self.page:
            self._screen.link(self.page)

    @property
    def page(self) -> str:
        """Return the link to the page of this demo; empty if its node has no page, or has ended."""
        if self._story.victim is not None and self._story.victim.name == PAGE_NODE:
            return ""
        return self._swarm.page(PAGE_NODE) if self._swarm.status(PAGE_NODE).get("page") else ""

    def train(self) -> None:
        """Submit the run to the starter, follow it to its end, and kill a replica on the way."""
        self._screen.update(2, f"planning {MODEL}", "capturing the model...")
        arguments = self._capturing.wait(lambda: self._stop.pause(_TICK_SECONDS))
        # The run's own stream of events only begins at its placement, and has no membership events.
        self._listen("events", {}, lambda event: event["kind"] in ("RunPlanned", "MemberLost"))
        self._listen("train", arguments, lambda _: True)
        self._heard = time.monotonic()
        while self._story.ended is None:
            event = self._next_event()
            if event is not None:
                self._take(event)
            if self._story.is_time_to_kill:
                self._kill()
        if self._story.ended["outcome"] != "done":
            raise RunFailed(f"the run did not survive: {self._story.ended['detail']}")

    def fetch(self, out: Path) -> dict[str, Any]:
        """Fetch and check the weights from another node, after the starter has left. Return their path and
        figures."""
        story = self._story
        assert story.plan is not None
        assert story.ended is not None
        assert story.evaluated is not None
        accuracy = f"accuracy {story.evaluated['accuracy']:.3f} on {story.evaluated['samples']} unseen digits"
        self._screen.update(5, accuracy, "fetching weights...")
        self._swarm.leave(STARTER)
        gone = (STARTER, story.victim.name if story.victim is not None else "")
        holder = next(name for name in reversed(NAMES) if name not in gone)
        arguments = {"run": story.plan["run"], "out": str(out.absolute())}
        ask(self._swarm.nodes[holder].data_dir, "runs.fetch", arguments, seconds=None)
        values = _check(out, story.ended["weights"], self._capturing.graph)
        self._screen.finish(5, accuracy, f"weights fetched from node {holder}: {out}")
        return {
            "file": str(out),
            "size_bytes": out.stat().st_size,
            "values": values,
            "blake3": story.ended["weights"],
            "fetched_from": holder,
        }

    # Events

    def _listen(self, command: str, arguments: dict[str, Any], wanted: Callable[[Event], bool]) -> None:
        """Put the starter's events into the inbox, in a thread that ends with the starter."""
        folder = self._swarm.nodes[STARTER].data_dir

        def listen() -> None:
            try:
                for reply in request(folder, command, arguments):
                    if "event" in reply and wanted(reply["event"]):
                        self._inbox.put(reply["event"])
            except GoneAway:
                return  # the check of the node's process reports this better
            except PeerloomError as error:
                self._inbox.put(error)

        threading.Thread(target=listen, daemon=True).start()

    def _next_event(self) -> Event | None:
        """Return the next event, or None after a short time without one."""
        self._stop.pause()
        try:
            item = self._inbox.get(timeout=_TICK_SECONDS)
        except Empty:
            self._swarm.check()
            self._check_pace()
            return None
        if isinstance(item, PeerloomError):
            raise item
        self._heard = time.monotonic()
        return item

    def _take(self, event: Event) -> None:
        is_known = event["kind"] == "RunPlanned" and self._story.plan is not None
        self._story.take(event)
        if not is_known:
            self._tell(event)

    def _check_pace(self) -> None:
        done = len(self._story.committed)
        limit = STEP_SECONDS_MAX if done else PLACING_SECONDS_MAX
        if time.monotonic() - self._heard > limit:
            raise RunFailed(
                f"the run did not survive: no step for {limit:.0f} s, after {done} of {self._story.steps}",
                "repeat it with --keep to keep the nodes' output",
            )

    def _kill(self) -> None:
        assert self._story.plan is not None, "a step came before the plan"
        names = {node.peer: node.name for node in self._swarm.nodes.values()}
        victim = choose_victim(self._story.plan, names)
        if victim is None:
            raise RunFailed("the plan has no replica that could be spared")
        self._story.killed(victim, self._swarm.kill(victim.name))
        self._screen.finish(3, _TRAINING, f"{self._loss()} after {len(self._story.committed)} steps")
        self._screen.update(4, f"killing node {victim.name} on purpose", "...")

    # Output

    def _tell(self, event: Event) -> None:
        if event["kind"] == "RunPlanned":
            replicas = min(len(peers) for peers in event["stages"])
            shape = f"{len(event['stages'])} stages x {replicas} replicas, 1 trainer"
            self._screen.finish(2, f"planning {MODEL}", shape)
            self._screen.update(3, _TRAINING, "each stage loads torch...")
        elif event["kind"] == "StepCommitted":
            self._tell_of_step()
        self._tell_of_recovery()

    def _tell_of_step(self) -> None:
        done, steps = len(self._story.committed), self._story.steps
        if done < steps:
            pace = pace_text(done, steps, self._story.train_seconds)
            self._screen.update(3, _TRAINING, f"{self._loss()}   {pace}")
        else:
            self._screen.update(3, _TRAINING, self._loss())
            self._screen.also("", f"{self._loss()} after {done} steps")

    def _tell_of_recovery(self) -> None:
        story = self._story
        if self._has_told_of_recovery or not story.has_recovered or story.detected_seconds is None:
            return
        self._has_told_of_recovery = True
        assert story.victim is not None
        assert story.dropped is not None
        count = story.dropped["microbatches_replayed"]
        replayed = f"{count} microbatch{'es' if count != 1 else ''} replayed"
        noticed = f"noticed in {seconds_text(story.detected_seconds)}"
        label = f"killing node {story.victim.name} on purpose"
        self._screen.finish(4, label, f"{noticed}, {replayed}, loss goes on")

    def _loss(self) -> str:
        losses = self._story.losses
        return loss_text(losses[0], losses[-1], done=len(losses), steps=self._story.steps)


def _check(path: Path, digest: str, graph: Path) -> int:
    """Return the number of values in the weights. Raises RunFailed if some are missing, or the hash is not
    the run's final hash."""
    from blake3 import blake3

    from partition.model.graph import decode_graph
    from partition.model.sizes import shape_of

    if blake3(path.read_bytes()).hexdigest() != digest:
        raise RunFailed(f"{path} is not the run's result: its hash differs")
    parameters = decode_graph(graph.read_bytes()).parameters
    return check_weights(path, {name: shape_of(row.type, ()) for row in parameters for name in row.names})
