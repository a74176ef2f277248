"""The public surface of a node: the only definition of its interface for programs.

    async with node.Node(join=["10.0.0.5:9747"]) as me:      # under trio
        print(me.id, [member.name for member in me.members()])
    with node.sync(join=["10.0.0.5:9747"]) as me:            # the same names, blocking

`node.runtime.Node` inherits these methods, and `node/library/blocking.py` is generated from this file
(`python -m node.library.generate`; a test checks that they agree). So a public method is written only here,
with types and its docstring. Not here: running a node (`node.runtime`).
"""

import math
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import trio

from crypto.errors import LocalProtocolError
from crypto.identity import PeerId, peer_text
from node import state as views
from node import state_documents
from node.api.handles import RunHandle
from node.api.preparing import prepared
from node.averaging.once import AveragingResult, average_once
from node.averaging.service import Averaging
from node.commands import Commands, find_run
from node.config import read_join
from node.content.directory import Directory, StoredEntry
from node.errors import JoinTimeout, UsageError
from node.events import Event, JoinTried, NodeStopped
from node.history import EventHistory
from node.invocation import shown_values
from node.journal import Journal
from node.placement.inbound import Inbound
from node.placement.provider import Provider
from node.planning.peers import live_peers
from node.planning.report import PlanReport
from node.planning.request import plan as plan_for
from node.runs.runs import Runs
from node.seams import Seams
from node.services.bootstrap import Bootstrap
from node.services.broadcasts import Broadcast
from node.services.discovery import Discovery
from node.services.energy import EnergyLog
from node.services.measurements import Measurements
from node.services.membership import Membership
from node.serving.asking import Asking, ServeWish
from node.serving.questions import Question, split_prompt
from node.serving.serving import Serving
from partition.codecs.base import Array
from partition.model.graph import Graph

ADDRESSES_JOINED_MAX = 256
"""Maximum number of addresses in one call of `join`. More would be a scan, not a join."""


class Surface:
    """The common interface of both forms of the library. The attributes belong to `node.runtime.Node`."""

    peer: PeerId
    seams: Seams
    journal: Journal
    joining: Bootstrap
    membership: Membership
    provider: Provider
    averaging: Averaging
    measurements: Measurements
    stopping: trio.Event
    counters: Any
    watch: Callable[[], AbstractContextManager[trio.MemoryReceiveChannel[Event]]]
    _found: Callable[[Sequence[PeerId]], None]
    _directory: Directory
    runs: Runs
    discovery: Discovery
    serving: Serving
    signer: Any
    energy: EnergyLog
    inbound: Inbound
    handed_over: trio.Event
    set: Callable[[str, str | None], None]

    @property
    def state(self) -> views.State:
        """The state of this node, as any screen may show it."""
        return self.journal.state

    @property
    def history(self) -> EventHistory:
        """The newest events, with their numbers."""
        return self.journal.history

    @property
    def id(self) -> str:
        """This node's peer id, as text: `12D3KooW...`."""
        return peer_text(self.peer)

    @property
    def addresses(self) -> tuple[str, ...]:
        """The addresses at which other nodes reach this one, as `host:port`, for `join=[...]`."""
        return tuple(address.short for address in self.seams.network.addresses)

    @property
    def dht(self) -> Directory:
        """The record table of the swarm: put, get, provide, find."""
        return self._directory

    async def provide(self, name: str) -> StoredEntry:
        """Announce, while this node runs, that it has the content with this hash (hexadecimal).

        Raises NotStored.
        """
        return await self._directory.provide(name)

    async def providers(self, name: str) -> tuple[str, ...]:
        """Return the peers that announce that they have the content with this hash (hexadecimal)."""
        return await self._directory.providers(name)

    def broadcast(self, topic: str, data: bytes) -> None:
        """Send `data` (at most 512 bytes) to all members. It replaces this node's earlier data under `topic`.

        It usually reaches the present members soon, but there is no guarantee. If calls come too fast, they
        wait, and only the newest data of a topic is sent. In a swarm with neighbourhoods it stays in this
        node's neighbourhood. Raises UsageError if a topic (64 bytes) or data is too long, or too many topics
        wait.
        """
        try:
            self.membership.broadcast(topic.encode(), data)
        except LocalProtocolError as error:
            raise UsageError(f"broadcast: {error}") from None

    async def broadcasts(self, topic: str = "") -> AsyncIterator[Broadcast]:
        """Yield broadcasts of other members under this topic (empty: all topics) from now on, until the node
        leaves."""
        with self.membership.listeners.listen() as heard:
            async for told in heard:
                if topic in ("", told.topic):
                    yield told

    def members(self) -> tuple[views.MemberView, ...]:
        """Return the other members that are believed alive, sorted by peer id."""
        return self.state.alive()

    def status(self) -> dict[str, Any]:
        """Return the document of `peerloom status --json`, schema `peerloom/status/1`."""
        document = state_documents.status_document(self.state, self.seams.clock.wall(), self.counters)
        return dict(shown_values(document))

    async def join(self, addresses: Sequence[str] | str) -> tuple[JoinTried, ...]:
        """Dial these addresses now; return the outcome of each, in order.

        They are tried again whenever this node is alone. Raises UsageError if an address is malformed.
        """
        parsed = read_join(addresses)
        if len(parsed) > ADDRESSES_JOINED_MAX:
            raise UsageError(
                f"join: {len(parsed)} addresses are too many; give at most {ADDRESSES_JOINED_MAX}"
            )
        found: dict[int, JoinTried] = {}
        limit = trio.CapacityLimiter(16)

        async def attempt(index: int) -> None:
            async with limit:
                outcome = await self.joining.try_one(parsed[index])
            if outcome.peer is not None:
                self._found([outcome.peer])
            found[index] = outcome

        async with trio.open_nursery() as nursery:
            for index, address in enumerate(parsed):
                self.joining.add(address)
                nursery.start_soon(attempt, index)
        return tuple(found[index] for index in sorted(found))

    async def wait_for_members(self, count: int, timeout_seconds: float = 60.0) -> None:
        """Return once `count` other members are alive. Raises JoinTimeout after `timeout_seconds`."""
        with trio.move_on_after(timeout_seconds), self.watch() as events:
            while len(self.members()) < count:
                await events.receive()
            return
        raise JoinTimeout(
            f"{len(self.members())} of {count} other members were alive after {timeout_seconds:g} s",
            "check the addresses to join, or wait longer",
        )

    async def events(
        self, since: float = math.inf, types: Sequence[type[Event]] = ()
    ) -> AsyncIterator[Event]:
        """Yield events of these types (none given: all types), in order, until the node leaves.

        With `since` (Unix seconds), events that were kept since then come first. By default only new events
        are yielded.
        """
        wanted = tuple(types) or (Event,)
        with self.watch() as coming:
            earlier = [event for _, event in self.history.since(since)]
            for event in earlier:
                if isinstance(event, wanted):
                    yield event
            async for event in coming:
                if isinstance(event, wanted):
                    yield event
                if isinstance(event, NodeStopped):
                    return

    async def average(
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
        return await average_once(
            self.averaging,
            tensors,
            group,
            weight,
            peers=peers,
            timeout_seconds=timeout_seconds,
            codec=codec,
            aggregate=aggregate,
            admit=admit,
            invitation=invitation,
        )

    async def invite(self, run: str, peer: str, hours: float = 168.0, admit: str = "") -> str:
        """Return an invitation: a text that admits a peer to the averaging run with this name for `hours`.

        Only that peer can use it, as its `invitation=`. The run must be this node's own, or one with
        `admit="vouched"` in which this node takes part. `admit` is "invited" or "vouched", and is needed for
        a run that is not open on this node yet. Raises UsageError if this node may not invite, or there is no
        such peer.
        """
        return Commands(self).invite(run, peer, hours, admit)

    async def revoke(self, run: str, peer: str) -> int:
        """Revoke a peer's admission to one of this node's runs; return how many members were informed.

        `run` is the id of a run in local mode, or the name of an averaging run. From the next round on the
        peer is excluded, and so are peers for which it vouched. Raises UsageError if the run belongs to a
        different node.
        """
        return await Commands(self).revoke(run, peer)

    async def train(
        self, model: object, data: str = "", wait_seconds: float = 0.0, **settings: Any
    ) -> RunHandle:
        """Have the swarm train a model; return the run once all its parts are placed.

        `model` is a RUN.toml, a built-in name, a captured FILE.peerloom, PATH.py:FUNCTION or a
        `partition.capture.Task`. `data` and the settings are as in RUN.toml (`steps=200`, `stages=2`,
        `learning_rate=0.001`), and override the values in that file. This waits `wait_seconds` for missing
        peers. Raises UsageError if a setting, the model or the data is wrong, and RunFailed if the run could
        not be placed.
        """
        commands = Commands(self)
        async with prepared(model, data, settings, self.seams.executor) as made:
            run = await commands.make_run(made)
        await commands.submit(run, wait_seconds)
        return RunHandle(self, run.text)

    def run(self, run: str) -> RunHandle:
        """Return a run by its id or a prefix of it. A run that is unknown here needs its whole id.

        Raises UsageError if there is no such run.
        """
        return RunHandle(self, find_run(self.state.runs, run))

    def run_documents(self) -> tuple[dict[str, Any], ...]:
        """Return the documents of all runs that this node knows, as in `peerloom runs --json`."""
        return tuple(shown_values(state_documents.run_document(view)) for view in self.state.runs.values())

    async def serve(
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
        wish = ServeWish(name, stages, replicas, context, text=tokenizer)
        return await Asking(self.serving).serve(model, wish)

    async def services(self) -> tuple[dict[str, Any], ...]:
        """Return the services of this swarm that answer now, as in `peerloom services --json`."""
        return tuple((await Asking(self.serving).services())["services"])

    async def generate(
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
    ) -> AsyncIterator[str | int]:
        """Yield a service's answer to a prompt as it arrives: text, or tokens if the prompt is tokens.

        A prompt may also be a chat: messages, each with `role` and `content`, for which the model's own
        template is used. `temperature` 0 takes the likeliest token each time; above 0, the same `seed` draws
        the same tokens. Settings that are None come from the model's folder; if it has none, the likeliest
        token is taken. The answer continues when a peer of the service dies; with `exact`, only if the answer
        stays the same. The peers that hold stages can read the prompt and the answer. Raises UsageError if
        there is no such service or a setting is wrong, and RunFailed if the answer cannot continue.
        """
        numbers = tokens_max, temperature, top_k, top_p, min_p, seed
        asked, messages = split_prompt(prompt)
        question = Question(asked, *numbers, tuple(stops), messages, exact=exact)
        async with Asking(self.serving).answering(service, question) as answer:
            async for piece in answer:
                yield piece

    async def hidden(self, service: str, prompt: str | Sequence[int] | Sequence[Mapping[str, str]]) -> Array:
        """Return a service's final hidden states for a prompt, an array [tokens, width].

        They are the input of the model's head, after its last norm: the last of the `hidden_states` of
        transformers. The type is float64 for a float64 model, else float32. Prompts are as for `generate`.
        When a peer of the service dies, the prompt is processed again elsewhere. Raises UsageError if there
        is no such service or the model has no such head, and RunFailed if the service cannot answer.
        """
        asked, messages = split_prompt(prompt)
        return await Asking(self.serving).hidden(service, Question(asked, messages=messages))

    async def plan(
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
        now = self.seams.clock.wall()
        measured = await self.measurements.document(self.membership.live)
        peers = live_peers(self.status(), state_documents.peers_document(self.state, now), measured)
        ask = partial(
            plan_for,
            model,
            peers,
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
        return await self.seams.executor.run(ask, apart=True)
