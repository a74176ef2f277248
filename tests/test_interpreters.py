"""Python versions other than that of the tests: which are declared, and whether they accept the code.

Only Python 3.11 runs every test. Each file is checked for what 3.12 to 3.14 have removed. Each newer
interpreter that is installed, also by pyenv, reads all files with warnings as errors. With
PEERLOOM_INTERPRETERS=1 it also runs a node, and with PEERLOOM_INTERPRETERS=/path/to/python,... these
interpreters (each with the packages of the extra `demo`) train.
"""

import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.installed import typed
from tests.source import PACKAGES, ROOT, imports, sources

VERSIONS = ("3.11", "3.12", "3.13", "3.14")
REMOVED = frozenset(
    {
        "aifc", "asynchat", "asyncore", "audioop", "cgi", "cgitb", "chunk", "crypt", "distutils", "imghdr",
        "imp", "lib2to3", "mailcap", "msilib", "nis", "nntplib", "ossaudiodev", "pipes", "smtpd", "sndhdr",
        "spwd", "sunau", "telnetlib", "uu", "xdrlib",
    }
)  # fmt: skip
"""Modules of 3.11's standard library that 3.12 (PEP 632, PEP 594) or 3.13 no longer have."""
INSTALL_SECONDS_MAX = 600.0
SAY_VERSION = "import sys; print(f'{sys.version_info[0]}.{sys.version_info[1]}')"
READ = """
import pathlib, sys, warnings
warnings.simplefilter("error")
for name in sys.argv[1:]:
    for path in sorted(pathlib.Path(name).rglob("*.py")):
        compile(path.read_text(encoding="utf-8"), str(path), "exec")
"""
STARTED = (
    "PEERLOOM_ALLOW_UNFENCED=true python -m node --data-dir d --listen 127.0.0.1:0"
    " --no-lan --web off --log text > lines & i=0; until python -m node status --data-dir d;"
    " do i=$((i+1)); test $i -lt 100 || exit 1; sleep 0.5; done;"
)
WATCHED = f"{STARTED} python -m node leave --data-dir d"
TRAINED = (
    f"{STARTED} printf '[train]\\nsteps = 4\\nbatch = 32\\n' > RUN.toml;"
    " python -m node train RUN.toml --data-dir d --wait 120s --out weights.safetensors;"
    " python -m node runs --data-dir d --json; python -m node leave --data-dir d"
)
TRAIN_SECONDS_MAX = 300.0
"""Seconds allowed on a busy machine, on which each process takes half a minute to load torch."""
GIVEN = [each for each in os.environ.get("PEERLOOM_INTERPRETERS", "").split(",") if each.startswith("/")]
others = pytest.mark.parametrize("version", VERSIONS[1:])


def interpreter(version: str) -> str:
    """Return the path of an interpreter; skip the test if it is not installed."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    usual = shutil.which(f"python{version}")
    kept = sorted(map(str, pyenv.glob(f"{version}.*/bin/python{version}")))
    for found in ([] if usual is None else [usual]) + kept:
        # A shim of pyenv exists for every version, and fails for those that are not chosen.
        if subprocess.run([found, "-c", ""], capture_output=True, check=False).returncode == 0:
            return found
    pytest.skip(f"no python{version} on this machine")


def test_the_declared_python_versions_match_the_support_statement() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = [each.rpartition(" ")[2] for each in project["classifiers"] if "Python :: 3." in each]
    assert tuple(declared) == VERSIONS
    assert project["requires-python"] == f">={VERSIONS[0]}"
    support = (ROOT / "CHANGELOG.md").read_text().partition("## Support")[2]
    assert all(version in support for version in (VERSIONS[0], VERSIONS[1], VERSIONS[-1]))


def test_no_module_is_imported_that_newer_versions_lack() -> None:
    every = sources(*PACKAGES, "tests", "benchmarks", "examples")
    found = {
        (each.place, name) for each in every for _, name in imports(each) if name.split(".")[0] in REMOVED
    }
    assert found == set()


@others
def test_a_newer_interpreter_reads_every_file_without_a_warning(version: str) -> None:
    folders = [str(ROOT / name) for name in (*PACKAGES, "tests", "examples")]
    subprocess.run([interpreter(version), "-c", READ, *folders], check=True, timeout=120)


@others
@pytest.mark.skipif("PEERLOOM_INTERPRETERS" not in os.environ, reason="installs: PEERLOOM_INTERPRETERS=1")
def test_a_node_runs_under_a_newer_interpreter(version: str, tmp_path: Path) -> None:
    python = interpreter(version)
    subprocess.run([python, "-m", "venv", str(tmp_path / "venv")], check=True, timeout=120)
    scripts = tmp_path / "venv" / "bin"
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    subprocess.run(
        [str(scripts / "pip"), "install", "-q", "-c", str(ROOT / "constraints.txt"), *wanted],
        check=True,
        timeout=INSTALL_SECONDS_MAX,
    )
    ended = typed(WATCHED, tmp_path, [scripts])
    assert ended.returncode == 0, ended.stderr
    assert "left" in ended.stdout


@pytest.mark.parametrize("python", GIVEN)
def test_a_newer_interpreter_trains_a_model(python: str, tmp_path: Path) -> None:
    asked = subprocess.run(
        [python, "-c", SAY_VERSION], check=True, capture_output=True, text=True, timeout=60
    )
    assert asked.stdout.strip() in VERSIONS
    ended = typed(TRAINED, tmp_path, [Path(python).parent], seconds=TRAIN_SECONDS_MAX)
    assert ended.returncode == 0, ended.stderr
    (told,) = (json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{"))
    assert [(run["status"], run["step"]) for run in told["runs"]] == [("done", 4)], ended.stderr
    assert (tmp_path / "weights.safetensors").stat().st_size > 0


def test_the_tests_run_under_a_declared_version() -> None:
    assert f"{sys.version_info[0]}.{sys.version_info[1]}" in VERSIONS
