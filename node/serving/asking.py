"""What a person or a program asks of services on this node: serve a model, answer, list, end.

Prompts and answers pass through here and stand nowhere else: in no event, log, recording or report.
"""

import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

from crypto.identity import peer_text
from node.errors import UsageError
from node.protocols.services import REPLICAS_MAX, Service, ServiceManifest
from node.serving.generations import Generation
from node.serving.planning import plan_service, served_graph
from node.serving.serving import Serving
from partition.model.graph import Graph, encode_graph
from partition.serve.door import Wish
from partition.serve.sampling import SEED_MAX, Sampling
from partition.serve.text import STOP_LENGTH_MAX, STOPS_MAX, TextStream, decode_bytes

TOKENS_USUAL = 256
TOKENS_MAX = 1 << 20
CONTEXT_USUAL = 1_024
"""Tokens of a session where nobody says more: as many as the built-in models take."""
BYTES = 256
"""The vocabulary of a model of text byte by byte."""
PRIVACY = (
    "whoever holds a stage of a service can read what is asked and answered; "
    "serve it on nodes that you know, where that matters"
)
GRAPH_SUFFIX, VALUES_SUFFIX = ".peerloom", ".safetensors"
_TOLD_NAME = "serving/told"


@dataclass(frozen=True)
class Question:
    """What is asked of a service: a text, or tokens where its model has no text of its own."""

    prompt: str | Sequence[int]
    tokens_max: int = TOKENS_USUAL
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stops: tuple[str, ...] = ()


@dataclass(frozen=True)
class ServeWish:
    """How a model is to be served; `stages` 0 leaves the cut to the planner."""

    name: str = ""
    stages: int = 0
    replicas: int = 1
    context: int = 0
    text: str = ""
    stops: tuple[int, ...] = ()


class Asking:
    """One node's face of services."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    # Serving a model

    async def serve(self, model: str, wish: ServeWish) -> dict[str, Any]:
        """Publish a captured model (FILE.peerloom), by default under the file's name; return its document
        once it answers. Raises UsageError: it cannot be served; RunFailed: it has no place."""
        serving = self._serving
        graph, values, called = await serving.seams.executor.run(partial(captured_files, model))
        wish = replace(wish, name=wish.name or called)
        if not 1 <= wish.replicas <= REPLICAS_MAX:
            raise UsageError(f"--replicas {wish.replicas}: want 1 to {REPLICAS_MAX}")
        name, decoded = await self._learn(graph, values, wish.context or CONTEXT_USUAL)
        offers = list(serving.offers())
        plan = partial(plan_service, decoded, offers, wish.stages)
        ranges, peers = await serving.seams.executor.run(plan, apart=True)
        vocabulary = vocabulary_of(decoded)
        try:
            manifest = ServiceManifest(
                version=1,
                name=wish.name,
                graph=name,
                cuts=tuple(first for first, _ in ranges[1:]),
                replicas=wish.replicas,
                vocabulary=vocabulary,
                context=min(wish.context or CONTEXT_USUAL, decoded.symbols[2].maximum),
                threads=serving.machine.threads,
                at_milliseconds=int(serving.seams.swarm_clock.wall() * 1_000),
                text="bytes" if vocabulary == BYTES else "",
                stops=wish.stops,
            )
            # What a struct may hold is checked where it is read.
            msgspec.msgpack.decode(msgspec.msgpack.encode(manifest), type=ServiceManifest)
        except (ValueError, msgspec.ValidationError) as error:
            raise UsageError(f"{wish.name}: no service can be called or made so: {error}") from None
        service = await serving.begin(manifest, peers)
        await serving.await_ready(service)
        return await self.document(service) | {"is_split": len(ranges) > 1, "was_asked": bool(wish.stages)}

    async def _learn(self, graph: Path, values: Path | None, context: int) -> tuple[bytes, Graph]:
        """Have this node hold the graph that serves a captured model, and its values. Raises UsageError."""
        serving = self._serving
        name, decoded = await serving.models.learn(graph, values)
        served = await serving.seams.executor.run(partial(served_graph, decoded, str(graph), context))
        if served is decoded:
            return name, decoded
        with TemporaryDirectory() as folder:
            path = Path(folder) / f"served{GRAPH_SUFFIX}"
            write = partial(path.write_bytes, encode_graph(served))
            await serving.seams.executor.run(write)
            return await serving.models.learn(path, values)

    async def stop(self, name: str) -> dict[str, Any]:
        """End a service that this node has published. Raises UsageError."""
        service = await self._serving.finder.find(name)
        await self._serving.stop(service)
        return {
            "schema": "peerloom/service-stopped/1",
            "service": service.text,
            "name": service.manifest.name,
        }

    # What there is

    async def services(self) -> dict[str, Any]:
        """Return the services that answer; one that cannot is not among them."""
        rows = []
        for service in await self._serving.finder.all():
            document = await self.document(service)
            if document["answers"]:
                rows.append(document)
        return {"schema": "peerloom/services/1", "services": rows}

    async def document(self, service: Service) -> dict[str, Any]:
        """Return what is known of a service: its stages, and who answers for each."""
        routes = await self._serving.routes(service)
        manifest = service.manifest
        stages = [
            [{"peer": peer_text(each.peer), "sessions": each.sessions} for each in routes.get(stage, ())]
            for stage in range(manifest.stages)
        ]
        return {
            "schema": "peerloom/service/1",
            "service": service.text,
            "name": manifest.name,
            "publisher": peer_text(service.publisher),
            "graph": manifest.graph.hex(),
            "replicas": manifest.replicas,
            "vocabulary": manifest.vocabulary,
            "context": manifest.context,
            "text": manifest.text,
            "stages": stages,
            "answers": all(stages),
        }

    # Asking

    @asynccontextmanager
    async def answering(self, name: str, question: Question) -> AsyncIterator["AnswerStream"]:
        """An answer that lasts as long as the context. Raises UsageError: no such service, or nothing that it
        can be asked; RunFailed: it cannot answer."""
        service = await self._serving.finder.find(name)
        wish = make_wish(service, question, self._serving.seams.entropy)
        async with self._serving.answer(service, wish) as generation:
            yield AnswerStream(service, generation, question)

    async def first_use(self) -> str:
        """Return what a person is told at the first question of this node; empty later."""
        storage, executor = self._serving.seams.storage, self._serving.seams.executor
        if await executor.run(partial(storage.read, _TOLD_NAME)) is not None:
            return ""
        await executor.run(partial(storage.write, _TOLD_NAME, b"1"))
        return PRIVACY


class AnswerStream:
    """The pieces of one answer: of text where the prompt was one, else tokens."""

    def __init__(self, service: Service, generation: Generation, question: Question) -> None:
        self.service = service
        self.generation = generation
        is_text = isinstance(question.prompt, str)
        self._text = TextStream(decode_bytes, question.stops) if is_text else None
        self._is_over = False

    def __aiter__(self) -> "AnswerStream":
        return self

    async def __anext__(self) -> str | int:
        """Return the next piece. Raises RunFailed: the answer cannot go on."""
        while not self._is_over:
            try:
                token = (await anext(self.generation)).token
            except StopAsyncIteration:
                self._is_over = True
                if self._text is not None and (piece := self._text.finish()):
                    return piece
                break
            if self._text is None:
                return token
            piece = self._text.push(token)
            self._is_over = self._text.is_stopped
            if piece:
                return piece
        raise StopAsyncIteration

    def document(self, now: float) -> dict[str, Any]:
        """Return how the answer went, without what it said."""
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
            "first_seconds": None if first is None else first - made.began_at,
            "tokens_per_second": (made.count - 1) / seconds if seconds and made.count > 1 else None,
            "route": [peer_text(peer) for peer in made.route],
        }


def make_wish(service: Service, question: Question, entropy: Callable[[int], bytes]) -> Wish:
    """Return what a door is asked; a seed is drawn where none is given. Raises UsageError."""
    manifest = service.manifest
    if isinstance(question.prompt, str):
        if manifest.text != "bytes":
            raise UsageError(
                f"{manifest.name} takes tokens, and no text of its own",
                "give the tokenizer.json of its model: --tokenizer FILE",
            )
        prompt = tuple(question.prompt.encode("utf-8", "replace"))
    else:
        prompt = tuple(question.prompt)
    if not prompt:
        raise UsageError("prompt: want a text that is not empty")
    if any(not 0 <= token < manifest.vocabulary for token in prompt):
        raise UsageError(
            f"prompt: a token that {manifest.name} does not have; it has {manifest.vocabulary:,}"
        )
    if len(prompt) >= manifest.context:
        raise UsageError(
            f"prompt: {len(prompt):,} tokens; {manifest.name} takes {manifest.context - 1:,}",
            "a shorter prompt",
        )
    if not 1 <= question.tokens_max <= TOKENS_MAX:
        raise UsageError(f"--max-tokens {question.tokens_max}: want 1 to {TOKENS_MAX:,}")
    if len(question.stops) > STOPS_MAX or any(
        not 0 < len(stop) <= STOP_LENGTH_MAX for stop in question.stops
    ):
        raise UsageError(f"--stop: want at most {STOPS_MAX} texts of 1 to {STOP_LENGTH_MAX} letters")
    seed = question.seed
    fields = {
        "temperature": question.temperature,
        "top_k": question.top_k,
        "top_p": question.top_p,
        "min_p": question.min_p,
        "seed": int.from_bytes(entropy(8)) & SEED_MAX if seed is None else seed,
    }
    try:
        sampling = msgspec.convert(fields, Sampling)
    except msgspec.ValidationError as error:
        raise UsageError(f"sampling: {error}", "`peerloom generate --help` has the ranges") from None
    return Wish(prompt, question.tokens_max, sampling, frozenset(manifest.stops))


def captured_files(model: str) -> tuple[Path, Path | None, str]:
    """Return a captured graph, the file of its values if there is one, and a name for a service. Raises
    UsageError: there is no such file."""
    path = Path(model).expanduser()
    how = "docs/serving.md says how to capture a model to be served"
    if path.suffix != GRAPH_SUFFIX:
        raise UsageError(f"{model}: want a FILE{GRAPH_SUFFIX}", how)
    if not path.is_file():
        raise UsageError(f"{model}: there is no such file", how)
    values = path.with_suffix(VALUES_SUFFIX)
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", path.stem).lstrip("._-") or "model"
    return path, values if values.is_file() else None, name


def vocabulary_of(graph: Graph) -> int:
    """Return how many tokens a model tells apart: the last side of its logits. Raises UsageError."""
    entry = graph.entries[0]
    side = graph.types[entry.types[entry.outputs[0]]].shape[-1]
    if not isinstance(side, int):
        raise UsageError("the model's logits have no last side that is fixed")
    return side


def read_question(arguments: Mapping[str, Any]) -> Question:
    """Return what a client asks. Raises UsageError."""
    try:
        return msgspec.convert(dict(arguments), Question)
    except msgspec.ValidationError as error:
        raise UsageError(f"generate: {error}") from None


def read_serve_wish(arguments: Mapping[str, Any]) -> ServeWish:
    """Return how a client wants a model served. Raises UsageError."""
    try:
        return msgspec.convert(dict(arguments), ServeWish)
    except msgspec.ValidationError as error:
        raise UsageError(f"serve: {error}") from None
