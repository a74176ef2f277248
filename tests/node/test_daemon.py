"""The daemon's process around a node: what holds for it before anything is served."""

import subprocess
import sys

from tests.source import ROOT

COLLECTED_MAX = 2_000
"""Objects that a full collection of garbage looks through. Of what is imported there are over 60,000, which
take it 40 ms of an event loop."""


def test_no_collection_of_garbage_looks_through_what_was_imported() -> None:
    program = (
        "import gc, trio\n"
        "from node import process\n"
        "from node.config import Config\n"
        "trio.run = lambda *arguments: len(gc.get_objects())\n"
        "print(process.main(Config()))\n"
    )
    printed = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    assert int(printed.stdout) <= COLLECTED_MAX
