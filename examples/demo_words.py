"""Make the small model that answers at the end of the demo: the text that it is trained on, and its file.

    python examples/demo_words.py text words.txt
    python examples/demo_words.py pack state.safetensors words.peerloom

A run comes between the two (node/demo/words/RUN.toml). The text is prose of Python's own documentation, a
paragraph in each window of the run: the model memorizes them and continues the beginning of any. The weights
that ship were trained on those of Python 3.11.
"""

import pydoc_data.topics
import random
import re
import sys
from pathlib import Path

from node.content.stored_values import with_values
from partition.capture.models.model_spec import capture_built_in
from partition.model.graph import encode_graph

ROUNDS = 12
"""How often the paragraphs are repeated in the text; its end is held out."""
PARAGRAPHS = 24
"""Few, so that a small model memorizes them within minutes."""
LENGTHS = range(150, 256)
"""Letters of a paragraph."""
LETTERS_MIN = 0.94
"""The least share of letters and spaces: paragraphs with less are grammar, tables or code."""
WINDOW, BYTES = 256, 256
OPTIONS = {"layers": 4, "heads": 4, "width": 128}
"""As in RUN.toml."""


def paragraphs() -> list[str]:
    """Return the prose of the topics that `help()` knows, a paragraph each."""
    found: dict[str, None] = {}
    for _, topic in sorted(pydoc_data.topics.topics.items()):
        for lines in (each.split("\n") for each in re.split(r"\n\s*\n", topic)):
            text = " ".join(" ".join(lines).split())
            is_prose = text.isascii() and text[:1].isupper() and text.endswith(".")
            if not is_prose or len(text) not in LENGTHS or any(line.startswith(" ") for line in lines):
                continue
            if sum(letter.isalpha() or letter == " " for letter in text) >= LETTERS_MIN * len(text):
                found[text] = None
    return list(found)


def write_text(path: Path) -> None:
    """Write the training text."""
    rng = random.Random(1)  # noqa: S311 - the same text again
    texts = rng.sample(paragraphs(), PARAGRAPHS)
    path.write_text("".join(text.ljust(WINDOW, "\n") for text in texts) * ROUNDS + "\n")


def pack(state: Path, path: Path) -> None:
    """Write the run's result as a captured file, with its values beside it."""
    graph = capture_built_in("gpt", (WINDOW,), BYTES, options=OPTIONS).graph
    path.write_bytes(encode_graph(with_values(graph, state, path.with_suffix(".safetensors"))))


if __name__ == "__main__":
    what, *paths = sys.argv[1:]
    if what == "text":
        write_text(Path(paths[0]))
    else:
        pack(Path(paths[0]), Path(paths[1]))
