"""The public surface in blocking form. Generated from `node/api/surface.py`: do not edit.

Write it anew with `python -m node.library.generate`.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from node import state as views
from node.api.handles import RunHandle, RunResult
from node.api.surface import Surface
from node.averaging.once import Averaged
from node.content.directory import Directory, Entry, FoundNode, StoredEntry
from node.events import Event, JoinTried
from node.history import EventHistory
from node.planning.report import PlanReport
from node.portal import Portal
from node.services.broadcasts import Broadcast
from partition.codecs.base import Array
from partition.model.graph import Graph


class BlockingRunHandle:
    """What `RunHandle` offers, for any other thread. Each call may raise PortalClosed."""

    def __init__(self, portal: Portal[Any], of: RunHandle) -> None:
        self._portal = portal
        self._of = of

    def __repr__(self) -> str:
        return self._portal.call_sync(lambda: repr(self._of))

    @property
    def id(self) -> str:
        """The run's id: 16 hexadecimal digits."""
        return self._portal.call_sync(lambda: self._of.id)

    @property
    def status(self) -> str:
        """The run's state as this node knows it; "unknown" where it is no member: `show` asks those."""
        return self._portal.call_sync(lambda: self._of.status)

    @property
    def metrics(self) -> tuple[dict[str, Any], ...]:
        """What was measured, a row a step, by name: loss, seconds, accuracy, the model's own metrics, and the
        joules of this machine where its hardware counts them.
        """
        return self._portal.call_sync(lambda: self._of.metrics)

    def show(self) -> dict[str, Any]:
        """Return how the run is, as this node knows it or else as its members say.

        Raises RunFailed: no member that was asked knows it.
        """
        return self._portal.run(self._of.show)

    def events(self) -> Iterator[Event]:
        """Yield what happens to the run from now on, to its end; it ends at once where the run is over.

        Raises RunFailed: this node is no member of the run, so it hears nothing: `show` asks those.
        """
        return self._portal.iterate(self._of.events)

    def stop(self) -> dict[str, Any]:
        """End the run for all its members. Raises UsageError: another node asked for it."""
        return self._portal.run(self._of.stop)

    def pause(self) -> dict[str, Any]:
        """Have all members wait after this step, with a checkpoint. Raises UsageError, as `stop`."""
        return self._portal.run(self._of.pause)

    def resume(self) -> dict[str, Any]:
        """Let a paused run go on. Raises UsageError, as `stop`."""
        return self._portal.run(self._of.resume)

    def revise(
        self,
        learning_rate: float | None = None,
        steps: int | None = None,
        priority: int | None = None,
        goal: float | None = None,
        goal_seconds: int | None = None,
    ) -> dict[str, Any]:
        """Change the run from its next step on, on all members alike; None leaves as it is.

        `goal` is the samples a second over `goal_seconds` below which this node raises an alert; 0 for none.

        Raises UsageError: a number out of bounds, or another node asked for the run.
        """
        return self._portal.run(self._of.revise, learning_rate, steps, priority, goal, goal_seconds)

    def result(self, out: str = "") -> RunResult:
        """Wait for the end of the run; put its weights (safetensors) into the file `out`, if one is named.

        Raises RunFailed: it failed or was stopped, or nobody knows it.
        """
        return self._portal.run(self._of.result, out)

    def watch(self, show: Callable[[str], None] | None = None) -> RunResult:
        """Show one line that follows the run to its end, and return its result.

        `show` takes each text, by default a line of the terminal or notebook that is written anew. Raises
        RunFailed, as `result`.
        """
        return self._portal.run(self._of.watch, show)

    def __iter__(self) -> Iterator[Event]:
        return self.events()


class BlockingDirectory:
    """What `Directory` offers, for any other thread. Each call may raise PortalClosed."""

    def __init__(self, portal: Portal[Any], of: Directory) -> None:
        self._portal = portal
        self._of = of

    def put(self, key: str, value: bytes, ttl_seconds: float = 3600.0, subkey: str = "") -> StoredEntry:
        """Store this node's value under a key. Nobody finds it after `ttl_seconds`; until then its holders
        keep it alive, and this node while it runs.

        With a `subkey` it stands beside this node's values of other sub-keys; without one it replaces them.

        Raises:
            NotStored: fewer nodes keep it than others may rely on.
            UsageError: a key, value or time out of bounds.
        """
        return self._portal.run(self._of.put, key, value, ttl_seconds, subkey)

    def put_immutable(self, value: bytes, ttl_seconds: float = 3600.0) -> StoredEntry:
        """Store a value under the hash of itself, which whoever finds it can check; nobody can change it.

        Raises NotStored or UsageError, as `put`; it has at most 900 bytes.
        """
        return self._portal.run(self._of.put_immutable, value, ttl_seconds)

    def get(self, key: str, publisher: str = "", subkey: str = "") -> bytes | None:
        """Return the newest value under a key and sub-key, of this publisher if one is named; None where
        there is none.

        Raises UsageError: a malformed publisher; PeerloomError: the value is a blob that nobody handed over.
        """
        return self._portal.run(self._of.get, key, publisher, subkey)

    def get_all(self, key: str) -> list[Entry]:
        """Return every node's values under a key, by publisher. A value of more than a record is its name."""
        return self._portal.run(self._of.get_all, key)

    def read_all(self, key: str, bytes_max: int) -> list[bytes]:
        """Return the values of all nodes under a key that can be had. Those of more than `bytes_max` are not
        fetched, and values under sub-keys are left out.
        """
        return self._portal.run(self._of.read_all, key, bytes_max)

    def get_immutable(self, key: str) -> bytes | None:
        """Return an immutable value by its key in hexadecimal, None where nobody has it."""
        return self._portal.run(self._of.get_immutable, key)

    def provide(self, name: str) -> StoredEntry:
        """Say that this node has the content with this hash (hexadecimal), while it runs.

        Raises NotStored.
        """
        return self._portal.run(self._of.provide, name)

    def providers(self, name: str) -> tuple[str, ...]:
        """Return the peers that say they have the content with this hash (hexadecimal)."""
        return self._portal.run(self._of.providers, name)

    def find(
        self,
        device: str = "",
        memory_bytes: float = 0,
        near: str = "",
        count: int = 20,
        needs_slot: bool = False,
        flops_per_second: float = 0.0,
    ) -> tuple[FoundNode, ...]:
        """Search the whole swarm for nodes with at least so much memory and measured speed, the nearest
        first; all of them answered.

        Raises UsageError: a device that no node advertises, or a number out of bounds.
        """
        return self._portal.run(
            self._of.find, device, memory_bytes, near, count, needs_slot, flops_per_second
        )

    def stat(self, key: str = "") -> dict[str, object]:
        """Return this node's part of the DHT, or how many nodes hold what is under a key."""
        return self._portal.run(self._of.stat, key)


class BlockingSurface:
    """What `Surface` offers, for any other thread. Each call may raise PortalClosed."""

    def __init__(self, portal: Portal[Any], of: Surface) -> None:
        self._portal = portal
        self._of = of

    @property
    def state(self) -> views.State:
        """What this node knows, as any screen may show it."""
        return self._portal.call_sync(lambda: self._of.state)

    @property
    def history(self) -> EventHistory:
        """The newest events, numbered."""
        return self._portal.call_sync(lambda: self._of.history)

    @property
    def id(self) -> str:
        """This node's peer id, as text: `12D3KooW...`."""
        return self._portal.call_sync(lambda: self._of.id)

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where other nodes reach this one, as `host:port`: what `join=[...]` takes."""
        return self._portal.call_sync(lambda: self._of.addresses)

    @property
    def dht(self) -> BlockingDirectory:
        """The record table of the swarm: put, get, provide, find."""
        return BlockingDirectory(self._portal, self._portal.call_sync(lambda: self._of.dht))

    def provide(self, name: str) -> StoredEntry:
        """Say that this node has the content with this hash (hexadecimal), while it runs.

        Raises NotStored.
        """
        return self._portal.run(self._of.provide, name)

    def providers(self, name: str) -> tuple[str, ...]:
        """Return the peers that say they have the content with this hash (hexadecimal)."""
        return self._portal.run(self._of.providers, name)

    def broadcast(self, topic: str, data: bytes) -> None:
        """Tell all members `data` (512 bytes at most), in place of what this node told under `topic` before.

        It reaches those that are members now, soon and most often, without a promise. What is told too fast
        waits, and only the newest of a topic goes out. With neighbourhoods it stays in that of this node.
        Raises UsageError: a topic (64 bytes) or data too long, or too many topics at once.
        """
        self._portal.call_sync(self._of.broadcast, topic, data)

    def broadcasts(self, topic: str = "") -> Iterator[Broadcast]:
        """Yield what other members tell from now on, under this topic (empty: all), until the node leaves."""
        return self._portal.iterate(self._of.broadcasts, topic)

    def members(self) -> tuple[views.MemberView, ...]:
        """Return the other members believed alive, by peer id."""
        return self._portal.call_sync(self._of.members)

    def status(self) -> dict[str, Any]:
        """Return what `peerloom status --json` prints, schema `peerloom/status/1`."""
        return self._portal.call_sync(self._of.status)

    def join(self, addresses: Sequence[str] | str) -> tuple[JoinTried, ...]:
        """Dial these addresses now; return what became of each, in their order.

        They are tried again whenever this node is alone. Raises UsageError: an address cannot be read.
        """
        return self._portal.run(self._of.join, addresses)

    def wait_for_members(self, count: int, timeout_seconds: float = 60.0) -> None:
        """Return once `count` other members are alive. Raises JoinTimeout when they are not in time."""
        self._portal.run(self._of.wait_for_members, count, timeout_seconds)

    def events(self, since: float = math.inf, types: Sequence[type[Event]] = ()) -> Iterator[Event]:
        """Yield events of these types (none: all), in their order, until the node leaves.

        `since` (unix seconds) begins with kept ones that happened then or later, by default with new ones.
        """
        return self._portal.iterate(self._of.events, since, types)

    def average(
        self,
        tensors: Mapping[str, Any],
        group: str,
        weight: float = 1.0,
        peers: int = 1,
        timeout_seconds: float = 60.0,
        codec: str = "float32",
        aggregate: str = "auto",
        admit: str = "open",
        invitation: str = "",
    ) -> Averaged:
        """Average arrays or torch tensors with those who call this for the same `group`, names and shapes.

        By `aggregate` "mean" one liar moves the result anywhere; by the others some peers may lie
        (docs/averaging.md, "Rules"). "auto" is one of those, "nnm-trimmed-mean", in a swarm without a key,
        and the mean in one with it. A group has one rule. `admit` and `invitation` say who takes part, as for
        `optimizer` (docs/averaging.md, "Who takes part").

        It waits until `peers` others take part, and `timeout_seconds` for a round. The tensors are not
        changed. Returns what was averaged and whose tensors entered; where nothing was, the same tensors and
        the reason. Raises UsageError: what is given cannot be averaged.
        """
        return self._portal.run(
            self._of.average,
            tensors,
            group,
            weight,
            peers,
            timeout_seconds,
            codec,
            aggregate,
            admit,
            invitation,
        )

    def invite(self, run: str, peer: str, hours: float = 168.0, admit: str = "") -> str:
        """Return the text by which a peer may take part in an averaging run of this name, for so many hours.

        It is for `invitation=` of that peer alone. The run is this node's own, or one of `admit="vouched"`
        that it takes part in. `admit` is "invited" or "vouched", for a run that is not open here yet. Raises
        UsageError: this node may not invite, or no such peer.
        """
        return self._portal.run(self._of.invite, run, peer, hours, admit)

    def revoke(self, run: str, peer: str) -> int:
        """Revoke what lets a peer take part in a run of this node's own; return how many members were told.

        `run` is the id of a run in local mode, or the name of an averaging run. The peer is out with the next
        round, and so are those that take part by its word. Raises UsageError: the run is another's.
        """
        return self._portal.run(self._of.revoke, run, peer)

    def train(
        self,
        model: object,
        data: str = "",
        wait_seconds: float = 0.0,
        **settings: Any,
    ) -> BlockingRunHandle:
        """Have the swarm train a model; return the run once every part of it is placed.

        `model` is a RUN.toml, a built-in name, a captured FILE.peerloom, PATH.py:FUNCTION or a
        `partition.capture.Task`; `data` and the settings are as in RUN.toml (`steps=200`, `stages=2`,
        `learning_rate=0.001`), and count above the file's. It waits `wait_seconds` for peers that it lacks.
        Raises UsageError: a wrong setting, model or data; RunFailed: it could not be placed.
        """
        return BlockingRunHandle(
            self._portal, self._portal.run(partial(self._of.train, **settings), model, data, wait_seconds)
        )

    def run(self, run: str) -> BlockingRunHandle:
        """Return a run by its id, or how that begins; by its whole id also one that is not known here.

        Raises UsageError: there is no such run.
        """
        return BlockingRunHandle(self._portal, self._portal.call_sync(self._of.run, run))

    def run_documents(self) -> tuple[dict[str, Any], ...]:
        """Return what `peerloom runs --json` prints of each run that this node knows."""
        return self._portal.call_sync(self._of.run_documents)

    def serve(
        self,
        model: str,
        name: str = "",
        stages: int = 0,
        replicas: int = 1,
        context: int = 0,
        tokenizer: str = "",
    ) -> dict[str, Any]:
        """Serve a FILE.peerloom that was captured to be served; return the service once it answers.

        It is called `name`, by default as the file is. A model that fits one peer is not split unless
        `stages` say so. Its members keep it at `replicas` of each stage, whoever of them dies. `context` is
        how many tokens a session takes at most. Before, a process computes a few short sessions, to see
        that they give the model's logits. `tokenizer` is the model's folder, or a tokenizer.json, by which it
        takes and gives text. Raises UsageError: it cannot be served; RunFailed: no place.
        """
        return self._portal.run(self._of.serve, model, name, stages, replicas, context, tokenizer)

    def services(self) -> tuple[dict[str, Any], ...]:
        """Return the services of this swarm that answer now, as `peerloom services --json` prints them."""
        return self._portal.run(self._of.services)

    def generate(
        self,
        service: str,
        prompt: str | Sequence[int] | Sequence[Mapping[str, str]],
        tokens_max: int = 256,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        seed: int | None = None,
        stops: Sequence[str] = (),
        exact: bool = False,
    ) -> Iterator[str | int]:
        """Yield what a service writes behind a prompt as it comes: text, or tokens where tokens are given.

        A prompt may also be a chat: messages, each with `role` and `content`, by the model's own template.
        `temperature` 0 takes the likeliest token each time; above it the same `seed` draws the same. What is
        None is as the model's folder says; without one it is the likeliest. The answer goes on when a peer of
        the service dies; with `exact` only where it stays what it would have been. Whoever holds a stage can
        read prompt and answer. Raises UsageError: no such service, or a wrong setting; RunFailed: the answer
        cannot go on.
        """
        return self._portal.iterate(
            self._of.generate,
            service,
            prompt,
            tokens_max,
            temperature,
            top_k,
            top_p,
            min_p,
            seed,
            stops,
            exact,
        )

    def hidden(self, service: str, prompt: str | Sequence[int] | Sequence[Mapping[str, str]]) -> Array:
        """Return a service's final hidden states of a prompt, an array [tokens, width].

        They are what the model's head makes logits of, behind its last norm: the last of the `hidden_states`
        of transformers; float64 where the model is, else float32. Prompts are those of `generate`, and when
        a peer of the service dies, the prompt is read again elsewhere. Raises UsageError: no such service, or
        a model without such a head; RunFailed: it cannot answer.
        """
        return self._portal.run(self._of.hidden, service, prompt)

    def plan(
        self,
        model: Graph | str,
        batch: int = 64,
        objective: str = "throughput",
        microbatch: int = 0,
        optimizer: str = "adam",
        stages: int = 0,
        replicas: int = 0,
        pipeline: str = "1f1b",
        what_if: str | Sequence[str] = (),
        place: str = "",
        replicas_min: int = 1,
        together: Sequence[Sequence[str]] = (),
        keep_tied: bool = False,
        devices: Sequence[str] = (),
        goal: float = 0.0,
    ) -> PlanReport:
        """Plan a model over this node and its living members; nothing is started.

        `model` is a graph, a captured FILE.peerloom, a built-in name, PATH.py:FUNCTION or a Hugging Face
        folder; the rest is as for `node.plan`, which gives the same for the same peers. Raises RunFailed:
        nothing fits, with what to do; UsageError.
        """
        return self._portal.run(
            self._of.plan,
            model,
            batch,
            objective,
            microbatch,
            optimizer,
            stages,
            replicas,
            pipeline,
            what_if,
            place,
            replicas_min,
            together,
            keep_tied,
            devices,
            goal,
        )
