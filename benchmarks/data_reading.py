"""The cost of reading people's data: a csv file of 1 GB, 100,000 images, text of 1 GB, and text of 100 MB as
tokens.

    python benchmarks/data_reading.py [--quick] [--json]

Each is read by `peerloom data show`, a real command with its sandboxed process. The figures are seconds, the
peak of anonymous memory of both processes compared with the bytes of the resulting arrays, and how often
progress was reported. Anonymous memory is `RssAnon`, which excludes pages of mapped files, because the system
can reclaim them at any time. The command is then started again and interrupted by Ctrl-C in the middle: how
soon it ends, its status, and its leftovers are measured. `--quick` uses a twentieth of each. The memory goal
is twice the arrays plus the memory of Python and the libraries.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import psutil
from _figures import Goal, arguments, leave, report

MB = 1_000_000
WORDS = ("ant", "bee", "cow")
QUICK = 20
LIBRARIES_BYTES = 300 * MB
"""Memory of two Python processes with numpy, Pillow and tokenizers, which takes 230 MB."""
INTERRUPTED = 130, -signal.SIGINT
"""Accepted exit codes: the command's own; or the signal, if Python is still loading its modules (a shell
reports it as 130 too)."""
ENDED_SECONDS_MAX = 3.0
LONG_SECONDS = 5.0
"""Readings that take longer than this must report progress."""
_POLL_SECONDS = 0.02


def write_csv(folder: Path, size: int) -> str:
    """Write rows of 20 numbers and a word."""
    draw = np.random.default_rng(1)
    rows = draw.normal(size=(2_000, 20)).round(5)
    lines = [",".join(map(str, row)) + f",{WORDS[n % 3]}\n" for n, row in enumerate(rows.tolist())]
    block = "".join(lines).encode()
    with (folder / "d.csv").open("wb") as file:
        file.write((",".join(f"n{n}" for n in range(20)) + ",label\n").encode())
        for _ in range(max(1, size // len(block))):
            file.write(block)
    return "d.csv"


def write_images(folder: Path, count: int) -> str:
    """Write pictures of 32 x 32 in ten folders."""
    from PIL import Image

    draw = np.random.default_rng(1)
    for number in range(count):
        place = folder / "images" / f"class-{number % 10}"
        if number < 10:
            place.mkdir(parents=True)
        pixels = draw.integers(0, 255, (32, 32, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(place / f"{number}.png", compress_level=1)
    return "images"


def write_text(folder: Path, size: int) -> str:
    """Write sentences, one per line."""
    line = b"".join(
        b"In the year %d there were %d of them, and nobody counted.\n" % (n, n * n) for n in range(9_000)
    )
    with (folder / "d.txt").open("wb") as file:
        for _ in range(max(1, size // len(line))):
            file.write(line)
    return "d.txt"


def write_tokens(folder: Path, size: int) -> str:
    """Write sentences for a model's folder with its tokenizer."""
    import tokenizers

    write_text(folder, size)
    known: Any = tokenizers.Tokenizer(tokenizers.models.BPE())
    known.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer: Any = tokenizers.trainers.BpeTrainer(vocab_size=2_000, show_progress=False)
    with (folder / "d.txt").open() as file:
        known.train_from_iterator([next(file) for _ in range(2_000)], trainer)
    (folder / "m").mkdir()
    known.save(str(folder / "m" / "tokenizer.json"))
    config = {"architectures": ["GPT2LMHeadModel"], "vocab_size": 2_000, "n_positions": 256}
    (folder / "m" / "config.json").write_text(json.dumps(config))
    (folder / "RUN.toml").write_text('model = "m"\ndata = "d.txt"\n')
    return "RUN.toml"


class Command:
    """`peerloom data show`, whose stderr is its own terminal, as for a person."""

    def __init__(self, source: str, folder: Path) -> None:
        environment = os.environ | {
            "PYTHONPATH": str(Path(__file__).parents[1]),
            "TMPDIR": str(folder / "tmp"),
        }
        self._ours, theirs = os.openpty()
        self.out = folder / "out"
        with self.out.open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "node", "data", "show", source, "--json"],
                cwd=folder, env=environment, stdout=out, stderr=theirs, start_new_session=True,
            )  # fmt: skip
        os.close(theirs)
        self.said = b""
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        with suppress(OSError):  # the terminal of a process that has ended raises an error
            while data := os.read(self._ours, 4_096):
                self.said += data

    @property
    def progress(self) -> int:
        """Return how often the command has reported progress."""
        return self.said.count(b"\x1b[K")


def anonymous_bytes(process: psutil.Process) -> int:
    """Return the anonymous memory of a process and its children now."""
    total = 0
    for each in (process, *process.children(recursive=True)):
        try:
            for line in Path(f"/proc/{each.pid}/status").read_text().splitlines():
                if line.startswith("RssAnon"):
                    total += 1024 * int(line.split()[1])
        except OSError:
            continue
    return total


def read(source: str, folder: Path) -> tuple[float, int, int, int]:
    """Read a source to the end; return seconds, peak memory, bytes of arrays, and lines of progress."""
    began = time.monotonic()
    command = Command(source, folder)
    watched = psutil.Process(command.process.pid)
    peak = 0
    while command.process.poll() is None:
        with suppress(psutil.NoSuchProcess):
            peak = max(peak, anonymous_bytes(watched))
        time.sleep(_POLL_SECONDS)
    seconds = time.monotonic() - began
    if command.process.wait():
        raise SystemExit(command.said.decode())
    shown = json.loads(command.out.read_bytes())
    samples = sum(shown["parts"].values())
    size = sum(
        samples * int(np.prod(each["shape"], dtype=np.int64)) * np.dtype(each["dtype"]).itemsize
        for each in shown["arrays"]
    )
    return seconds, peak, int(size), command.progress


def interrupt(source: str, folder: Path, after: float) -> tuple[float, int, list[str]]:
    """Start the command, and press Ctrl-C once it reports progress, or after `after` seconds. Return the
    seconds until it ends, its status, and its leftovers."""
    command = Command(source, folder)
    children: list[psutil.Process] = []
    end = time.monotonic() + after
    while time.monotonic() < end and command.process.poll() is None and not command.progress:
        with suppress(psutil.NoSuchProcess):
            children = psutil.Process(command.process.pid).children(recursive=True)
        time.sleep(_POLL_SECONDS)
    began = time.monotonic()
    with suppress(ProcessLookupError):
        os.killpg(command.process.pid, signal.SIGINT)
    status = command.process.wait(60)
    seconds = time.monotonic() - began
    alive = psutil.wait_procs(children, timeout=5)[1]
    left = [str(path.relative_to(folder)) for path in (folder / "tmp").rglob("*")]
    return seconds, status, [*left, *(f"process {each.pid}" for each in alive)]


def main() -> int:
    """Measure each kind; return 1 if a goal is missed."""
    given = arguments(__doc__ or "")
    share = QUICK if given.quick else 1
    kinds: list[tuple[str, Callable[[Path, int], str], int]] = [
        ("csv", write_csv, 1_000 * MB // share),
        ("images", write_images, 100_000 // share),
        ("text", write_text, 1_000 * MB // share),
        ("tokens", write_tokens, 100 * MB // share),
    ]
    rows, goals = [], []
    for kind, write, size in kinds:
        with tempfile.TemporaryDirectory() as text:
            folder = Path(text)
            (folder / "tmp").mkdir()
            source = write(folder, size)
            seconds, peak, arrays, lines = read(source, folder)
            ended, status, left = interrupt(source, folder, 0.5 * seconds)
            rows.append(
                {
                    "source": kind, "size": size, "seconds": round(seconds, 1), "arrays_mb": arrays // MB,
                    "peak_mb": peak // MB, "progress": lines, "ctrl_c_seconds": round(ended, 2),
                    "status": status, "left": left,
                }
            )  # fmt: skip
            goals += [
                Goal(
                    f"{kind}: memory relative to the limit", peak / (2 * arrays + LIBRARIES_BYTES), "<=", 1.0
                ),
                Goal(f"{kind}: seconds to end after Ctrl-C", ended, "<=", ENDED_SECONDS_MAX),
                Goal(f"{kind}: files and processes left by Ctrl-C", len(left), "<=", 0),
                Goal(f"{kind}: exit code after Ctrl-C is 130", float(status in INTERRUPTED), ">=", 1),
            ]
            if seconds > LONG_SECONDS:
                goals.append(Goal(f"{kind}: lines of progress", lines, ">=", 1))
    return report("data_reading", rows, goals, as_json=given.json)


if __name__ == "__main__":
    leave(main())
