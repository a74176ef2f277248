"""`/v1/embeddings`: converts texts, or tokens, to vectors of length one."""

from base64 import b64encode
from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
import numpy as np

from node.web.forms.asking import NAME_LENGTH_MAX, PROMPT_TOKENS_MAX, FormProblem, read_form
from partition.codecs.base import Array

TEXTS_MAX = 2_048
"""Maximum number of texts in one request, as in OpenAI's API."""
TOKENS_TOTAL_MAX = 300_000
"""Maximum number of tokens of all texts together, as in OpenAI's API."""

Texts = tuple[str | tuple[int, ...], ...]

_Ids = Annotated[
    tuple[Annotated[int, msgspec.Meta(ge=0)], ...],
    msgspec.Meta(min_length=1, max_length=PROMPT_TOKENS_MAX),
]
_Texts = Annotated[tuple[str, ...], msgspec.Meta(min_length=1, max_length=TEXTS_MAX)]
_ManyIds = Annotated[tuple[_Ids, ...], msgspec.Meta(min_length=1, max_length=TEXTS_MAX)]


class EmbeddingsRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A client's request. `input` is a text, several texts, the tokens of one, or several lists of tokens."""

    model: Annotated[str, msgspec.Meta(min_length=1, max_length=NAME_LENGTH_MAX)]
    input: str | list[str | int | list[int]]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, msgspec.Meta(ge=1)] | None = None


def read_embeddings(data: bytes) -> tuple[EmbeddingsRequest, Texts]:
    """Return a request, and each of its texts or token lists. This takes milliseconds if they are many.
    Raises FormProblem."""
    request = read_form(data, EmbeddingsRequest)
    return request, _texts_of(request.input)


def _texts_of(given: str | list[str | int | list[int]]) -> Texts:
    if isinstance(given, str):
        return (given,)
    for form in (_Texts, _ManyIds):
        try:
            found: Texts = msgspec.convert(given, form)
            return found
        except msgspec.ValidationError:
            pass
    try:
        return (msgspec.convert(given, _Ids),)
    except msgspec.ValidationError:
        raise FormProblem(
            f"input: must be a text, tokens, or 1 to {TEXTS_MAX:,} of either", field="input"
        ) from None


def embeddings_document(request: EmbeddingsRequest, vectors: Sequence[Array], tokens: int) -> bytes:
    """Return the encoded answer. Each vector is cut to the requested dimensions and normalised."""
    rows = []
    for index, vector in enumerate(vectors):
        wanted = vector[: request.dimensions]
        long = float(np.linalg.norm(wanted))
        unit = (wanted / long if long else wanted).astype("<f4")
        is_text = request.encoding_format == "base64"
        found = b64encode(unit.tobytes()).decode() if is_text else unit.tolist()
        rows.append({"object": "embedding", "index": index, "embedding": found})
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return msgspec.json.encode({"object": "list", "data": rows, "model": request.model, "usage": usage})
