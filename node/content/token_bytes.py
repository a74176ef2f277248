"""The bytes of each token of a tokenizer, derived from its decoder.

A text of many tokens may be cut anywhere, so a token need not consist of whole characters. Special tokens
stand for no text.
"""

import json
import re
from typing import Any

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""The form in which SentencePiece tokenizers name a token of one byte."""
_SPACE = "\u2581"
"""The character that SentencePiece tokenizers write for a space."""
_WORD_PIECE = "##"


def byte_letters() -> dict[str, int]:
    """Return the byte for each character of a byte-level tokenizer, as in GPT-2's table."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    found = {chr(each): each for each in shown}
    hidden = [each for each in range(256) if each not in set(shown)]
    return found | {chr(256 + number): each for number, each in enumerate(hidden)}


def special_ids(known: Any) -> dict[int, str]:
    """Return the special tokens of a tokenizer, by id."""
    added = known.get_added_tokens_decoder()
    return {number: token.content for number, token in added.items() if token.special}


def token_bytes(known: Any, count: int) -> list[bytes]:
    """Return the bytes of the tokens 0 to `count` - 1. They are empty for special tokens and unused ids."""
    kinds = _decoders(known)
    letters = byte_letters()
    added = known.get_added_tokens_decoder()
    found = [b""] * count
    for text, number in known.get_vocab(with_added_tokens=True).items():
        if number in added:
            found[number] = b"" if added[number].special else text.encode("utf-8", "replace")
        elif "ByteLevel" in kinds:
            found[number] = _of_letters(text, letters)
        elif "WordPiece" in kinds:
            is_inner = text.startswith(_WORD_PIECE)
            found[number] = (text[len(_WORD_PIECE) :] if is_inner else f" {text}").encode("utf-8", "replace")
        elif match := _BYTE.fullmatch(text):
            found[number] = bytes([int(match.group(1), 16)])
        else:
            found[number] = text.replace(_SPACE, " ").encode("utf-8", "replace")
    return found


def _of_letters(text: str, letters: dict[str, int]) -> bytes:
    if all(letter in letters for letter in text):
        return bytes(letters[letter] for letter in text)
    return text.encode("utf-8", "replace")


def _decoders(known: Any) -> set[str]:
    """Return the kinds of decoders of a tokenizer."""
    if known.decoder is None:
        return set()
    state = json.loads(known.decoder.__getstate__())
    return {each["type"] for each in state.get("decoders", [state])}
