"""Vectors of texts from served encoders, for `/v1/embeddings`. Texts only pass through and are not stored."""

from contextlib import AsyncExitStack
from functools import partial

import trio

from node.content.fenced_text import FencedText, TextLost
from node.errors import PeerloomError, UsageError
from node.protocols.services import Service
from node.serving.asking import Asking
from node.serving.serving import Serving
from node.web.answers import RETRY_SECONDS
from node.web.forms.asking import FormProblem
from node.web.forms.embeddings import TOKENS_TOTAL_MAX, EmbeddingsRequest, Texts, embeddings_document
from partition.codecs.base import Array
from partition.serve.door import GenerationWish
from partition.serve.sampling import Sampling

AT_ONCE_MAX = 16
"""Maximum number of texts of one request that are computed in parallel: as many sessions as a provider grants
one door."""
SHORT_NUMBERS = 1 << 14
"""Maximum number of values that are encoded in the event loop; more take milliseconds, which would block
it."""


class ServiceVectors:
    """Vectors from the services that a node finds."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._asking = Asking(serving)

    async def embed(self, request: EmbeddingsRequest, texts: Texts, held: AsyncExitStack) -> bytes:
        """Return the encoded answer to a request, with a vector for each text. Raises FormProblem."""
        service = await self._find(request)
        prompts = await self._tokens(service, texts, held)
        vectors = await self._vectors(service, prompts)
        write = partial(embeddings_document, request, vectors, sum(map(len, prompts)))
        if len(vectors) * service.manifest.vector <= SHORT_NUMBERS:
            return write()
        return await self._serving.seams.executor.run(write)

    async def _find(self, request: EmbeddingsRequest) -> Service:
        try:
            service = await self._serving.finder.find(request.model)
        except UsageError as error:
            raise FormProblem(error.what, kind="missing", field="model") from None
        name, vector = service.manifest.name, service.manifest.vector
        if not vector:
            raise FormProblem(
                f"{name} is a language model and has no embeddings. Use an encoder", field="model"
            )
        if request.dimensions is not None and request.dimensions > vector:
            raise FormProblem(f"dimensions: {name} has {vector:,}", field="dimensions")
        return service

    async def _tokens(self, service: Service, texts: Texts, held: AsyncExitStack) -> list[tuple[int, ...]]:
        fenced: FencedText | None = None
        manifest = service.manifest
        if any(isinstance(text, str) for text in texts):
            if manifest.text != "tokenizer":
                raise FormProblem(f"{manifest.name} takes only tokens, no text", field="model")
            try:
                fenced = await held.enter_async_context(self._asking.reading(service))
            except PeerloomError as error:
                raise FormProblem(error.what, kind="failed", retry_seconds=RETRY_SECONDS) from None
        found: list[tuple[int, ...]] = []
        total = 0
        for number, text in enumerate(texts):
            tokens = await _encoded(manifest.name, fenced, text)
            where = f"input[{number}]"
            if not tokens:
                raise FormProblem(f"{where}: the text must not be empty", field="input")
            if len(tokens) > manifest.context:
                raise FormProblem(
                    (
                        f"{where}: {len(tokens):,} tokens are too many; {manifest.name} takes "
                        f"at most {manifest.context:,}"
                    ),
                    field="input",
                    code="context_length_exceeded",
                )
            if (total := total + len(tokens)) > TOKENS_TOTAL_MAX:
                raise FormProblem(
                    f"input: more than {TOKENS_TOTAL_MAX:,} tokens in one request", field="input"
                )
            # Check each token only now, when their number is known to be small.
            if max(tokens) >= manifest.vocabulary:
                raise FormProblem(
                    f"{where}: contains a token that {manifest.name} does not have", field="input"
                )
            found.append(tokens)
        return found

    async def _vectors(self, service: Service, prompts: list[tuple[int, ...]]) -> list[Array]:
        found: dict[int, Array] = {}
        problems: list[FormProblem] = []
        turns = trio.CapacityLimiter(AT_ONCE_MAX)
        async with trio.open_nursery() as nursery:

            async def embed(number: int, prompt: tuple[int, ...]) -> None:
                async with turns:
                    try:
                        found[number] = await self._vector(service, prompt)
                    except FormProblem as problem:
                        problems.append(problem)
                        nursery.cancel_scope.cancel()

            for number, prompt in enumerate(prompts):
                nursery.start_soon(embed, number, prompt)
        if problems:
            raise problems[0]
        return [found[number] for number in range(len(prompts))]

    async def _vector(self, service: Service, prompt: tuple[int, ...]) -> Array:
        wish = GenerationWish(prompt, 1, Sampling(), is_vector=True)
        try:
            async with self._serving.answer(service, wish) as generation:
                async for _ in generation:
                    pass
                if generation.vector is not None:
                    return generation.vector
        except PeerloomError as error:
            raise FormProblem(str(error), kind="failed", retry_seconds=RETRY_SECONDS) from None
        raise FormProblem(
            f"{service.manifest.name}: the answer broke off", kind="failed", retry_seconds=RETRY_SECONDS
        )


async def _encoded(name: str, fenced: FencedText | None, text: str | tuple[int, ...]) -> tuple[int, ...]:
    if not isinstance(text, str):
        return text
    assert fenced is not None
    try:
        return tuple(await fenced.encode(text))
    except UsageError as error:
        raise FormProblem(error.what, field="input") from None
    except TextLost as error:
        raise FormProblem(
            f"{name}: its tokenizer process was ended: {error}", kind="failed", retry_seconds=RETRY_SECONDS
        ) from None
