"""Make the small language model of the demo: write its training text, and pack the trained model into a file.

    python examples/demo_words.py text words.txt
    python examples/demo_words.py pack state.safetensors words.peerloom

Between the two commands comes a training run (node/demo/words/RUN.toml). The text is prose of Python's own
documentation, one paragraph per window of the run. The model memorizes the paragraphs and continues the
beginning of any of them. The shipped weights were trained on the documentation of Python 3.11.
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
"""How often the paragraphs are repeated in the text. The end of the text is held out."""
PARAGRAPHS = 24
"""Number of paragraphs: few, so that a small model memorizes them within minutes."""
LENGTHS = range(150, 256)
"""Allowed lengths of a paragraph, in characters."""
LETTERS_MIN = 0.94
"""Minimum share of letters and spaces in a paragraph. Paragraphs with less are grammar, tables or code."""
WINDOW, BYTES = 256, 256
OPTIONS = {"layers": 4, "heads": 4, "width": 128}
"""The same model options as in RUN.toml."""


def paragraphs() -> list[str]:
    """Return the prose of the topics that `help()` knows, as a list of paragraphs."""
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
    """Write the run's result as a captured file, with the parameter values next to it."""
    graph = capture_built_in("gpt", (WINDOW,), BYTES, options=OPTIONS).graph
    path.write_bytes(encode_graph(with_values(graph, state, path.with_suffix(".safetensors"))))


if __name__ == "__main__":
    what, *paths = sys.argv[1:]
    if what == "text":
        write_text(Path(paths[0]))
    else:
        pack(Path(paths[0]), Path(paths[1]))
