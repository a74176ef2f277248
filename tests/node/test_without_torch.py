"""An installation without the extra `compute`: the node is a member that offers no computing, and errors name
the missing package.
"""

import os
import signal
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from node.cli.client import ask
from tests.source import ROOT
from tests.test_bare_machines import QUIET, start, wait_for_node

SECONDS_MAX = 60.0
LEFT_OUT = ("torch", "functorch", "torchgen", "__editable__", "nvidia")
"""Prefixes of torch's modules, of its dependencies, and of this checkout, which PYTHONPATH finds."""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return an interpreter that has this one's site-packages except torch."""
    folder = tmp_path_factory.mktemp("without") / "venv"
    venv.EnvBuilder(symlinks=True).create(folder)
    there = folder / Path(sysconfig.get_path("purelib")).relative_to(sys.prefix)
    for package in Path(sysconfig.get_path("purelib")).iterdir():
        if not package.name.startswith(LEFT_OUT) and not (there / package.name).exists():
            (there / package.name).symlink_to(package)
    return str(folder / "bin" / "python")


def said(python: str, home: Path, *words: str) -> tuple[int, list[str]]:
    ended = subprocess.run(
        [python, "-m", "node", *words],
        env=os.environ | {"PYTHONPATH": str(ROOT), "HOME": str(home)},
        cwd=home,
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
    )
    return ended.returncode, (ended.stdout + ended.stderr).splitlines()


def test_a_node_without_torch_is_a_member_that_offers_no_stage(python: str, tmp_path: Path) -> None:
    install = f"{python} -m pip install 'peerloom[compute]'"
    folder = tmp_path / "d"
    with start([python, "-m", "node", "--data-dir", str(folder), *QUIET]) as process:
        try:
            wait_for_node(process, folder)
            offer = ask(folder, "status")["offer"]
            assert not offer["may_serve"]
            assert (
                offer["reason"]
                == f"torch is not installed, so this node cannot compute stages. Install it: {install}"
            )
            assert ask(folder, "dht.put", {"key": "k", "value": "ab"})["key"]
            run = tmp_path / "RUN.toml"
            run.write_text('model = "simple-cnn"\ndata = "digits"\n[train]\nsteps = 1\n')
            code, lines = said(python, tmp_path, "train", str(run), "--data-dir", str(folder))
            assert (code, lines) == (
                2,
                ["error: torch is not installed, and this command needs it", f"  do: {install}"],
            )
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=SECONDS_MAX)
        finally:
            process.kill()
    assert (process.returncode, errors) == (0, "")


@pytest.mark.slow
def test_capturing_in_a_separate_process_gives_the_same_error(python: str, tmp_path: Path) -> None:
    peers = tmp_path / "peers.toml"
    peers.write_text('[[peers]]\nname = "a"\nmemory = "8GB"\nrate = "1TFLOPS"\n')
    code, lines = said(python, tmp_path, "plan", "simple-cnn", "--peers", str(peers))
    assert code == 2
    assert lines[0] == "error: simple-cnn: torch is not installed, and this command needs it"
