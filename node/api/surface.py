"""The public surface of a node: the one definition of what a program may ask of it.

    async with node.Node(join=["10.0.0.5:9747"]) as me:      # under trio
        print(me.id, [member.name for member in me.members()])
    with node.sync(join=["10.0.0.5:9747"]) as me:            # the same names, blocking

`node.runtime.Node` inherits these methods, and `node/library/blocking.py` is generated from this file
(`python -m node.library.generate`; a test holds that they agree). So a public method is written here, with
types and a docstring of its own, and nowhere else. Not here: what it takes to run a node (`node.runtime`).
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
from node.averaging.once import Averaged, average_once
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
from node.services.bootstrap import Joining
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
"""Addresses for one call of `join`. More would be a scan, not a join."""


class Surface:
    """What every form of the library offers. The attributes are `node.runtime.Node`'s."""

    peer: PeerId
    seams: Seams
    journal: Journal
    joining: Joining
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
        """What this node knows, as any screen may show it."""
        return self.journal.state

    @property
    def history(self) -> EventHistory:
        """The newest events, numbered."""
        return self.journal.history

    @property
    def id(self) -> str:
        """This node's peer id, as text: `12D3KooW...`."""
        return peer_text(self.peer)

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where other nodes reach this one, as `host:port`: what `join=[...]` takes."""
        return tuple(address.short for address in self.seams.network.addresses)

    @property
    def dht(self) -> Directory:
        """The record table of the swarm: put, get, provide, find."""
        return self._directory

    async def provide(self, name: str) -> StoredEntry:
        """Say that this node has the content with this hash (hexadecimal), while it runs.

        Raises NotStored.
        """
        return await self._directory.provide(name)

    async def providers(self, name: str) -> tuple[str, ...]:
        """Return the peers that say they have the content with this hash (hexadecimal)."""
        return await self._directory.providers(name)

    def broadcast(self, topic: str, data: bytes) -> None:
        """Tell all members `data` (512 bytes at most), in place of what this node told under `topic` before.

        It reaches those that are members now, soon and most often, without a promise. What is told too fast
        waits, and only the newest of a topic goes out. With neighbourhoods it stays in that of this node.
        Raises UsageError: a topic (64 bytes) or data too long, or too many topics at once.
        """
        try:
            self.membership.broadcast(topic.encode(), data)
        except LocalProtocolError as error:
            raise UsageError(f"broadcast: {error}") from None

    async def broadcasts(self, topic: str = "") -> AsyncIterator[Broadcast]:
        """Yield what other members tell from now on, under this topic (empty: all), until the node leaves."""
        with self.membership.listeners.listen() as heard:
            async for told in heard:
                if topic in ("", told.topic):
                    yield told

    def members(self) -> tuple[views.MemberView, ...]:
        """Return the other members believed alive, by peer id."""
        return self.state.alive()

    def status(self) -> dict[str, Any]:
        """Return what `peerloom status --json` prints, schema `peerloom/status/1`."""
        document = state_documents.status_document(self.state, self.seams.clock.wall(), self.counters)
        return dict(shown_values(document))

    async def join(self, addresses: Sequence[str] | str) -> tuple[JoinTried, ...]:
        """Dial these addresses now; return what became of each, in their order.

        They are tried again whenever this node is alone. Raises UsageError: an address cannot be read.
        """
        parsed = read_join(addresses)
        if len(parsed) > ADDRESSES_JOINED_MAX:
            raise UsageError(f"join: {len(parsed)} addresses at once; {ADDRESSES_JOINED_MAX} at most")
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
        """Return once `count` other members are alive. Raises JoinTimeout when they are not in time."""
        with trio.move_on_after(timeout_seconds), self.watch() as events:
            while len(self.members()) < count:
                await events.receive()
            return
        raise JoinTimeout(
            f"{len(self.members())} of {count} other members were alive after {timeout_seconds:g} s",
            "check the addresses to join, or wait for longer",
        )

    async def events(
        self, since: float = math.inf, types: Sequence[type[Event]] = ()
    ) -> AsyncIterator[Event]:
        """Yield events of these types (none: all), in their order, until the node leaves.

        `since` (unix seconds) begins with kept ones that happened then or later, by default with new ones.
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
        """Return the text by which a peer may take part in an averaging run of this name, for so many hours.

        It is for `invitation=` of that peer alone. The run is this node's own, or one of `admit="vouched"`
        that it takes part in. `admit` is "invited" or "vouched", for a run that is not open here yet. Raises
        UsageError: this node may not invite, or no such peer.
        """
        return Commands(self).invite(run, peer, hours, admit)

    async def revoke(self, run: str, peer: str) -> int:
        """Revoke what lets a peer take part in a run of this node's own; return how many members were told.

        `run` is the id of a run in local mode, or the name of an averaging run. The peer is out with the next
        round, and so are those that take part by its word. Raises UsageError: the run is another's.
        """
        return await Commands(self).revoke(run, peer)

    async def train(
        self, model: object, data: str = "", wait_seconds: float = 0.0, **settings: Any
    ) -> RunHandle:
        """Have the swarm train a model; return the run once every part of it is placed.

        `model` is a RUN.toml, a built-in name, a captured FILE.peerloom, PATH.py:FUNCTION or a
        `partition.capture.Task`; `data` and the settings are as in RUN.toml (`steps=200`, `stages=2`,
        `learning_rate=0.001`), and count above the file's. It waits `wait_seconds` for peers that it lacks.
        Raises UsageError: a wrong setting, model or data; RunFailed: it could not be placed.
        """
        commands = Commands(self)
        async with prepared(model, data, settings, self.seams.executor) as made:
            run = await commands.make_run(made)
        await commands.submit(run, wait_seconds)
        return RunHandle(self, run.text)

    def run(self, run: str) -> RunHandle:
        """Return a run by its id, or how that begins; by its whole id also one that is not known here.

        Raises UsageError: there is no such run.
        """
        return RunHandle(self, find_run(self.state.runs, run))

    def run_documents(self) -> tuple[dict[str, Any], ...]:
        """Return what `peerloom runs --json` prints of each run that this node knows."""
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
        """Serve a FILE.peerloom that was captured to be served; return the service once it answers.

        It is called `name`, by default as the file is. A model that fits one peer is not split unless
        `stages` say so. Its members keep it at `replicas` of each stage, whoever of them dies. `context` is
        how many tokens a session takes at most. Before, a process computes a few short sessions, to see
        that they give the model's logits. `tokenizer` is the model's folder, or a tokenizer.json, by which it
        takes and gives text. Raises UsageError: it cannot be served; RunFailed: no place.
        """
        wish = ServeWish(name, stages, replicas, context, text=tokenizer)
        return await Asking(self.serving).serve(model, wish)

    async def services(self) -> tuple[dict[str, Any], ...]:
        """Return the services of this swarm that answer now, as `peerloom services --json` prints them."""
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
        """Yield what a service writes behind a prompt as it comes: text, or tokens where tokens are given.

        A prompt may also be a chat: messages, each with `role` and `content`, by the model's own template.
        `temperature` 0 takes the likeliest token each time; above it the same `seed` draws the same. What is
        None is as the model's folder says; without one it is the likeliest. The answer goes on when a peer of
        the service dies; with `exact` only where it stays what it would have been. Whoever holds a stage can
        read prompt and answer. Raises UsageError: no such service, or a wrong setting; RunFailed: the answer
        cannot go on.
        """
        numbers = tokens_max, temperature, top_k, top_p, min_p, seed
        asked, messages = split_prompt(prompt)
        question = Question(asked, *numbers, tuple(stops), messages, exact=exact)
        async with Asking(self.serving).answering(service, question) as answer:
            async for piece in answer:
                yield piece

    async def hidden(self, service: str, prompt: str | Sequence[int] | Sequence[Mapping[str, str]]) -> Array:
        """Return a service's final hidden states of a prompt, an array [tokens, width].

        They are what the model's head makes logits of, behind its last norm: the last of the `hidden_states`
        of transformers; float64 where the model is, else float32. Prompts are those of `generate`, and when
        a peer of the service dies, the prompt is read again elsewhere. Raises UsageError: no such service, or
        a model without such a head; RunFailed: it cannot answer.
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
        """Plan a model over this node and its living members; nothing is started.

        `model` is a graph, a captured FILE.peerloom, a built-in name, PATH.py:FUNCTION or a Hugging Face
        folder; the rest is as for `node.plan`, which gives the same for the same peers. Raises RunFailed:
        nothing fits, with what to do; UsageError.
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
