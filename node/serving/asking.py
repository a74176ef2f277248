"""This node's interface to services, for users and programs: serve a model, get answers, list services, end
one.

Prompts and answers only pass through: no event, log, recording or report contains them.
"""

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId, peer_text
from node.content.fenced_text import FencedText, TextLost
from node.content.text_questions import TextFacts
from node.errors import RunFailed, Unreachable, UsageError
from node.protocols.manifest import run_text
from node.protocols.services import (
    HOLDERS_MAX,
    MANIFEST_BYTES_MAX,
    REPLICAS_MAX,
    Service,
    ServiceManifest,
    holder_name,
)
from node.serving.finding import CacheUse
from node.serving.generations import Generation
from node.serving.planning import plan_service, served_graph
from node.serving.proof_process import prove_served
from node.serving.questions import Question, make_door_wish
from node.serving.serving import Serving
from node.serving.sources import GRAPH_SUFFIX, ServedFiles, captured_files, is_run
from node.serving.texts import TextPieces
from partition.codecs.base import Array
from partition.model.graph import Graph, encode_graph
from partition.model.head import head_input, hidden_width
from partition.model.serving import count_words, is_whole

CONTEXT_USUAL = 1_024
"""Default number of tokens of a session: the maximum of the built-in models."""
THREADS_USUAL = 4
"""Maximum number of threads of a service, if its publisher has as many. Stages of one bit class compute with
exactly the service's number of threads, so a larger number excludes smaller machines. Decoding is limited by
memory, not by cores."""
HIDDEN_NUMBERS_MAX = 1 << 27
"""Maximum number of values in the hidden states of one prompt: half a GiB of float32, or 32,768 tokens of
4,096 values each."""
BYTES = 256
"""Vocabulary size of a byte model."""
PRIVACY = (
    "whoever holds a stage of a service can read what is asked and answered; "
    "serve it on nodes that you know, where that matters"
)
_TOLD_NAME = "serving/told"


@dataclass(frozen=True)
class ServeWish:
    """How a model is to be served. With `stages` 0, the planner decides how to split it."""

    name: str = ""
    stages: int = 0
    replicas: int = 1
    context: int = 0
    stops: tuple[int, ...] = ()
    text: str = ""
    """The folder, or the tokenizer.json, that turns text into the model's tokens."""
    peers: tuple[str, ...] = ()
    """The peers that may hold the service in addition to this node, by name or id. "invited" means the peers
    that the owner lists."""


class Asking:
    """One node's interface to services."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    # Serving a model

    async def serve(self, model: str, wish: ServeWish) -> dict[str, Any]:
        """Publish a captured model (FILE.peerloom) or a run's weights (its id). Return the service's document
        once it answers. Raises UsageError if it cannot be served; RunFailed if no node has room for it."""
        if not 1 <= wish.replicas <= REPLICAS_MAX:
            raise UsageError(f"--replicas {wish.replicas}: want 1 to {REPLICAS_MAX}")
        async with self._files(model) as files:
            wish = replace(wish, name=wish.name or files.called, text=wish.text or files.text)
            return await self._publish(files, wish)

    @asynccontextmanager
    async def _files(self, model: str) -> AsyncIterator[ServedFiles]:
        serving = self._serving
        if is_run(model):
            async with serving.run_files(model) as files:
                yield files
        else:
            yield await serving.seams.executor.run(partial(captured_files, model))

    async def _publish(self, files: ServedFiles, wish: ServeWish) -> dict[str, Any]:
        serving = self._serving
        holders = self._holders(wish.peers)
        name, decoded = await self._learn(files, wish)
        vocabulary, vector = sizes_of(decoded)
        text = await self._text(wish, vocabulary)
        offers = [each for each in serving.offers() if not holders or holder_name(each.peer) in holders]
        knowledge = await serving.learn([each.peer for each in offers])
        plan = partial(plan_service, decoded, offers, wish.stages, knowledge)
        ranges, peers = await serving.seams.executor.run(plan, apart=True)
        try:
            manifest = ServiceManifest(
                version=2 if vector else 1,
                name=wish.name,
                graph=name,
                cuts=tuple(first for first, _ in ranges[1:]),
                replicas=wish.replicas,
                vocabulary=vocabulary,
                context=min(wish.context or CONTEXT_USUAL, decoded.symbols[2].maximum),
                threads=min(serving.machine.threads, THREADS_USUAL),
                at_milliseconds=int(serving.seams.swarm_clock.wall() * 1_000),
                text="tokenizer" if text else "bytes" if vocabulary == BYTES and not vector else "",
                tokenizer=text[0] if text else b"",
                stops=wish.stops or (text[1].stops if text else ()),
                run=files.run,
                step=files.step,
                holders=holders,
                vector=vector,
            )
            # A struct checks its bounds only when it is decoded.
            data = msgspec.msgpack.encode(manifest)
            msgspec.msgpack.decode(data, type=ServiceManifest)
        except (ValueError, msgspec.ValidationError) as error:
            raise UsageError(f"{wish.name}: no service can have this name or form: {error}") from None
        if len(data) > MANIFEST_BYTES_MAX:
            raise UsageError(
                f"{wish.name}: its manifest has {len(data)} bytes, at most {MANIFEST_BYTES_MAX}",
                "use a shorter name, fewer stages, or fewer peers",
            )
        service = await serving.published.begin(manifest, peers)
        await serving.published.await_ready(service)
        return await self.document(service) | {"is_split": len(ranges) > 1, "was_asked": bool(wish.stages)}

    def _holders(self, peers: Sequence[str]) -> tuple[bytes, ...]:
        """Return the manifest's list of peers that may hold a service; empty if all may. Raises
        UsageError."""
        if not peers:
            return ()
        found = dict.fromkeys([self._serving.signer.peer, *self._serving.named(peers)])
        if len(found) > HOLDERS_MAX:
            raise UsageError(f"--peers: {len(found)} peers with this node; at most {HOLDERS_MAX}")
        return tuple(map(holder_name, found))

    async def _learn(self, files: ServedFiles, wish: ServeWish) -> tuple[bytes, Graph]:
        """Prove a captured model's serving graph, and store the graph and its values on this node. Raises
        UsageError."""
        serving, context = self._serving, wish.context or CONTEXT_USUAL
        name, decoded = await serving.models.learn(files.graph, files.values)
        served = await serving.seams.executor.run(partial(served_graph, decoded, wish.name, context))
        # Prove the stored copy, because the file may have changed.
        if (held := await serving.models.read(name)) is None:
            raise UsageError(f"{files.graph}: it could not be kept")
        machine = serving.machine
        await prove_served(
            wish.name, held, context, threads=machine.threads, memory_bytes=machine.memory_bytes
        )
        if served is decoded:
            return name, decoded
        with TemporaryDirectory() as folder:
            path = Path(folder) / f"served{GRAPH_SUFFIX}"
            write = partial(path.write_bytes, encode_graph(served))
            await serving.seams.executor.run(write)
            return await serving.models.learn(path, files.values)

    async def _text(self, wish: ServeWish, vocabulary: int) -> tuple[bytes, TextFacts] | None:
        """Store the model's text files on this node, if there are any. Raises UsageError if they do not fit
        this model."""
        if not wish.text:
            return None
        found = await self._serving.texts.keep(Path(wish.text))
        if found is not None and found[1].vocabulary > vocabulary:
            raise UsageError(
                f"{wish.text}: its tokenizer has ids up to {found[1].vocabulary - 1:,}, and {wish.name} has"
                f" {vocabulary:,} tokens",
                "the tokenizer that belongs to the model: --tokenizer FILE",
            )
        if found is not None and any(stop >= vocabulary for stop in found[1].stops):
            raise UsageError(f"{wish.text}: an answer ends with a token that {wish.name} does not have")
        return found

    async def stop(self, name: str) -> dict[str, Any]:
        """End a service that this node has published. Raises UsageError."""
        service = await self._serving.finder.find(name)
        await self._serving.published.stop(service)
        return {
            "schema": "peerloom/service-stopped/1",
            "service": service.text,
            "name": service.manifest.name,
        }

    # Listing

    async def services(self) -> dict[str, Any]:
        """Return the services that answer now."""
        rows = []
        for service in await self._serving.finder.all():
            document = await self.document(service)
            if document["answers"]:
                rows.append(document)
        return {"schema": "peerloom/services/1", "services": rows}

    async def document(self, service: Service) -> dict[str, Any]:
        """Return what is known of a service: its stages, and the members that answer for each."""
        routes = await self._serving.routes(service)
        manifest = service.manifest
        usage = self._serving.finder.usage(service.id)
        unknown = CacheUse(0, 0)
        stages = [
            [
                {
                    "peer": peer_text(each.peer),
                    "sessions": each.sessions,
                    "tokens": usage.get((each.peer, stage), unknown).tokens,
                    "tokens_max": usage.get((each.peer, stage), unknown).tokens_max,
                    "bits": each.bits.hex(),
                }
                for each in routes.get(stage, ())
            ]
            for stage in range(manifest.stages)
        ]
        newest = self._serving.generations.newest.get(service.id)
        return {
            "schema": "peerloom/service/1",
            "service": service.text,
            "name": manifest.name,
            "publisher": peer_text(service.publisher),
            "graph": manifest.graph.hex(),
            "replicas": manifest.replicas,
            "vocabulary": manifest.vocabulary,
            "vector": manifest.vector,
            "context": manifest.context,
            "text": manifest.text,
            "at_milliseconds": manifest.at_milliseconds,
            "run": run_text(manifest.run) if manifest.run else "",
            "step": manifest.step,
            "is_restricted": bool(manifest.holders),
            "stages": stages,
            "answers": all(stages),
            "first_seconds": newest and newest.first_seconds,
            "tokens_per_second": newest and newest.tokens_per_second,
        }

    # Asking

    @asynccontextmanager
    async def answering(self, name: str, question: Question) -> AsyncIterator["AnswerStream"]:
        """Yield an answer, which ends with the context. Raises UsageError if there is no such service, or the
        request is invalid; RunFailed if the service cannot answer."""
        serving = self._serving
        service = await serving.finder.find(name)
        async with AsyncExitStack() as stack:
            text: FencedText | None = None
            if question.is_text and service.manifest.text == "tokenizer":
                text = await stack.enter_async_context(self.reading(service))
            with _told_of_tokenizer(service):
                asked = await make_door_wish(service.manifest, question, text, serving.seams.entropy)
            generation = await stack.enter_async_context(serving.answer(service, asked.wish))
            pieces = await stack.enter_async_context(serving.texts.pieces(text, question.stops))
            yield AnswerStream(service, generation, pieces if question.is_text else None, asked.forgotten)

    async def hidden(self, name: str, question: Question) -> Array:
        """Return the final hidden states of a prompt, float32 or float64 [tokens, width]. They are the input
        of the model's head. Raises UsageError if there is no such service, or the request is invalid;
        RunFailed if the service cannot answer.
        """
        serving = self._serving
        service = await serving.finder.find(name)
        await serving.finder.routes(service)
        members = [*serving.finder.members(service.id), service.publisher]
        async with AsyncExitStack() as stack:
            text: FencedText | None = None
            if question.is_text and service.manifest.text == "tokenizer":
                text = await stack.enter_async_context(self.reading(service))
            with _told_of_tokenizer(service):
                asked = await make_door_wish(service.manifest, question, text, serving.seams.entropy)
            width = await self._hidden_width(service, members, len(asked.wish.prompt))
            wish = replace(asked.wish, is_hidden=True, tokens_max=1)
            made = await stack.enter_async_context(serving.answer(service, wish, width))
            async for _ in made:
                raise AssertionError("received a token instead of hidden states")
            if made.hidden is None:  # a member wrongly claimed that the prompt is too long
                reason = "no finish" if made.finish is None else made.finish.reason
                raise RunFailed(
                    f"{service.manifest.name}: the answer ended ({reason}) without the hidden states",
                    "see who answers: `peerloom services`; then ask again",
                )
            return made.hidden

    async def _hidden_width(self, service: Service, members: Sequence[PeerId], tokens: int) -> int:
        """Return the width of a service's hidden states. Raises UsageError, RunFailed."""
        called = service.manifest.name
        try:
            graph = await self._serving.models.get(service.manifest.graph, members)
        except (Unreachable, RemoteProtocolError) as error:
            raise RunFailed(f"{called}: its graph cannot be had: {error}", "ask again") from None
        if (head := head_input(graph)) is None:
            raise UsageError(f"{called}: its logits are not made of hidden states by one product")
        width = hidden_width(head[1])
        if tokens * width > HIDDEN_NUMBERS_MAX:
            raise UsageError(
                f"prompt: {tokens:,} tokens of {width:,} numbers each; at most {HIDDEN_NUMBERS_MAX:,} in all",
                "a shorter prompt",
            )
        return width

    @asynccontextmanager
    async def reading(self, service: Service, purpose: str = "") -> AsyncIterator[FencedText]:
        """Yield the text codec of a service, made from files that its members have too. Each purpose has its
        own process. Raises UsageError, RunFailed."""
        serving = self._serving
        await serving.finder.routes(service)
        holders = [*serving.finder.members(service.id), service.publisher]
        async with serving.texts.reading(service, holders, purpose=purpose) as text:
            yield text

    async def text_document(self, name: str) -> dict[str, Any]:
        """Return how a service handles text. Raises UsageError, RunFailed."""
        service = await self._serving.finder.find(name)
        has_template = False
        if service.manifest.text == "tokenizer":
            async with self.reading(service) as text:
                has_template = text.facts.has_template
        return {
            "schema": "peerloom/service-text/1",
            "service": service.text,
            "name": service.manifest.name,
            "text": service.manifest.text,
            "has_template": has_template,
        }

    async def first_use(self) -> str:
        """Return the privacy notice if this is the first question of this node; empty later."""
        storage, executor = self._serving.seams.storage, self._serving.seams.executor
        if await executor.run(partial(storage.read, _TOLD_NAME)) is not None:
            return ""
        await executor.run(partial(storage.write, _TOLD_NAME, b"1"))
        return PRIVACY


class AnswerStream:
    """The pieces of one answer: text if the prompt was text, otherwise tokens."""

    def __init__(
        self, service: Service, generation: Generation, text: TextPieces | None, forgotten: int = 0
    ) -> None:
        self.service = service
        self.generation = generation
        self._text = text
        self._forgotten = forgotten
        self._is_over = False

    def __aiter__(self) -> "AnswerStream":
        return self

    async def __anext__(self) -> str | int:
        """Return the next piece. Raises RunFailed if the answer cannot continue."""
        with _told_of_tokenizer(self.service):
            return await self._next()

    async def _next(self) -> str | int:
        while not self._is_over:
            try:
                token = (await anext(self.generation)).token
            except StopAsyncIteration:
                self._is_over = True
                if self._text is not None and (piece := await self._text.finish()):
                    return piece
                break
            if self._text is None:
                return token
            piece = await self._text.push(token)
            self._is_over = self._text.is_stopped
            if piece:
                return piece
        raise StopAsyncIteration

    def document(self, now: float) -> dict[str, Any]:
        """Return the figures of the answer, without its text."""
        made = self.generation
        first = made.first_at
        seconds = None if first is None else now - first
        reason = "stop" if self._text is not None and self._text.is_stopped else None
        return {
            "schema": "peerloom/answer/1",
            "service": self.service.text,
            "name": self.service.manifest.name,
            "tokens": made.count,
            "finish": reason or (made.finish.reason if made.finish else "cancelled"),
            "moves": made.moves,
            "exact": made.is_exact,
            "first_seconds": None if first is None else first - made.began_at,
            "tokens_per_second": (made.count - 1) / seconds if seconds and made.count > 1 else None,
            "route": [peer_text(peer) for peer in made.route],
            "forgotten": self._forgotten,
            "shared_tokens": made.shared,
        }


@contextmanager
def _told_of_tokenizer(service: Service) -> Iterator[None]:
    """Inside this context, raise RunFailed if the tokenizer process of a service is gone."""
    try:
        yield
    except TextLost as error:
        name = service.manifest.name
        raise RunFailed(f"{name}: its tokenizer was ended: {error}", "ask again") from None


def sizes_of(graph: Graph) -> tuple[int, int]:
    """Return the vocabulary size of a model and the length of its vectors. The length is 0 for a language
    model, whose output rows are scores of its tokens. Raises UsageError."""
    entry = graph.entries[0]
    side = graph.types[entry.types[entry.outputs[0]]].shape[-1]
    if not isinstance(side, int):
        raise UsageError("the last dimension of the model's logits is not fixed")
    if not is_whole(graph, entry):
        return side, 0
    try:
        return count_words(graph), side
    except ValueError as error:
        raise UsageError(str(error)) from None
