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
from node.averaging.once import AveragingResult
from node.content.directory import Directory, DirectoryEntry, FoundNode, StoredEntry
from node.events import Event, JoinTried
from node.history import EventHistory
from node.planning.report import PlanReport
from node.portal import Portal
from node.services.broadcasts import Broadcast
from partition.codecs.base import Array
from partition.model.graph import Graph


class BlockingRunHandle:
    """The interface of `RunHandle` for other threads. Each call may raise PortalClosed."""

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
        """The run's state as this node knows it; "unknown" if this node is not a member. Use `show` to ask
        the members.
        """
        return self._portal.call_sync(lambda: self._of.status)

    @property
    def metrics(self) -> tuple[dict[str, Any], ...]:
        """The measurements, one row for each step, by name: loss, seconds, accuracy, the model's own metrics,
        and the joules of this machine if its hardware counts them.
        """
        return self._portal.call_sync(lambda: self._of.metrics)

    def show(self) -> dict[str, Any]:
        """Return the run's state, as this node knows it or else as its members report it.

        Raises RunFailed if no member that was asked knows the run.
        """
        return self._portal.run(self._of.show)

    def events(self) -> Iterator[Event]:
        """Yield the run's events from now on, until it ends. If the run is already over, yield none.

        Raises RunFailed if this node is not a member of the run, because then it gets no events; `show` asks
        the members.
        """
        return self._portal.iterate(self._of.events)

    def stop(self) -> dict[str, Any]:
        """End the run for all its members. Raises UsageError if a different node requested it."""
        return self._portal.run(self._of.stop)

    def pause(self) -> dict[str, Any]:
        """Make all members wait after this step, with a checkpoint. Raises UsageError, as in `stop`."""
        return self._portal.run(self._of.pause)

    def resume(self) -> dict[str, Any]:
        """Let a paused run continue. Raises UsageError, as in `stop`."""
        return self._portal.run(self._of.resume)

    def revise(
        self,
        learning_rate: float | None = None,
        steps: int | None = None,
        priority: int | None = None,
        goal: float | None = None,
        goal_seconds: int | None = None,
    ) -> dict[str, Any]:
        """Change the run from its next step on, on all members alike. None keeps a value.

        `goal` is a rate in samples a second; this node raises an alert if the run is slower over
        `goal_seconds`. 0 means no goal.

        Raises UsageError if a number is out of bounds, or a different node requested the run.
        """
        return self._portal.run(self._of.revise, learning_rate, steps, priority, goal, goal_seconds)

    def result(self, out: str = "") -> RunResult:
        """Wait for the end of the run. If `out` names a file, write the run's weights to it (safetensors).

        Raises RunFailed if the run failed or was stopped, or nobody knows it.
        """
        return self._portal.run(self._of.result, out)

    def watch(self, show: Callable[[str], None] | None = None) -> RunResult:
        """Show one line that follows the run until it ends, and return the run's result.

        `show` is called with each text; by default the line is rewritten in the terminal or notebook. Raises
        RunFailed, as in `result`.
        """
        return self._portal.run(self._of.watch, show)

    def __iter__(self) -> Iterator[Event]:
        return self.events()


class BlockingDirectory:
    """The interface of `Directory` for other threads. Each call may raise PortalClosed."""

    def __init__(self, portal: Portal[Any], of: Directory) -> None:
        self._portal = portal
        self._of = of

    def put(self, key: str, value: bytes, ttl_seconds: float = 3600.0, subkey: str = "") -> StoredEntry:
        """Store this node's value under a key. It expires after `ttl_seconds`. Until then its holders keep it
        alive, and so does this node while it runs.

        With a `subkey`, the value is stored in addition to this node's values under other sub-keys. Without
        one, it replaces them.

        Raises:
            NotStored: too few nodes keep it for others to rely on it.
            UsageError: a key, value or time is out of bounds.
        """
        return self._portal.run(self._of.put, key, value, ttl_seconds, subkey)

    def put_immutable(self, value: bytes, ttl_seconds: float = 3600.0) -> StoredEntry:
        """Store a value of at most 900 bytes under its own hash. Every reader can verify the value, and
        nobody can change it.

        Raises NotStored or UsageError, like `put`.
        """
        return self._portal.run(self._of.put_immutable, value, ttl_seconds)

    def get(self, key: str, publisher: str = "", subkey: str = "") -> bytes | None:
        """Return the newest value under a key and sub-key, or None if there is none. If `publisher` is given,
        only its value counts.

        Raises UsageError if the publisher is malformed; PeerloomError if the value is a blob that no peer
        delivers.
        """
        return self._portal.run(self._of.get, key, publisher, subkey)

    def get_all(self, key: str) -> list[DirectoryEntry]:
        """Return every node's values under a key, by publisher. For a value too large for a record, return
        its hash and length.
        """
        return self._portal.run(self._of.get_all, key)

    def read_all(self, key: str, bytes_max: int) -> list[bytes]:
        """Return the available values of all nodes under a key. Values of more than `bytes_max` bytes are not
        fetched, and values under sub-keys are left out.
        """
        return self._portal.run(self._of.read_all, key, bytes_max)

    def get_immutable(self, key: str) -> bytes | None:
        """Return an immutable value by its key in hexadecimal, or None if no peer has it."""
        return self._portal.run(self._of.get_immutable, key)

    def provide(self, name: str) -> StoredEntry:
        """Announce, while this node runs, that it has the content with this hash (hexadecimal).

        Raises NotStored.
        """
        return self._portal.run(self._of.provide, name)

    def providers(self, name: str) -> tuple[str, ...]:
        """Return the peers that announce the content with this hash (hexadecimal)."""
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
        """Search the whole swarm for nodes with at least this memory and measured speed. Return those that
        answer, the nearest first.

        Raises UsageError for a device that no node advertises, or a number out of bounds.
        """
        return self._portal.run(
            self._of.find, device, memory_bytes, near, count, needs_slot, flops_per_second
        )

    def stat(self, key: str = "") -> dict[str, object]:
        """Return statistics of this node's DHT or, for a key, how many nodes hold it."""
        return self._portal.run(self._of.stat, key)


class BlockingSurface:
    """The interface of `Surface` for other threads. Each call may raise PortalClosed."""

    def __init__(self, portal: Portal[Any], of: Surface) -> None:
        self._portal = portal
        self._of = of

    @property
    def state(self) -> views.State:
        """The state of this node, as any screen may show it."""
        return self._portal.call_sync(lambda: self._of.state)

    @property
    def history(self) -> EventHistory:
        """The newest events, with their numbers."""
        return self._portal.call_sync(lambda: self._of.history)

    @property
    def id(self) -> str:
        """This node's peer id, as text: `12D3KooW...`."""
        return self._portal.call_sync(lambda: self._of.id)

    @property
    def addresses(self) -> tuple[str, ...]:
        """The addresses at which other nodes reach this one, as `host:port`, for `join=[...]`."""
        return self._portal.call_sync(lambda: self._of.addresses)

    @property
    def dht(self) -> BlockingDirectory:
        """The record table of the swarm: put, get, provide, find."""
        return BlockingDirectory(self._portal, self._portal.call_sync(lambda: self._of.dht))

    def provide(self, name: str) -> StoredEntry:
        """Announce, while this node runs, that it has the content with this hash (hexadecimal).

        Raises NotStored.
        """
        return self._portal.run(self._of.provide, name)

    def providers(self, name: str) -> tuple[str, ...]:
        """Return the peers that announce that they have the content with this hash (hexadecimal)."""
        return self._portal.run(self._of.providers, name)

    def broadcast(self, topic: str, data: bytes) -> None:
        """Send `data` (at most 512 bytes) to all members. It replaces this node's earlier data under `topic`.

        It usually reaches the present members soon, but there is no guarantee. If calls come too fast, they
        wait, and only the newest data of a topic is sent. In a swarm with neighbourhoods it stays in this
        node's neighbourhood. Raises UsageError if a topic (64 bytes) or data is too long, or too many topics
        wait.
        """
        self._portal.call_sync(self._of.broadcast, topic, data)

    def broadcasts(self, topic: str = "") -> Iterator[Broadcast]:
        """Yield broadcasts of other members under this topic (empty: all topics) from now on, until the node
        leaves.
        """
        return self._portal.iterate(self._of.broadcasts, topic)

    def members(self) -> tuple[views.MemberView, ...]:
        """Return the other members that are believed alive, sorted by peer id."""
        return self._portal.call_sync(self._of.members)

    def status(self) -> dict[str, Any]:
        """Return the document of `peerloom status --json`, schema `peerloom/status/1`."""
        return self._portal.call_sync(self._of.status)

    def join(self, addresses: Sequence[str] | str) -> tuple[JoinTried, ...]:
        """Dial these addresses now; return the outcome of each, in order.

        They are tried again whenever this node is alone. Raises UsageError if an address is malformed.
        """
        return self._portal.run(self._of.join, addresses)

    def wait_for_members(self, count: int, timeout_seconds: float = 60.0) -> None:
        """Return once `count` other members are alive. Raises JoinTimeout after `timeout_seconds`."""
        self._portal.run(self._of.wait_for_members, count, timeout_seconds)

    def events(self, since: float = math.inf, types: Sequence[type[Event]] = ()) -> Iterator[Event]:
        """Yield events of these types (none given: all types), in order, until the node leaves.

        With `since` (Unix seconds), events that were kept since then come first. By default only new events
        are yielded.
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
    ) -> AveragingResult:
        """Average arrays or torch tensors with peers that call this with the same `group`, names and shapes.

        With `aggregate` "mean", a single liar can move the result anywhere; the other rules tolerate some
        liars (docs/averaging.md, "Rules"). "auto" means "nnm-trimmed-mean", one of the latter, in a swarm
        without a key, and the mean in a swarm with one. All members of a group use one rule. `admit` and
        `invitation` decide who takes part, as for `optimizer` (docs/averaging.md, "Who takes part").

        This waits until `peers` others take part, and for `timeout_seconds` for a round. The tensors are not
        changed. It returns the averages and the peers whose tensors were included. If nothing was averaged,
        it returns the same tensors and the reason. Raises UsageError if the tensors cannot be averaged.
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
        """Return an invitation: a text that admits a peer to the averaging run with this name for `hours`.

        Only that peer can use it, as its `invitation=`. The run must be this node's own, or one with
        `admit="vouched"` in which this node takes part. `admit` is "invited" or "vouched", and is needed for
        a run that is not open on this node yet. Raises UsageError if this node may not invite, or there is no
        such peer.
        """
        return self._portal.run(self._of.invite, run, peer, hours, admit)

    def revoke(self, run: str, peer: str) -> int:
        """Revoke a peer's admission to one of this node's runs; return how many members were informed.

        `run` is the id of a run in local mode, or the name of an averaging run. From the next round on the
        peer is excluded, and so are peers for which it vouched. Raises UsageError if the run belongs to a
        different node.
        """
        return self._portal.run(self._of.revoke, run, peer)

    def train(
        self,
        model: object,
        data: str = "",
        wait_seconds: float = 0.0,
        **settings: Any,
    ) -> BlockingRunHandle:
        """Have the swarm train a model; return the run once all its parts are placed.

        `model` is a RUN.toml, a built-in name, a captured FILE.peerloom, PATH.py:FUNCTION or a
        `partition.capture.Task`. `data` and the settings are as in RUN.toml (`steps=200`, `stages=2`,
        `learning_rate=0.001`), and override the values in that file. This waits `wait_seconds` for missing
        peers. Raises UsageError if a setting, the model or the data is wrong, and RunFailed if the run could
        not be placed.
        """
        return BlockingRunHandle(
            self._portal, self._portal.run(partial(self._of.train, **settings), model, data, wait_seconds)
        )

    def run(self, run: str) -> BlockingRunHandle:
        """Return a run by its id or a prefix of it. A run that is unknown here needs its whole id.

        Raises UsageError if there is no such run.
        """
        return BlockingRunHandle(self._portal, self._portal.call_sync(self._of.run, run))

    def run_documents(self) -> tuple[dict[str, Any], ...]:
        """Return the documents of all runs that this node knows, as in `peerloom runs --json`."""
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
        """Serve a FILE.peerloom that was captured for serving; return the service once it answers.

        The service has the name `name`, by default the file's. A model that fits one peer is not split unless
        `stages` says so. Members keep `replicas` of each stage even when members die. `context` is the
        maximum number of tokens in a session. First a process checks in a few short sessions that the stages
        give the model's logits. `tokenizer` is the model's folder, or a tokenizer.json, and is needed for
        text. Raises UsageError if the model cannot be served, and RunFailed if no peer has room for it.
        """
        return self._portal.run(self._of.serve, model, name, stages, replicas, context, tokenizer)

    def services(self) -> tuple[dict[str, Any], ...]:
        """Return the services of this swarm that answer now, as in `peerloom services --json`."""
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
        """Yield a service's answer to a prompt as it arrives: text, or tokens if the prompt is tokens.

        A prompt may also be a chat: messages, each with `role` and `content`, for which the model's own
        template is used. `temperature` 0 takes the likeliest token each time; above 0, the same `seed` draws
        the same tokens. Settings that are None come from the model's folder; if it has none, the likeliest
        token is taken. The answer continues when a peer of the service dies; with `exact`, only if the answer
        stays the same. The peers that hold stages can read the prompt and the answer. Raises UsageError if
        there is no such service or a setting is wrong, and RunFailed if the answer cannot continue.
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
        """Return a service's final hidden states for a prompt, an array [tokens, width].

        They are the input of the model's head, after its last norm: the last of the `hidden_states` of
        transformers. The type is float64 for a float64 model, else float32. Prompts are as for `generate`.
        When a peer of the service dies, the prompt is processed again elsewhere. Raises UsageError if there
        is no such service or the model has no such head, and RunFailed if the service cannot answer.
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
        """Plan a model over this node and its live members, without starting anything.

        `model` is a graph, a captured FILE.peerloom, a built-in name, PATH.py:FUNCTION or a Hugging Face
        folder. The other arguments are those of `node.plan`, which returns the same plan for the same peers.
        Raises RunFailed, with a remedy, if nothing fits; also raises UsageError.
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
