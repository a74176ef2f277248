"""Types a tutorial's commands into terminals, and checks the output that it shows.

    python -m tests.tutorials PAGE FOLDER      in a network namespace that `tests.test_tutorials` makes

In the indented blocks of a page, `NAME$ COMMAND` is typed into the terminal NAME. In the terminal `me` a
command ends before the next is typed; in others it goes on until `NAME$ ^C`. Other lines are output of the
command above them, `NAME> LINE` is output of that terminal, and `! LINE` is output of a command that fails.
`...` stands for anything. A block that begins with the name of a file as a comment is written into that file.
"""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from tests.installed import console_script, environment
from tests.source import ROOT

PROMPT = re.compile(r"(\w+)\$ (.+)\Z")
SEEN = re.compile(r"(\w+)> (.+)\Z")
FILE = re.compile(r"# ([\w-]+\.(?:py|toml|csv|txt))\Z")
PAUSE = threading.Event()
"""Never set; used for pauses, because the output that is waited for comes from another program."""
SECONDS_MAX = 240.0
"""Seconds allowed for one command, or for one line to appear, on a busy machine."""


def blocks(text: str) -> Iterator[list[str]]:
    """Yield the indented blocks of a page, without their indentation; blank lines do not end a block."""
    block: list[str] = []
    for line in [*text.splitlines(), "end"]:
        if line.startswith("    ") or (block and not line.strip()):
            block.append(line[4:])
        elif block:
            yield block
            block = []


def pattern(line: str) -> re.Pattern[str]:
    """Return the pattern of a shown line: blanks match any blanks, `...` matches anything."""
    parts = (r"\s+".join(map(re.escape, part.split())) for part in line.split("..."))
    return re.compile(".*".join(part for part in parts))


class Terminal:
    """One terminal: its input, and everything that it shows."""

    def __init__(self, name: str, folder: Path, environ: dict[str, str]) -> None:
        self.name, self._folder, self._environ = name, folder, environ
        self.path = folder / f".{name}.out"
        self.path.touch()
        self._looked_at = 0
        self._process: subprocess.Popen[bytes] | None = None

    def type(self, command: str) -> None:
        """Start a command; in the terminal `me`, wait until it has ended."""
        self._looked_at = self.path.stat().st_size
        with self.path.open("ab") as out:
            self._process = subprocess.Popen(
                ["bash", "-c", command],  # bash becomes the command, so that signals reach the command
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                cwd=self._folder,
                env=self._environ,
            )
        if self.name == "me":
            self._process.wait(SECONDS_MAX)

    @property
    def status(self) -> int | None:
        return None if self._process is None else self._process.poll()

    def press(self) -> None:
        """Press Ctrl-C, and wait for the command to end."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            self._process.wait(60)

    def close(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def wait_for(self, line: str) -> None:
        """Return once a line that matches has been shown after the previous match. Raises AssertionError."""
        wanted, deadline = pattern(line), time.monotonic() + SECONDS_MAX
        while True:
            shown = self.path.read_bytes()[self._looked_at :]
            at = 0
            for each in shown.splitlines(keepends=True):
                at += len(each)
                if wanted.search(each.decode(errors="replace")):
                    self._looked_at += at
                    return
            over = self._process is None or self._process.poll() is not None
            if over or time.monotonic() > deadline:
                raise AssertionError(
                    f"{self.name} did not show {line!r} but:\n{shown.decode(errors='replace')}"
                )
            PAUSE.wait(0.1)


def play(page: Path, folder: Path) -> None:
    """Run a page in an empty folder. Raises AssertionError if its output differs."""
    console_script(folder / "bin")
    (folder / "examples").symlink_to(ROOT / "examples")
    python = folder / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    environ = environment(folder / "home", [folder / "bin"], PEERLOOM_CALIBRATE="false", COLUMNS="120")
    terminals: dict[str, Terminal] = {}
    try:
        for block in blocks(page.read_text(encoding="utf-8")):
            if found := FILE.match(block[0]):
                (folder / found[1]).write_text("\n".join(block) + "\n")
            elif any(PROMPT.match(line) for line in block):
                _type(block, terminals, folder, environ)
    finally:
        for terminal in terminals.values():
            terminal.close()


def _type(block: list[str], terminals: dict[str, Terminal], folder: Path, environ: dict[str, str]) -> None:
    current: Terminal | None = None
    lines = [line for line in block if line.strip()]
    for number, line in enumerate(lines):
        if found := PROMPT.match(line):
            name, command = found.groups()
            current = terminals.setdefault(name, Terminal(name, folder, environ))
            sys.stderr.write(line + "\n")
            if command == "^C":
                current.press()
                continue
            current.type(command)
            fails = number + 1 < len(lines) and lines[number + 1].startswith("! ")
            if name == "me" and (current.status != 0) != fails:
                raise AssertionError(
                    f"{line}: ended with {current.status}\n{current.path.read_text()[-2000:]}"
                )
        elif found := SEEN.match(line):
            terminals[found[1]].wait_for(found[2])
        elif line.strip() != "..." and current is not None:
            current.wait_for(line.removeprefix("! "))


if __name__ == "__main__":
    os.umask(0o077)
    play(Path(sys.argv[1]), Path(sys.argv[2]))
