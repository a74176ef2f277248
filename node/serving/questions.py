"""Turns a question to a service into the door's wish: tokens, and how to sample.

A prompt is a text, a chat, or tokens. Texts become tokens in a sandboxed process
(`node.content.fenced_text`), or, where the model is one of bytes, here. Not here: where the answer comes from
(`node.serving.asking`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from node.content.fenced_text import FencedText
from node.content.text_questions import TextFacts
from node.errors import UsageError
from node.protocols.services import ServiceManifest
from partition.serve.door import GenerationWish
from partition.serve.sampling import SEED_MAX, Sampling
from partition.serve.text import STOP_LENGTH_MAX, STOPS_MAX

TOKENS_USUAL = 256
TOKENS_MAX = 1 << 20
MESSAGES_MAX = 1_024
"""The most messages of one chat. The model's context bounds their length."""
SYSTEM, USER, ASSISTANT = "system", "user", "assistant"
ROLES = (SYSTEM, USER, ASSISTANT)


@dataclass(frozen=True)
class Question:
    """A question to a service: a text, a chat (`messages`, each with role and content), or tokens where
    its model has no text. Settings that are None come from the model's folder; without one the likeliest
    token is taken."""

    prompt: str | Sequence[int] = ""
    tokens_max: int = TOKENS_USUAL
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    stops: tuple[str, ...] = ()
    messages: tuple[dict[str, str], ...] = ()
    exact: bool = False

    @property
    def is_text(self) -> bool:
        return bool(self.messages) or isinstance(self.prompt, str)


@dataclass(frozen=True)
class DoorWish:
    """A question as the door takes it. `forgotten` of a chat's oldest messages did not fit, and were left
    out."""

    wish: GenerationWish
    forgotten: int = 0


@dataclass(frozen=True)
class Prompt:
    """The tokens of a question."""

    tokens: tuple[int, ...]
    forgotten: int = 0


async def make_door_wish(
    manifest: ServiceManifest, question: Question, text: FencedText | None, entropy: Callable[[int], bytes]
) -> DoorWish:
    """Return the door's wish; without a seed one is drawn. Raises UsageError, TextLost."""
    check_question(question)
    if manifest.vector:
        raise UsageError(
            f"{manifest.name} gives vectors of texts, and says nothing", "POST /v1/embeddings: docs/api.md"
        )
    prompt = await _prompt(manifest, question, text)
    if not prompt.tokens:
        raise UsageError("prompt: want a text that is not empty")
    if len(prompt.tokens) >= manifest.context:
        raise UsageError(
            f"prompt: {len(prompt.tokens):,} tokens; {manifest.name} takes {manifest.context - 1:,}",
            "a shorter prompt",
        )
    if any(not 0 <= token < manifest.vocabulary for token in prompt.tokens):
        raise UsageError(
            f"prompt: a token that {manifest.name} does not have; it has {manifest.vocabulary:,}"
        )
    sampling = make_sampling(question, text.facts if text is not None else None, entropy)
    wish = GenerationWish(
        prompt.tokens, question.tokens_max, sampling, frozenset(manifest.stops), question.exact
    )
    return DoorWish(wish, prompt.forgotten)


def split_prompt(
    prompt: str | Sequence[int] | Sequence[Mapping[str, str]],
) -> tuple[str | Sequence[int], tuple[dict[str, str], ...]]:
    """Return a prompt as text or tokens, and the messages of a chat. One of the two is empty."""
    if isinstance(prompt, str):
        return prompt, ()
    messages = tuple(dict(each) for each in prompt if isinstance(each, Mapping))
    return ("", messages) if messages else ([each for each in prompt if isinstance(each, int)], ())


def check_question(question: Question) -> None:
    """Raise UsageError for a question that no service accepts."""
    if not 1 <= question.tokens_max <= TOKENS_MAX:
        raise UsageError(f"--max-tokens {question.tokens_max}: want 1 to {TOKENS_MAX:,}")
    if len(question.stops) > STOPS_MAX or any(
        not 0 < len(stop) <= STOP_LENGTH_MAX for stop in question.stops
    ):
        raise UsageError(f"--stop: want at most {STOPS_MAX} texts of 1 to {STOP_LENGTH_MAX} characters")
    if len(question.messages) > MESSAGES_MAX:
        raise UsageError(f"chat: {len(question.messages):,} messages; at most {MESSAGES_MAX:,}")
    for message in question.messages:
        if message.keys() != {"role", "content"} or message["role"] not in ROLES:
            raise UsageError(f"chat: want messages with role ({', '.join(ROLES)}) and content")


async def _prompt(manifest: ServiceManifest, question: Question, text: FencedText | None) -> Prompt:
    if question.messages:
        if text is None or not text.facts.has_template:
            raise UsageError(
                f"{manifest.name} has no chat template to turn a conversation into text",
                "use `peerloom generate`, which continues plain text",
            )
        return await _rendered(manifest, question.messages, text)
    if not isinstance(question.prompt, str):
        return Prompt(tuple(question.prompt))
    if text is not None:
        return Prompt(tuple(await text.encode(question.prompt)))
    if manifest.text != "bytes":
        raise UsageError(
            f"{manifest.name} takes only tokens, no text",
            "give the tokenizer.json of its model: --tokenizer FILE",
        )
    return Prompt(tuple(question.prompt.encode("utf-8", "replace")))


async def _rendered(
    manifest: ServiceManifest, messages: Sequence[dict[str, str]], text: FencedText
) -> Prompt:
    """Return the tokens of a chat, without its oldest messages if it is too long for the model. The
    messages to leave out are found by bisection, because rendering a long chat for every candidate would
    take minutes."""
    head = [each for each in messages[:1] if each["role"] == SYSTEM]
    rest = list(messages[len(head) :])
    tokens = await text.render([*head, *rest])
    if len(tokens) < manifest.context or len(rest) <= 1:
        return Prompt(tuple(tokens))
    # Leave out a question together with its answer, because templates need alternating turns.
    cuts = [*range(2, len(rest), 2), *([len(rest) - 1] if len(rest) % 2 == 0 else [])]
    low, high, found = 0, len(cuts) - 1, dict[int, list[int]]()
    while low < high:
        middle = (low + high) // 2
        found[middle] = await text.render([*head, *rest[cuts[middle] :]])
        low, high = (low, middle) if len(found[middle]) < manifest.context else (middle + 1, high)
    tokens = found.get(low) or await text.render([*head, *rest[cuts[low] :]])
    return Prompt(tuple(tokens), cuts[low])


def make_sampling(question: Question, facts: TextFacts | None, entropy: Callable[[int], bytes]) -> Sampling:
    """Return how tokens are drawn. Raises UsageError."""
    seed = question.seed
    fields = {
        name: usual if asked is None else asked
        for name, asked, usual in (
            ("temperature", question.temperature, facts.temperature if facts else 0.0),
            ("top_k", question.top_k, facts.top_k if facts else 0),
            ("top_p", question.top_p, facts.top_p if facts else 1.0),
            ("min_p", question.min_p, facts.min_p if facts else 0.0),
        )
    }
    fields["seed"] = int.from_bytes(entropy(8)) & SEED_MAX if seed is None else seed
    try:
        return msgspec.convert(fields, Sampling)
    except msgspec.ValidationError as error:
        raise UsageError(f"sampling: {error}", "see the ranges: `peerloom generate --help`") from None
