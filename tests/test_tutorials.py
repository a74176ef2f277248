"""Each tutorial, typed into real terminals, reaches the results that it states.

This takes minutes, so it runs only with PEERLOOM_TUTORIALS, as in soak; otherwise only the parsing is tested.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.source import ROOT
from tests.tutorials import FILE, PROMPT, blocks, pattern

PAGES = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
PLAYED = bool(os.environ.get("PEERLOOM_TUTORIALS"))
NETWORK = (
    "ip link set lo up && ip link add home type veth peer name switch && ip link set switch up && "
    'ip address add 192.168.1.20/24 dev home && ip link set home up && exec "$@"'
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_tutorial_has_commands_that_are_typed(page: Path) -> None:
    found = list(blocks(page.read_text(encoding="utf-8")))
    assert any(PROMPT.match(line) for block in found for line in block)
    assert all(FILE.match(block[0]) for block in found if block[0].startswith("# "))


@pytest.mark.skipif(not PLAYED, reason="minutes; PEERLOOM_TUTORIALS=1 plays them, as `make soak` does")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_tutorial_reaches_its_stated_results(page: Path, tmp_path: Path) -> None:
    typed = [sys.executable, "-m", "tests.tutorials", str(page), str(tmp_path)]
    subprocess.run(
        ["unshare", "-Urn", "bash", "-c", NETWORK, "bash", *typed], cwd=ROOT, check=True, timeout=900
    )


def test_a_line_of_output_is_compared() -> None:
    assert pattern("step   220  loss 0.0...").search("step 220  loss 0.0132  369 samples/s")
    assert not pattern("... alive ...").search("two  dead")
