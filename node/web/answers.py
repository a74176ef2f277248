"""Answers by services, for the HTTP forms: prompts become tokens, and tokens pieces of text; choices of one
request go side by side.

    answers = await answers_of.open(request, held)     checked and begun; it ends with `held`
    event = await answers.next()                       TextPiece and AnswerEnd, of all choices

Prompts and answers pass through here and stand nowhere else: in no event, log, recording or report.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import trio
from blake3 import blake3

from node.content.fenced_text import FencedText, TextLost
from node.errors import PeerloomError, UsageError
from node.protocols.services import Service
from node.serving.asking import Asking
from node.serving.generations import Generation, Token
from node.serving.serving import Serving
from node.serving.texts import TextPieces
from node.web.forms.asking import (
    AnswerEnd,
    AnswerRequest,
    Chat,
    FormProblem,
    Prompt,
    TextPiece,
    TokenSaid,
    TokenUsage,
)
from partition.serve.door import Wish
from partition.serve.sampling import SEED_MAX, Sampling

RETRY_SECONDS = 2.0
"""When a client may ask again where nobody answers for a stage: another member has taken it by then."""
WAITING_EVENTS_MAX = 64
"""Events of one request that wait for a client that reads slowly; its generations go on meanwhile."""

Event = TextPiece | AnswerEnd


class ServiceText:
    """How one service takes and gives text: by a fenced process, or as bytes where there is none."""

    def __init__(self, fenced: FencedText | None) -> None:
        self.fenced = fenced

    async def tokens(self, name: str, prompt: str | Chat) -> Sequence[int]:
        """Return a prompt's tokens. Raises FormProblem."""
        fenced = self.fenced
        try:
            if isinstance(prompt, str):
                return prompt.encode("utf-8", "replace") if fenced is None else await fenced.encode(prompt)
            if fenced is None or not fenced.facts.has_template:
                raise FormProblem(
                    f"{name} has no chat template, by which a conversation becomes one text: "
                    "ask /v1/completions, which goes on from a text as it is",
                    field="model",
                    code="no_chat_template",
                )
            return await fenced.render(prompt.turns, prompt.tools)
        except UsageError as error:
            raise FormProblem(error.what) from None
        except TextLost as error:
            raise FormProblem(
                f"{name}: its tokenizer was ended: {error}", kind="failed", retry_seconds=RETRY_SECONDS
            ) from None


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
    def usage(self) -> TokenUsage:
        """Return the tokens that were read and made so far."""
        return TokenUsage(self.prompt_tokens, sum(self.made.values()))

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
    """Answers of the services that a node finds: `open` begins some, `models` lists the services."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._asking = Asking(serving)

    async def models(self) -> list[Mapping[str, Any]]:
        """Return the services that answer now."""
        return list((await self._asking.services())["services"])

    async def count(self, request: AnswerRequest) -> int:
        """Return the tokens of a request's prompts. Raises FormProblem."""
        service = await self._find(request.model)
        async with AsyncExitStack() as held:
            return sum(map(len, await self._prompts(service, await self._text(service, held), request)))

    async def open(self, request: AnswerRequest, held: AsyncExitStack, owner: str = "") -> RunningAnswers:
        """Begin all answers of a request; they end with `held`. What was read for one `owner` is read again
        for any other. Raises FormProblem."""
        service = await self._find(request.model)
        text = await self._text(service, held)
        if request.logprobs is not None and (text is None or text.fenced is not None):
            raise FormProblem(
                f"logprobs: {service.manifest.name} is none of the models that tell them: those of bytes",
                field="logprobs",
                code="unsupported_parameter",
            )
        prompts = await self._prompts(service, text, request)
        wishes = [
            _wish(service, request, prompt, choice, self._serving.seams.entropy, owner)
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

    async def _text(self, service: Service, held: AsyncExitStack) -> ServiceText | None:
        """Return what makes tokens of texts, None where the model takes tokens alone. Raises FormProblem."""
        if service.manifest.text == "tokenizer":
            try:
                return ServiceText(await held.enter_async_context(self._asking.reading(service)))
            except PeerloomError as error:
                raise FormProblem(error.what, kind="failed", retry_seconds=RETRY_SECONDS) from None
        return ServiceText(None) if service.manifest.text == "bytes" else None

    async def _prompts(
        self, service: Service, text: ServiceText | None, request: AnswerRequest
    ) -> list[tuple[int, ...]]:
        manifest = service.manifest
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

    async def _tokens(self, name: str, text: ServiceText | None, prompt: Prompt) -> tuple[int, ...]:
        if isinstance(prompt, tuple):
            return prompt
        if text is None:
            raise FormProblem(f"{name} takes tokens, and no text of its own", field="model")
        return tuple(await text.tokens(name, prompt))


@dataclass
class _Choice:
    """One answer of a request."""

    number: int
    service: Service
    text: ServiceText | None
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
                fenced = None if self.text is None else self.text.fenced
                async with serving.texts.pieces(fenced, self.request.stops) as pieces:
                    await self._tell(generation, pieces)
        except (FormProblem, PeerloomError, TextLost) as error:
            problem = error
            if not isinstance(problem, FormProblem):
                problem = FormProblem(str(error), kind="failed", retry_seconds=RETRY_SECONDS)
            if is_open:
                await self.events.send(problem)
            else:
                task_status.started(problem)

    async def _tell(self, generation: Generation, pieces: TextPieces) -> None:
        said: list[TokenSaid] = []
        made = self.whole.made
        made[self.number] = 0
        async for token in generation:
            made[self.number] += 1
            if self.request.logprobs is not None:
                said.append(self._said(token))
            if piece := await pieces.push(token.token):
                await self.events.send(TextPiece(self.number, piece, tuple(said)))
                said.clear()
            if pieces.is_stopped:
                break
        if rest := await pieces.finish():
            await self.events.send(TextPiece(self.number, rest, tuple(said)))
        finish = generation.finish
        is_cut = not pieces.is_stopped and finish is not None and finish.reason == "length"
        ending = AnswerEnd(self.number, "length" if is_cut else "stop", pieces.stopped_by or None)
        await self.events.send(ending)

    def _said(self, token: Token) -> TokenSaid:
        top = tuple(self._one(each, logprob) for each, logprob in token.top[: self.request.logprobs])
        return replace(self._one(token.token, token.logprob), top=top)

    def _one(self, token: int, logprob: float) -> TokenSaid:
        data = bytes([token])
        return TokenSaid(data.decode("utf-8", "replace"), data, logprob)


def _wish(
    service: Service,
    request: AnswerRequest,
    prompt: tuple[int, ...],
    choice: int,
    entropy: Callable[[int], bytes],
    owner: str = "",
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
    return Wish(prompt, tokens_max, sampling, frozenset(manifest.stops), owner=owner)
