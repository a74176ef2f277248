"""Commands in texts are written in the form that the reader's shell finds, however the process was
started."""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import typer

from node.errors import UsageError
from node.invocation import command_span, elsewhere, install_command, shown, shown_values
from node.main import app
from tests.installed import SECONDS_MAX, console_script, environment, typed
from tests.source import ROOT


def advice(errors: str) -> str:
    """Return the command of the advice after `do:` or `look:`; it ends before a comma or several blanks."""
    found = re.search(r"^  (?:do|look): (?:start it with )?([^,]+?)(?:,|  |$)", errors, re.MULTILINE)
    assert found is not None, errors
    return found[1]


def test_a_script_on_the_path_is_called_by_its_name(tmp_path: Path) -> None:
    script = console_script(tmp_path / "bin")
    said = typed("peerloom status", tmp_path, [script.parent])
    assert said.returncode == 3
    assert advice(said.stderr) == "peerloom"


def test_a_script_off_the_path_is_called_by_its_shortest_path(tmp_path: Path) -> None:
    console_script(tmp_path / "a folder" / "bin")
    (tmp_path / "a folder" / "deep").mkdir()
    said = typed("'a folder/bin/peerloom' status", tmp_path)
    assert advice(said.stderr) == "'a folder/bin/peerloom'"
    assert advice(typed("cd 'a folder/bin'; ./peerloom status", tmp_path).stderr) == "./peerloom"
    again = typed("cd 'a folder/deep'; ../bin/peerloom runs --data-dir x", tmp_path)
    assert typed(f"cd 'a folder/deep'; {advice(again.stderr)} --version", tmp_path).returncode == 0


def test_a_different_peerloom_on_the_path_is_not_mistaken_for_ours(tmp_path: Path) -> None:
    console_script(tmp_path / "ours")
    other = console_script(tmp_path / "other")
    assert advice(typed("ours/peerloom status", tmp_path, [other.parent]).stderr) == "ours/peerloom"


def test_a_link_to_the_script_is_called_by_the_links_name(tmp_path: Path) -> None:
    script = console_script(tmp_path / "venv")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "peerloom").symlink_to(script)
    assert advice(typed("peerloom status", tmp_path, [tmp_path / "bin"]).stderr) == "peerloom"


def test_the_module_is_called_with_the_interpreter_as_typed(tmp_path: Path) -> None:
    name, path = Path(sys.executable).name, [Path(sys.executable).parent]
    assert advice(typed(f"{name} -m node status", tmp_path, path).stderr) == f"{name} -m node"
    assert advice(typed(f"{name} -m sim lna --sed", tmp_path, path).stderr) == f"{name} -m sim --help"
    by_node = typed(f"{name} -m node sim lna --sed", tmp_path, path)
    assert advice(by_node.stderr) == f"{name} -m node sim --help"
    shortest = min(os.path.relpath(sys.executable, tmp_path), sys.executable, key=len)
    assert advice(typed(f"{sys.executable} -m node status", tmp_path).stderr) == f"{shortest} -m node"


def test_a_program_with_a_node_inside_shows_the_module_form() -> None:
    error = UsageError("no run", "look: `peerloom runs`, or `peerloom sim lan`")
    assert error.do == "look: python -m node runs, or python -m node sim lan"
    assert error.written == ("no run", "look: `peerloom runs`, or `peerloom sim lan`")
    assert elsewhere() == "python -m node"


def test_only_spans_of_commands_are_rewritten() -> None:
    same = "peerloom, `peerloom-x`, /peerloom/runs/2, my.peerloom, `Peerloom status`, `peerloom unclosed"
    assert shown(same) == same
    assert shown(command_span("model", "show", "my model.peerloom")) == (
        "python -m node model show 'my model.peerloom'"
    )
    document = {"do": ["`peerloom id`"], "count": 3, "none": None}
    assert shown_values(document) == {"do": ["python -m node id"], "count": 3, "none": None}


@contextmanager
def running(command: list[str], folder: Path, path: list[Path]) -> Iterator["subprocess.Popen[str]"]:
    """Run a node in `folder`, and stop it in order at the end."""
    flags = ["--listen", "127.0.0.1:0", "--no-lan", "--web", "off", "--preset", "local"]
    process = subprocess.Popen(
        [*command, *flags],
        cwd=folder,
        env=environment(folder, path),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        process.terminate()
        process.communicate(timeout=SECONDS_MAX)


def test_a_nodes_answer_names_commands_in_the_clients_form(tmp_path: Path) -> None:
    script = console_script(tmp_path / "bin")
    with running(["bin/peerloom", "--announce", "10.0.0.5:9747"], tmp_path, []) as process:
        assert process.stdout is not None
        lines = iter(process.stdout.readline, "")
        other = next(line for line in lines if "On another machine:" in line)
        assert other == "  On another machine:  peerloom --join 10.0.0.5:9747\n"
        by_name = typed("cd bin; peerloom runs show 12345678", tmp_path, [script.parent])
        assert advice(by_name.stderr) == "peerloom runs"
        by_module = typed(f"{sys.executable} -m node runs show 12345678", tmp_path)
        assert advice(by_module.stderr) == f"{sys.executable} -m node runs"
        second = typed("bin/peerloom", tmp_path)
        assert advice(second.stderr) == "bin/peerloom status"
        status = typed(f"{advice(second.stderr)} --json", tmp_path)
        assert json.loads(status.stdout)["schema"] == "peerloom/status/1"


def test_the_script_ignores_files_of_the_current_folder(tmp_path: Path) -> None:
    script = console_script(tmp_path / "bin")
    for name in ("node", "crypto", "gossip", "sim", "typer", "trio", "queue", "types"):
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('{name} of somebody else')\n")
    assert typed("peerloom status", tmp_path, [script.parent]).returncode == 3
    assert typed("peerloom sim --list", tmp_path, [script.parent]).returncode == 0


def test_a_command_that_asks_a_node_loads_neither_trio_nor_torch(tmp_path: Path) -> None:
    script = console_script(tmp_path / "bin")
    said = typed("peerloom status", tmp_path, [script.parent], PYTHONPROFILEIMPORTTIME="1")
    loaded = {line.rpartition("|")[2].strip() for line in said.stderr.splitlines() if "|" in line}
    assert "node.cli.client" in loaded
    assert loaded & {"trio", "torch", "numpy"} == set()


COMMAND = re.compile(r"\bpython3? -m (?:node|sim)(?![\w.])")
TEXTS = {".py", ".js", ".html", ".toml", ".yml"}
ONE_PLACE = {"node/invocation.py"}


@pytest.mark.parametrize(
    "folder", ["node", "sim", "partition", "gossip", "dht", "crypto", "examples", "deploy"]
)
def test_only_one_function_spells_out_how_the_module_is_run(folder: str) -> None:
    """All other code writes a command as a code span, which the reader's screen rewrites."""
    wrong = []
    for path in sorted((ROOT / folder).rglob("*")):
        place = path.relative_to(ROOT).as_posix()
        if path.suffix in TEXTS and "vendor" not in path.parts and place not in ONE_PLACE:
            wrong += [f"{place}: {found[0]}" for found in COMMAND.finditer(path.read_text(encoding="utf-8"))]
    assert wrong == []


def test_every_command_in_a_text_is_a_code_span() -> None:
    """The reader's screen can rewrite a command only if it is a code span."""
    commands = typer.main.get_command(app)
    names = "|".join(commands.list_commands(typer.Context(commands)))  # type: ignore[attr-defined]  # a group, as it has commands
    bare = re.compile(rf"(?<![`\w./-])peerloom (?:{names}|--\w)")
    wrong = []
    for path in sorted((ROOT / "node").rglob("*.py")):
        found = bare.search(path.read_text(encoding="utf-8"))
        if found is not None:
            wrong.append(f"{path.relative_to(ROOT)}: {found[0]}")
    assert wrong == []


def test_output_that_programs_parse_keeps_code_spans_unchanged(tmp_path: Path) -> None:
    script = console_script(tmp_path / "bin")
    (tmp_path / "broken.peerloom").write_text("{}")
    plain = typed("peerloom model show broken.peerloom", tmp_path, [script.parent])
    spans = typed("peerloom model show broken.peerloom", tmp_path, [script.parent], _PEERLOOM_KEEPS_SPANS="1")
    assert "do: peerloom model capture makes one" in plain.stderr
    assert "do: `peerloom model capture` makes one" in spans.stderr


def test_install_commands_name_the_running_interpreter() -> None:
    words = shlex.split(install_command("tokenizers", "pyarrow"))
    assert words == [sys.executable, "-m", "pip", "install", "tokenizers", "pyarrow"]


def test_nodes_show_commands_in_the_form_that_started_them(tmp_path: Path) -> None:
    program = "from node.invocation import elsewhere, program; print(program(), elsewhere(), sep='|')"
    for given, other in (("'/a b/peerloom'", "peerloom"), ("/venv/bin/python -m node", "python -m node")):
        said = typed(f'{sys.executable} -c "{program}"', tmp_path, _PEERLOOM_PROGRAM=given)
        assert said.stdout == f"{given}|{other}\n"
