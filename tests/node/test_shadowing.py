"""A user's file with the same name as one of our modules, or of a dependency, is reported or has no
effect."""

import sys
from pathlib import Path

import pytest

from tests.installed import console_script, typed
from tests.source import ROOT

PYTHON = sys.executable
THEIRS = "print('somebody else')\n"


def write(folder: Path, *names: str, text: str = THEIRS) -> None:
    for name in names:
        (folder / f"{name}.py").write_text(text)


def test_files_of_the_current_folder_do_not_enter_a_command(tmp_path: Path) -> None:
    write(tmp_path, "crypto", "gossip", "dht", "partition", "sim", "trio", "torch", "queue", "typer")
    (tmp_path / "node").mkdir()  # a folder without Python files hides no package
    said = typed(f"{PYTHON} -m node id", tmp_path)
    assert (said.returncode, said.stdout) == (2, "")
    assert said.stderr.startswith("error: no identity in ")
    (tmp_path / "sim.py").unlink()
    said = typed(f"{PYTHON} -m sim --list", tmp_path)
    assert said.returncode == 0
    assert "somebody" not in said.stdout + said.stderr


@pytest.mark.parametrize("name", ["crypto", "dht", "gossip", "partition"])
def test_a_program_learns_which_file_hides_a_package_of_ours(tmp_path: Path, name: str) -> None:
    write(tmp_path, name)
    (tmp_path / "program.py").write_text("import node\n")
    said = typed(f"{PYTHON} program.py", tmp_path)
    assert said.returncode == 1
    last = said.stderr.splitlines()[-1]
    assert last == f"ImportError: {name}.py hides the package {name}, which peerloom needs: rename it"


def test_a_folder_that_hides_part_of_a_package_is_reported(tmp_path: Path) -> None:
    (tmp_path / "crypto").mkdir()
    (tmp_path / "crypto" / "__init__.py").write_text(THEIRS)
    said = typed(f"{PYTHON} -c 'import node'", tmp_path)
    assert said.stderr.splitlines()[-1].startswith("ImportError: crypto hides the package crypto,")


def test_a_shadow_on_the_path_ends_a_command_in_two_lines(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    write(theirs, "gossip")
    script = console_script(tmp_path / "bin")
    for line in (f"{PYTHON} -m node status", "peerloom status", f"{PYTHON} -m sim --list"):
        said = typed(line, tmp_path, [script.parent], PYTHONPATH=f"{theirs}:{ROOT}")
        assert said.returncode == 2
        assert said.stderr == (
            "error: theirs/gossip.py hides the package gossip, which peerloom needs\n"
            "  do: rename it, or remove its folder from PYTHONPATH\n"
        )


def test_a_program_may_have_its_own_package_called_sim(tmp_path: Path) -> None:
    write(tmp_path, "sim", text="mine = 7\n")
    said = typed(f"{PYTHON} -c 'import node, sim; print(sim.mine, node.Config.__name__)'", tmp_path)
    assert said.stdout == "7 Config\n", said.stderr
    said = typed(f"{PYTHON} -m node sim --list", tmp_path, PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert said.stderr.splitlines()[0] == "error: sim.py hides the package sim, which peerloom needs"


def test_the_simulator_names_a_file_that_hides_the_node(tmp_path: Path) -> None:
    write(tmp_path, "node")
    said = typed(f"{PYTHON} -m sim --list", tmp_path)
    assert said.returncode == 2
    assert said.stderr == (
        f"error: {tmp_path}/node.py hides the package node, which the simulator needs\n"
        "  do: rename it, or use the command peerloom sim\n"
    )
    assert "node.py hides the package node" in typed(f"{PYTHON} -c 'import sim'", tmp_path).stderr


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("trio", "x = 1\n"),
        ("queue", "x = 1\n"),
        ("msgspec", "raise RuntimeError('theirs')\n"),
        ("psutil", "def broken(:\n"),
    ],
)
def test_a_library_hidden_by_a_programs_file_is_named(tmp_path: Path, name: str, text: str) -> None:
    write(tmp_path, name, text=text)
    (tmp_path / "program.py").write_text("import node\nnode.Node\n")
    said = typed(f"{PYTHON} program.py", tmp_path)
    assert said.returncode == 1
    last = said.stderr.splitlines()[-1]
    assert last == f"ImportError: {name}.py hides the module {name}, which peerloom needs: rename it"


@pytest.mark.parametrize(("name", "text"), [("typer", "raise SystemExit(0)\n"), ("queue", "x = 1\n")])
def test_a_library_hidden_in_a_command_is_named(tmp_path: Path, name: str, text: str) -> None:
    """The file is on the path from the environment; files in the current folder would have no effect."""
    write(tmp_path, name, text=text)
    said = typed(f"{PYTHON} -m node status", tmp_path, PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert said.returncode == 2
    assert said.stderr.splitlines()[0] == f"error: {name}.py hides the module {name}, which peerloom needs"


def test_an_error_in_a_users_own_file_is_shown_unchanged(tmp_path: Path) -> None:
    write(tmp_path, "helpers", text="import node\nnode.no_such_name\n")
    said = typed(f"{PYTHON} -c 'import helpers'", tmp_path)
    assert said.stderr.splitlines()[-1].startswith("AttributeError: module 'node' has no attribute")


def test_an_interpreter_without_our_libraries_ends_in_two_lines(tmp_path: Path) -> None:
    said = typed(f"{PYTHON} -S -m node status", tmp_path)
    error, do = said.stderr.splitlines()
    assert said.returncode == 2
    assert error.startswith(f"error: {PYTHON} has no module ")
    assert do.startswith("  do: ")


def test_a_removed_current_folder_does_not_fail_a_command(tmp_path: Path) -> None:
    script = console_script(tmp_path / "bin")
    for line in ("peerloom --version", f"{PYTHON} -m node --version"):
        said = typed(f"mkdir gone; cd gone; rmdir ../gone; {line}", tmp_path, [script.parent])
        assert (said.returncode, said.stdout[:8]) == (0, "peerloom"), said.stderr
