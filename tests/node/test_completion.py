"""Shells complete commands and flags with the script that `peerloom completion` prints."""

import shutil
import subprocess
from pathlib import Path

import pytest

from node.main import run
from tests.test_documented_commands import parsers

TRIED = """
source "$1"
shift
COMP_WORDS=("$@")
COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
_peerloom
printf '%s\\n' "${COMPREPLY[@]}"
"""
"""Return what bash would offer after Tab, by its own steps (bash(1), "Programmable Completion")."""
TRIED_BY_FISH = 'source $argv[1]; complete -C (string join -- " " $argv[2..-1])'


def script(shell: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    assert run(["completion", shell]) == 0
    path = folder / "script"
    path.write_text(capsys.readouterr().out)
    return path


def offered(path: Path, shell: str, *words: str) -> list[str]:
    if shell == "fish":
        command = ["fish", "--no-config", "-c", TRIED_BY_FISH, "--", str(path), *words]
    else:
        command = ["bash", "--norc", "-c", TRIED, "-", str(path), *words]
    said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    assert said.stderr == ""
    return sorted(line.partition("\t")[0] for line in said.stdout.splitlines() if line)


@pytest.mark.parametrize("shell", ["bash", "fish"])
def test_tab_offers_commands_and_flags(
    shell: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell}")
    path = script(shell, tmp_path, capsys)
    tree = parsers()[0].commands
    assert offered(path, shell, "peerloom", "ru") == ["runs"]
    assert offered(path, shell, "peerloom", "--jo") == ["--join"]
    assert offered(path, shell, "peerloom", "--data-dir", "runs", "runs", "sho") == ["show"]
    assert offered(path, shell, "peerloom", "keys", "") == sorted(tree["keys"].commands)
    assert "--join" in offered(path, shell, "peerloom", "autostart", "install", "--")


def test_bash_completes_files_after_a_flag_with_a_value(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = script("bash", tmp_path, capsys)
    assert offered(path, "bash", "peerloom", "--config", "r") == []
    assert "complete -o default" in path.read_text()


def test_zsh_reads_the_completion_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if shutil.which("zsh") is None:
        pytest.skip("no zsh")
    path = script("zsh", tmp_path, capsys)
    said = subprocess.run(
        ["zsh", "-f", "-c", f"source {path}; print $_comps[peerloom]"],
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    assert "_peerloom" in said.stdout


def test_an_unknown_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["completion", "fsh"]) == 2
    assert "did you mean 'fish'?" in capsys.readouterr().err
