"""Suggests the word that somebody probably meant, for unknown flags, keys, variables and commands."""

import difflib
from collections.abc import Sequence


def nearest(word: str, known: Sequence[str], *, cutoff: float = 0.6) -> str | None:
    """Return the likeliest of `known`; None if none is similar (`cutoff` is difflib's ratio, 0 to 1)."""
    word = word.lower()
    close = difflib.get_close_matches(word, known, n=5, cutoff=cutoff)
    # Among equally similar words prefer the one with the same letters: --jion is --join, not --json.
    same_letters = [candidate for candidate in close if sorted(candidate) == sorted(word)]
    return next(iter(same_letters or close), None)


def did_you_mean(word: str, known: Sequence[str]) -> str:
    """Return `; did you mean 'seeds'?` as the end of a message; empty if no word is similar."""
    near = nearest(word, known)
    return f"; did you mean '{near}'?" if near is not None else ""
