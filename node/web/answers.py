"""Answers by services, for the HTTP forms. Prompts become tokens, and tokens become pieces of text; the
choices of one request run concurrently.

    answers = await answers_of.open(request, held)     checked and begun; it ends with `held`
    event = await answers.next()                       TextPiece, CallPiece and AnswerEnd, of all choices

Prompts and answers only pass through: no event, log, recording or report contains them.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import trio
from blake3 import blake3

from node.content.calls.answer_parts import CallArguments, CallBegun, CallOver, Part, ReasoningPart, TextPart
from node.content.calls.formats import REASONING
from node.content.calls.reading import AnswerReader, Tools
from node.content.calls.rules import AnswerRule, held_calls
from node.content.fenced_text import FencedText, TextLost
from node.content.text_questions import TextFacts
from node.errors import PeerloomError, UsageError
from node.protocols.services import Service
from node.serving.asking import Asking
from node.serving.generations import Generation, Token
from node.serving.serving import Serving
from node.serving.texts import TextPieces
from node.web.constraints import Constraint
from node.web.forms.asking import (
    AnswerEnd,
    AnswerRequest,
    CallPiece,
    Chat,
    Finish,
    FormProblem,
    Prompt,
    TextPiece,
    TokenSaid,
    TokenUsage,
)
from partition.serve.door import GenerationWish
from partition.serve.sampling import SEED_MAX, Sampling

RETRY_SECONDS = 2.0
"""How long a client should wait before it retries, if a stage has no holder. By then another member has
usually taken over the stage.
"""
WAITING_EVENTS_MAX = 64
"""Maximum number of events of one request that wait for a slow client, while its generations continue."""

CALL_ID_BYTES = 9
SPELLED_MAX = 4_096
"""Maximum number of tokens of one request whose bytes are cached. Usually the same tokens are likely again
and again."""

Event = TextPiece | CallPiece | AnswerEnd


@dataclass(frozen=True)
class PromptTokens:
    """A prompt's tokens. `is_reasoning` means that the prompt ends with the beginning of the model's
    reasoning."""

    tokens: Sequence[int]
    is_reasoning: bool = False
    chat: Chat | None = None


class ServiceText:
    """Converts between text and tokens for one service, in a sandboxed process, or as bytes if there is
    none."""

    def __init__(self, fenced: FencedText | None) -> None:
        self.fenced = fenced
        self._spelled: dict[int, bytes] = {}

    @property
    def facts(self) -> TextFacts | None:
        return None if self.fenced is None else self.fenced.facts

    async def spell(self, tokens: Sequence[int]) -> dict[int, bytes]:
        """Return the bytes of each token. Raises TextLost."""
        if self.fenced is None:
            return {token: bytes([token]) for token in tokens}
        known = self._spelled
        # Copy the entries, because a different choice of the request may clear the cache while this one
        # waits.
        found = {token: known[token] for token in tokens if token in known}
        if missing := [token for token in dict.fromkeys(tokens) if token not in found]:
            new = dict(zip(missing, await self.fenced.spell(missing), strict=True))
            found.update(new)
            if len(known) > SPELLED_MAX:
                known.clear()
            known.update(new)
        return found

    async def tokens(self, name: str, prompt: str | Chat) -> PromptTokens:
        """Return a prompt's tokens. Raises FormProblem."""
        fenced = self.fenced
        try:
            if isinstance(prompt, str):
                data = prompt.encode("utf-8", "replace")
                return PromptTokens(data if fenced is None else await fenced.encode(prompt))
            if fenced is None or not fenced.facts.has_template:
                raise FormProblem(
                    f"{name} has no chat template, which would turn a conversation into one text. "
                    "Use /v1/completions, which continues a text as it is",
                    field="model",
                    code="no_chat_template",
                )
            found = await fenced.render_chat(prompt.turns, prompt.tools, prompt.options)
            marks = REASONING[fenced.facts.reasoning] if fenced.facts.reasoning >= 0 else None
            is_reasoning = marks is not None and found.tail.rstrip().endswith(marks[0])
            return PromptTokens(found.tokens, is_reasoning, prompt)
        except UsageError as error:
            raise FormProblem(error.what) from None
        except TextLost as error:
            raise FormProblem(
                f"{name}: its tokenizer process was ended: {error}",
                kind="failed",
                retry_seconds=RETRY_SECONDS,
            ) from None


@dataclass
class RunningAnswers:
    """The answers to one request. They run while its client wants them."""

    prompt_tokens: int
    events: trio.MemoryReceiveChannel[Event | FormProblem]
    waiting: int
    """Number of choices that are not over."""
    made: dict[int, int] = field(default_factory=dict)
    reasoned: int = 0
    """Number of tokens that belong to reasoning."""
    generations: dict[int, Generation] = field(default_factory=dict)
    prompts: tuple[range, ...] = ()
    """For each prompt, the choices that answer it."""
    _problem: FormProblem | None = None

    @property
    def usage(self) -> TokenUsage:
        """The number of tokens that were read and made so far."""
        return TokenUsage(self.prompt_tokens, sum(self.made.values()), self.reasoned, self._cached)

    @property
    def _cached(self) -> int:
        """Return how many tokens of the prompts had been read before. If a prompt has several answers, all
        except the first reuse what the first one reads."""
        rows = [[self.generations[choice].shared for choice in row if choice in self.generations]
                for row in self.prompts]  # fmt: skip
        return sum(min(row) for row in rows if row)

    async def next(self) -> Event | None:
        """Return the next event; None after the last. Raises FormProblem if an answer cannot continue."""
        if not self.waiting:
            return None
        return self._checked(self._problem or await self.events.receive())

    def next_nowait(self) -> Event | None:
        """Return the next event if it has already come."""
        if self._problem is not None:
            return None
        try:
            found = self.events.receive_nowait()
        except trio.WouldBlock:
            return None
        if isinstance(found, FormProblem):
            self._problem = found  # raised by a later call, after the earlier events
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
    """Answers of the services that a node finds. `open` begins some; `models` lists the services."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._asking = Asking(serving)

    async def models(self) -> list[Mapping[str, Any]]:
        """Return the services that can answer now."""
        return list((await self._asking.services())["services"])

    async def count(self, request: AnswerRequest) -> int:
        """Return the number of tokens of a request's prompts. Raises FormProblem."""
        service = await self._find(request.model)
        async with AsyncExitStack() as held:
            prompts = await self._prompts(service, await self._text(service, held), request)
            return sum(len(prompt.tokens) for prompt in prompts)

    async def open(self, request: AnswerRequest, held: AsyncExitStack, owner: str = "") -> RunningAnswers:
        """Begin all answers of a request; they end with `held`. Cached prompts are never shared between
        owners. Raises FormProblem."""
        service = await self._find(request.model)
        text = await self._text(service, held)
        if request.logprobs is not None and text is None:
            raise FormProblem(
                f"logprobs: {service.manifest.name} gives only tokens, without text",
                field="logprobs",
                code="unsupported_parameter",
            )
        if request.rule is not None and text is None:
            raise FormProblem(
                f"{request.rule_field}: {service.manifest.name} gives only tokens, without text",
                field=request.rule_field,
                code="unsupported_parameter",
            )
        prompts = await self._prompts(service, text, request)
        entropy = self._serving.seams.entropy
        wishes = [
            (prompt, _wish(service, request, tuple(prompt.tokens), choice, entropy, owner))
            for prompt in prompts
            for choice in range(request.choices)
        ]
        send, receive = trio.open_memory_channel[Event | FormProblem](WAITING_EVENTS_MAX)
        count = request.choices
        rows = tuple(range(first * count, (first + 1) * count) for first in range(len(prompts)))
        read = sum(len(prompt.tokens) for prompt in prompts)
        found = RunningAnswers(read, receive, len(wishes), prompts=rows)
        nursery = await held.enter_async_context(trio.open_nursery())
        held.callback(nursery.cancel_scope.cancel)
        for choice, (prompt, wish) in enumerate(wishes):
            answer = _Choice(choice, service, text, request, prompt, found, send)
            problem = await nursery.start(answer.run, self._serving, self._asking, wish)
            if problem is not None:
                raise problem
        return found

    async def _find(self, name: str) -> Service:
        try:
            service = await self._serving.finder.find(name)
        except UsageError as error:
            raise FormProblem(error.what, kind="missing", field="model") from None
        if service.manifest.vector:
            raise FormProblem(f"{name} computes vectors of texts. Use /v1/embeddings", field="model")
        return service

    async def _text(self, service: Service, held: AsyncExitStack) -> ServiceText | None:
        """Return the text codec of a service; None if the model takes only tokens. Raises FormProblem."""
        if service.manifest.text == "tokenizer":
            try:
                return ServiceText(await held.enter_async_context(self._asking.reading(service)))
            except PeerloomError as error:
                raise FormProblem(error.what, kind="failed", retry_seconds=RETRY_SECONDS) from None
        return ServiceText(None) if service.manifest.text == "bytes" else None

    async def _prompts(
        self, service: Service, text: ServiceText | None, request: AnswerRequest
    ) -> list[PromptTokens]:
        manifest = service.manifest
        found = [await self._tokens(service, text, prompt) for prompt in request.prompts]
        for each in found:
            tokens = each.tokens
            if not tokens:
                raise FormProblem("prompt: must not be empty", field="prompt")
            if min(tokens) < 0 or max(tokens) >= manifest.vocabulary:
                raise FormProblem(
                    (
                        f"prompt: contains a token that {manifest.name} does not have; it has "
                        f"{manifest.vocabulary:,}"
                    ),
                    field="prompt",
                )
        return found

    async def _tokens(self, service: Service, text: ServiceText | None, prompt: Prompt) -> PromptTokens:
        manifest = service.manifest
        if isinstance(prompt, tuple):
            found = PromptTokens(prompt)
        elif text is None:
            raise FormProblem(f"{manifest.name} takes only tokens, no text", field="model")
        else:
            found = await text.tokens(manifest.name, prompt)
        # Check the length before each token is checked: checking millions of tokens would block all streams.
        if len(found.tokens) >= manifest.context:
            raise FormProblem(
                (
                    f"{len(found.tokens):,} tokens are too many; {manifest.name} takes at "
                    f"most {manifest.context - 1:,}"
                ),
                code="context_length_exceeded",
            )
        return replace(found, tokens=tuple(found.tokens))


@dataclass
class _Choice:
    """One choice: an answer to a request."""

    number: int
    service: Service
    text: ServiceText | None
    request: AnswerRequest
    prompt: PromptTokens
    whole: RunningAnswers
    events: trio.MemorySendChannel[Event | FormProblem]

    def __post_init__(self) -> None:
        self._reader = _reader_of(self.prompt, self.text, self.request)
        self._call_id = ""
        self._said: list[TokenSaid] = []

    async def run(
        self,
        serving: Serving,
        asking: Asking,
        wish: GenerationWish,
        task_status: trio.TaskStatus[FormProblem | None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Send the events of this answer; report a problem at the start through `task_status`."""
        is_open = False
        self._call_id = serving.seams.entropy(CALL_ID_BYTES).hex()
        try:
            async with AsyncExitStack() as held:
                constraint = await self._constraint(serving, asking, held)
                first = None if constraint is None else await constraint.begin()
                wish = replace(wish, is_masked=constraint is not None)
                generation = await held.enter_async_context(serving.answer(self.service, wish))
                if not generation.route and not generation.is_following:
                    name = self.service.manifest.name
                    raise FormProblem(
                        f"{name}: no peer holds one of its stages now. Try again",
                        kind="failed",
                        retry_seconds=RETRY_SECONDS,
                    )
                is_open = True
                self.whole.generations[self.number] = generation
                task_status.started(None)
                if first is not None:
                    generation.permit(first)
                fenced = None if self.text is None else self.text.fenced
                is_marked = self._reader is not None
                pieces = serving.texts.pieces(fenced, self.request.stops, is_marked=is_marked)
                await self._tell(generation, await held.enter_async_context(pieces), constraint)
        except (FormProblem, PeerloomError, TextLost) as error:
            problem = error
            if not isinstance(problem, FormProblem):
                problem = FormProblem(str(error), kind="failed", retry_seconds=RETRY_SECONDS)
            if is_open:
                await self.events.send(problem)
            else:
                task_status.started(problem)

    async def _constraint(self, serving: Serving, asking: Asking, held: AsyncExitStack) -> Constraint | None:
        rule = self.request.rule
        if rule is None:
            return None
        facts = None if self.text is None else self.text.facts
        if facts is not None and self.prompt.chat is not None:
            rule = _rule_for(rule, facts, self.prompt)
        if rule is None:
            return None
        number = serving.texts.next_stream()
        found = Constraint(asking, self.service, rule, number, self.request.rule_field)
        held.push_async_callback(found.aclose)
        return found

    async def _tell(self, generation: Generation, pieces: TextPieces, constraint: Constraint | None) -> None:
        made, most = self.whole.made, self.request.calls_max
        made[self.number] = 0
        async for token in generation:
            made[self.number] += 1
            if constraint is not None:
                generation.permit(await constraint.advance(token.token))
            if self.request.logprobs is not None:
                self._said.append(await self._spelled(token))
            if self._reader is not None:
                self.whole.reasoned += self._reader.is_reasoning
            await self._send(await pieces.push(token.token))
            if pieces.is_stopped or (self._reader is not None and most and self._reader.calls >= most):
                break
        else:
            await self._send(await pieces.finish(), is_last=True)
        if pieces.is_stopped:
            await self._send("", is_last=True)
        finish = generation.finish
        is_cut = not pieces.is_stopped and finish is not None and finish.reason == "length"
        has_calls = self._reader is not None and bool(self._reader.calls)
        reason: Finish = "length" if is_cut else "tool_calls" if has_calls else "stop"
        await self.events.send(AnswerEnd(self.number, reason, pieces.stopped_by or None))

    async def _send(self, text: str, *, is_last: bool = False) -> None:
        """Send more text, as text or reasoning."""
        if self._reader is None:
            if text:
                await self._send_text(text)
            return
        parts = self._reader.push(text) if text else []
        for part in parts + (self._reader.finish() if is_last else []):
            await self._send_part(part)

    async def _send_part(self, part: Part) -> None:
        match part:
            case TextPart(text=text):
                await self._send_text(text)
            case ReasoningPart(text=text):
                await self._send_text(text, is_reasoning=True)
            case CallBegun(number=number, name=name):
                await self.events.send(CallPiece(self.number, number, self._id_of(number), name))
            case CallArguments(number=number, text=text):
                await self.events.send(CallPiece(self.number, number, self._id_of(number), arguments=text))
            case CallOver(number=number):
                await self.events.send(CallPiece(self.number, number, self._id_of(number), is_over=True))

    def _id_of(self, number: int) -> str:
        return f"call_{self._call_id}{number:02x}"

    async def _send_text(self, text: str, *, is_reasoning: bool = False) -> None:
        said, self._said = self._said, []
        await self.events.send(TextPiece(self.number, text, tuple(said), is_reasoning))

    async def _spelled(self, token: Token) -> TokenSaid:
        top = token.top[: self.request.logprobs]
        assert self.text is not None, "checked when it was asked"
        known = await self.text.spell([token.token, *(each for each, _ in top)])
        said = [
            TokenSaid(known[each].decode("utf-8", "replace"), known[each], logprob) for each, logprob in top
        ]
        data = known[token.token]
        return TokenSaid(data.decode("utf-8", "replace"), data, token.logprob, tuple(said))


def _reader_of(prompt: PromptTokens, text: ServiceText | None, request: AnswerRequest) -> AnswerReader | None:
    """Return a parser for an answer's calls and reasoning; None if it is plain text."""
    facts = None if text is None else text.facts
    chat = prompt.chat
    if facts is None or chat is None:
        return None
    calls = facts.calls
    if request.rule is not None:
        calls = held_calls(request.rule, calls) or calls
    if not chat.tools and facts.reasoning < 0 and calls != "harmony":
        return None
    return AnswerReader(calls, facts.reasoning, is_reasoning=prompt.is_reasoning, tools=_schemas(chat.tools))


def _schemas(tools: Sequence[Mapping[str, Any]]) -> Tools:
    return {str(tool["function"].get("name")): tool["function"].get("parameters") or {} for tool in tools}


def _rule_for(rule: AnswerRule, facts: TextFacts, prompt: PromptTokens) -> AnswerRule | None:
    """Return a rule for a model's chats, with its format of calls and with its reasoning before the answer;
    None if its calls cannot be constrained."""
    calls = held_calls(rule, facts.calls)
    if calls is None:
        return None
    return msgspec.structs.replace(
        rule, calls=calls, reasoning=facts.reasoning, is_reasoning=prompt.is_reasoning
    )


def _wish(
    service: Service,
    request: AnswerRequest,
    prompt: tuple[int, ...],
    choice: int,
    entropy: Callable[[int], bytes],
    owner: str = "",
) -> GenerationWish:
    """Return the generation request for one choice. Raises FormProblem."""
    manifest = service.manifest
    seed = int.from_bytes(entropy(8)) if request.seed is None else request.seed
    if choice:  # the choices for one seed differ from each other, but are reproducible
        seed = int.from_bytes(blake3(b"peerloom choice %d of %d" % (choice, seed)).digest(8))
    if any(token >= manifest.vocabulary for token, _ in request.biases):
        raise FormProblem(
            f"logit_bias: contains a token that {manifest.name} does not have", field="logit_bias"
        )
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
            request.repetition_penalty,
        )
    except ValueError as error:
        raise FormProblem(f"sampling: {error}") from None
    tokens_max = min(request.tokens_max or manifest.context, manifest.context - len(prompt))
    return GenerationWish(prompt, tokens_max, sampling, frozenset(manifest.stops), owner=owner)
