"""The wheel built from the source archive works from any folder, and contains all files that the program
reads.
"""

import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from tests.installed import typed
from tests.source import PACKAGES, ROOT

BUILD_SECONDS_MAX = 300.0
READ = ("web/static", "demo/words", "scenarios")
"""Folders inside of packages with files that the program reads."""

pytestmark = pytest.mark.skipif("PEERLOOM_WHEEL" not in os.environ, reason="builds a wheel: in make soak")


def built(source: Path, kind: str, into: Path) -> Path:
    """Build an `sdist` or a `wheel` with the backend that pyproject.toml names; return its path."""
    program = f"from setuptools import build_meta; print('built', build_meta.build_{kind}({str(into)!r}))"
    ended = subprocess.run(
        [sys.executable, "-c", program],
        cwd=source,
        check=True,
        capture_output=True,
        text=True,
        timeout=BUILD_SECONDS_MAX,
    )
    return into / ended.stdout.splitlines()[-1].removeprefix("built ")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a wheel built from the unpacked source archive of the tracked files."""
    folder = tmp_path_factory.mktemp("built")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, timeout=60)
    clone = folder / "clone"
    for name in listed.stdout.decode().split("\0"):
        if name.startswith((*(f"{package}/" for package in PACKAGES), "pyproject", "README", "LICENSE")):
            (clone / name).parent.mkdir(parents=True, exist_ok=True)
            (clone / name).write_bytes((ROOT / name).read_bytes())
    with tarfile.open(built(clone, "sdist", folder)) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (source,) = (folder / "unpacked").iterdir()
    return built(source, "wheel", folder)


def test_the_wheel_holds_every_file_that_the_program_reads(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        held = set(archive.namelist())
    wanted = [
        path.relative_to(ROOT)
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and (path.suffix == ".py" or any(f"/{each}/" in str(path) for each in READ))
    ]
    assert len(wanted) > 300
    assert [str(path) for path in wanted if str(path) not in held] == []
    assert not [name for name in held if name.startswith(("tests/", "benchmarks/"))]


def test_an_installed_wheel_ignores_files_of_the_same_names_nearby(wheel: Path, tmp_path: Path) -> None:
    place = tmp_path / "venv"
    venv.EnvBuilder(symlinks=True).create(place)
    site = place / Path(sysconfig.get_path("purelib")).relative_to(sys.prefix)
    # the wheel's dependencies, but not this checkout
    for package in Path(sysconfig.get_path("purelib")).iterdir():
        if (
            not package.name.startswith(("__editable__", "peerloom", "pip"))
            and not (site / package.name).exists()
        ):
            (site / package.name).symlink_to(package)
    python = place / "bin" / "python"
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "--python",
            str(python),
            "install",
            "-q",
            "--no-deps",
            "--no-index",
            str(wheel),
        ],
        check=True,
        capture_output=True,
        timeout=BUILD_SECONDS_MAX,
    )
    folder = tmp_path / "work"
    (folder / "node").mkdir(parents=True)
    (folder / "node" / "__init__.py").write_text("raise SystemExit('the wrong node')\n")
    (folder / "crypto.py").write_text("raise SystemExit('the wrong crypto')\n")

    def said(line: str) -> str:
        ended = typed(line, folder, [place / "bin"], PYTHONPATH="")
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    assert said("peerloom --version").startswith("peerloom ")
    assert said("peerloom init").startswith("wrote RUN.toml")
    assert "digits-local" in said("peerloom examples")
    assert "churn" in said("peerloom sim --list")
    asked = typed("peerloom status", folder, [place / "bin"], PYTHONPATH="")
    assert (asked.returncode, asked.stderr.splitlines()[1]) == (
        3,
        "  do: peerloom, or name its data folder: --data-dir DIR",
    )
    started = "peerloom --data-dir d --listen 127.0.0.1:0 --no-lan --web 127.0.0.1:0 --log text"
    waited = "until peerloom status --data-dir d; do i=$((i+1)); test $i -lt 60 || exit 1; sleep 0.5; done"
    watched = f"{started} > lines & i=0; {waited}; peerloom leave --data-dir d"
    assert "left" in said(watched)
