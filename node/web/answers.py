"""Answers by services, for the HTTP forms: prompts become tokens, and tokens pieces of text; choices of one
request go side by side.

    answers = await answers_of.open(request, held)     checked and begun; it ends with `held`
    async for event in answers: ...                    TextPiece and AnswerEnd, of all choices

Prompts and answers pass through here and stand nowhere else: in no event, log, recording or report.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import trio
from blake3 import blake3

from node.errors import PeerloomError, UsageError
from node.protocols.services import Service
from node.serving.asking import Asking
from node.serving.generations import Generation, Token
from node.serving.serving import Serving
from node.web.forms.asking import (
    AnswerEnd,
    AnswerRequest,
    Chat,
    FormProblem,
    Prompt,
    TextPiece,
    TokenSaid,
    Usage,
)
from partition.serve.door import Wish
from partition.serve.sampling import SEED_MAX, Sampling
from partition.serve.text import TextStream, decode_bytes

RETRY_SECONDS = 2.0
"""When a client may ask again where nobody answers for a stage: another member has taken it by then."""
WAITING_EVENTS_MAX = 64
"""Events of one request that wait for a client that reads slowly; its generations go on meanwhile."""

Event = TextPiece | AnswerEnd


class TokenText(Protocol):
    """How one service takes and gives text."""

    has_template: bool

    async def encode(self, text: str) -> Sequence[int]: ...
    async def render(self, chat: Chat) -> Sequence[int]: ...
    def token_bytes(self, token: int) -> bytes: ...
    def stream(self, stops: Sequence[str]) -> TextStream: ...


class BytesText:
    """A model of bytes: a text is its bytes. It has no template."""

    has_template = False

    async def encode(self, text: str) -> Sequence[int]:
        await trio.lowlevel.checkpoint()
        return text.encode("utf-8", "replace")

    async def render(self, chat: Chat) -> Sequence[int]:  # noqa: ARG002 - as in TokenText
        raise FormProblem("it has no chat template")

    def token_bytes(self, token: int) -> bytes:
        return bytes([token])

    def stream(self, stops: Sequence[str]) -> TextStream:
        return TextStream(decode_bytes, stops)


@dataclass
class RunningAnswers:
    """The answers to one request, while its client wants them."""

    prompt_tokens: int
    events: trio.MemoryReceiveChannel[Event | FormProblem]
    waiting: int
    """Choices that are not over."""
    made: dict[int, int] = field(default_factory=dict)
    _problem: FormProblem | None = None

    @property
    def usage(self) -> Usage:
        """Return the tokens that were read and made so far."""
        return Usage(self.prompt_tokens, sum(self.made.values()))

    async def next(self) -> Event | None:
        """Return the next event, None after the last. Raises FormProblem: an answer cannot go on."""
        if not self.waiting:
            return None
        return self._checked(self._problem or await self.events.receive())

    def next_nowait(self) -> Event | None:
        """Return the next event if it has come."""
        if self._problem is not None:
            return None
        try:
            found = self.events.receive_nowait()
        except trio.WouldBlock:
            return None
        if isinstance(found, FormProblem):
            self._problem = found  # told next, after what came before it
            return None
        return self._checked(found)

    def _checked(self, found: Event | FormProblem) -> Event:
        if isinstance(found, FormProblem):
            found.is_begun = bool(self.usage.made)
            raise found
        if isinstance(found, AnswerEnd):
            self.waiting -= 1
        return found


class ServiceAnswers:
    """One node's: `open` begins, `models` lists."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._asking = Asking(serving)

    async def models(self) -> list[Mapping[str, Any]]:
        """Return the services that answer now."""
        return list((await self._asking.services())["services"])

    async def count(self, request: AnswerRequest) -> int:
        """Return the tokens of a request's prompts. Raises FormProblem."""
        service = await self._find(request.model)
        return sum(map(len, await self._prompts(service, request)))

    async def open(self, request: AnswerRequest, held: AsyncExitStack) -> RunningAnswers:
        """Begin all answers of a request; they end with `held`. Raises FormProblem."""
        service = await self._find(request.model)
        text = self._text(service)
        prompts = await self._prompts(service, request)
        wishes = [
            _wish(service, request, prompt, choice, self._serving.seams.entropy)
            for prompt in prompts
            for choice in range(request.choices)
        ]
        send, receive = trio.open_memory_channel[Event | FormProblem](WAITING_EVENTS_MAX)
        found = RunningAnswers(sum(map(len, prompts)), receive, len(wishes))
        nursery = await held.enter_async_context(trio.open_nursery())
        held.callback(nursery.cancel_scope.cancel)
        for choice, wish in enumerate(wishes):
            answer = _Choice(choice, service, text, request, found, send)
            problem = await nursery.start(answer.run, self._serving, wish)
            if problem is not None:
                raise problem
        return found

    async def _find(self, name: str) -> Service:
        try:
            return await self._serving.finder.find(name)
        except UsageError as error:
            raise FormProblem(error.what, kind="missing", field="model") from None

    def _text(self, service: Service) -> TokenText | None:
        return BytesText() if service.manifest.text == "bytes" else None

    async def _prompts(self, service: Service, request: AnswerRequest) -> list[tuple[int, ...]]:
        text, manifest = self._text(service), service.manifest
        found = [await self._tokens(manifest.name, text, prompt) for prompt in request.prompts]
        for tokens in found:
            if not tokens:
                raise FormProblem("prompt: want one that is not empty", field="prompt")
            if any(not 0 <= token < manifest.vocabulary for token in tokens):
                raise FormProblem(
                    f"prompt: a token that {manifest.name} does not have; it has {manifest.vocabulary:,}",
                    field="prompt",
                )
            if len(tokens) >= manifest.context:
                raise FormProblem(
                    f"{len(tokens):,} tokens, and {manifest.name} takes at most {manifest.context - 1:,}",
                    code="context_length_exceeded",
                )
        return found

    async def _tokens(self, name: str, text: TokenText | None, prompt: Prompt) -> tuple[int, ...]:
        if isinstance(prompt, tuple):
            return prompt
        if text is None:
            raise FormProblem(f"{name} takes tokens, and no text of its own", field="model")
        if isinstance(prompt, str):
            return tuple(await text.encode(prompt))
        if not text.has_template:
            raise FormProblem(
                f"{name} has no chat template, by which a conversation becomes one text: "
                "ask /v1/completions, which goes on from a text as it is",
                field="model",
                code="no_chat_template",
            )
        return tuple(await text.render(prompt))


@dataclass
class _Choice:
    """One answer of a request."""

    number: int
    service: Service
    text: TokenText | None
    request: AnswerRequest
    whole: RunningAnswers
    events: trio.MemorySendChannel[Event | FormProblem]

    async def run(
        self,
        serving: Serving,
        wish: Wish,
        task_status: trio.TaskStatus[FormProblem | None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Send the events of this answer; report a problem at the start through `task_status`."""
        is_open = False
        try:
            async with serving.answer(self.service, wish) as generation:
                if not generation.route:
                    name = self.service.manifest.name
                    raise FormProblem(
                        f"{name}: nobody answers for a stage of it now; ask again",
                        kind="failed",
                        retry_seconds=RETRY_SECONDS,
                    )
                is_open = True
                task_status.started(None)
                await self._tell(generation)
        except (FormProblem, PeerloomError) as error:
            problem = error
            if not isinstance(problem, FormProblem):
                problem = FormProblem(str(error), kind="failed", retry_seconds=RETRY_SECONDS)
            if is_open:
                await self.events.send(problem)
            else:
                task_status.started(problem)

    async def _tell(self, generation: Generation) -> None:
        stream = None if self.text is None else self.text.stream(self.request.stops)
        said: list[TokenSaid] = []
        self.whole.made[self.number] = 0
        async for token in generation:
            self.whole.made[self.number] += 1
            if self.request.logprobs is not None:
                said.append(self._said(token))
            piece = "" if stream is None else stream.push(token.token)
            if piece:
                await self.events.send(TextPiece(self.number, piece, tuple(said)))
                said.clear()
            if stream is not None and stream.is_stopped:
                break
        rest = "" if stream is None else stream.finish()
        if rest:
            await self.events.send(TextPiece(self.number, rest, tuple(said)))
        stop = stream.stopped_by or None if stream is not None else None
        is_cut = stop is None and generation.finish is not None and generation.finish.reason == "length"
        await self.events.send(AnswerEnd(self.number, "length" if is_cut else "stop", stop))

    def _said(self, token: Token) -> TokenSaid:
        top = tuple(self._one(each, logprob) for each, logprob in token.top[: self.request.logprobs])
        return replace(self._one(token.token, token.logprob), top=top)

    def _one(self, token: int, logprob: float) -> TokenSaid:
        data = b"" if self.text is None else self.text.token_bytes(token)
        return TokenSaid(data.decode("utf-8", "replace"), data, logprob)


def _wish(
    service: Service,
    request: AnswerRequest,
    prompt: tuple[int, ...],
    choice: int,
    entropy: Callable[[int], bytes],
) -> Wish:
    """Return what a door is asked for one choice. Raises FormProblem."""
    manifest = service.manifest
    seed = int.from_bytes(entropy(8)) if request.seed is None else request.seed
    if choice:  # choices of one seed differ, and are the same each time
        seed = int.from_bytes(blake3(b"peerloom choice %d of %d" % (choice, seed)).digest(8))
    if any(token >= manifest.vocabulary for token, _ in request.biases):
        raise FormProblem(f"logit_bias: a token that {manifest.name} does not have", field="logit_bias")
    try:
        sampling = Sampling(
            request.temperature,
            request.top_k,
            request.top_p,
            request.min_p,
            seed & SEED_MAX,
            request.frequency_penalty,
            request.presence_penalty,
            request.biases,
            request.logprobs or 0,
        )
    except ValueError as error:
        raise FormProblem(f"sampling: {error}") from None
    tokens_max = min(request.tokens_max or manifest.context, manifest.context - len(prompt))
    return Wish(prompt, tokens_max, sampling, frozenset(manifest.stops))
