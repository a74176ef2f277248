"""A sandboxed process that reads a user's files, `python -m node.content.fenced_reading`, and its caller.

The process fences itself in (`node.stages.sandbox`) before it opens a file: it can read only the sources,
cannot write, cannot reach any network, and has limits on memory and time that follow from the sources' size.
It reports what it found. The command checks this report, allocates an unnamed file, and has the process write
the arrays into it. If no fence is available, this is only reported, because the files are the user's own.
"""

import gc
import mmap
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import msgspec
import numpy as np

from node.content.model_folder import READ_FILES
from node.content.npz import RATIO_FREE_BYTES, RATIO_MAX
from node.content.reading import READING_BYTES_MAX, SourceReading
from node.content.shards import PARTS, PartName
from node.content.sources import SampleParts, SourceWish, Tell, downloaded, read, renamed, write
from node.content.tokens import Language
from node.errors import UsageError
from node.protocols.data_table import DataTable
from node.stages import sandbox
from node.stages.parent import die_with
from node.stages.scratch import Scratch

MEMORY_BYTES = 512 << 20
"""Memory allowed in addition to Python, numpy and the reading libraries: a few chunks as text, one row group
of Parquet."""
TEXT_RATIO = 8
"""Memory allowed for a text table, relative to its size. A field of two bytes becomes a number of four bytes,
which exists twice while blocks are joined."""
COPIES = 3
"""Maximum number of copies of arrays of other forms while they are dealt into parts."""
START_SECONDS = 60.0
SLOW_BYTES_PER_SECOND = 1e6
"""The rate at which a slow machine reads csv or JPEG. A source that takes longer is considered hostile."""
ARRAYS_BYTES_MAX = 64 << 30
"""Maximum size of a data set (docs/data.md)."""
TELL_SECONDS = 0.5
LINE_BYTES_MAX = 2 * READING_BYTES_MAX
_ROOT = str(Path(__file__).parents[2])
_ORIGINS = "origins"
_ARROW = {"ARROW_DEFAULT_MEMORY_POOL": "system", "JE_ARROW_MALLOC_CONF": "background_thread:false"}
"""pyarrow's own allocators start threads when loaded, which the fences would miss."""
_TOKENIZERS = {"TOKENIZERS_PARALLELISM": "false"}
TOKENS_BYTES_PER_SECOND = 1e5
"""The rate at which a slow machine tokenizes text. A shared core reaches 1e6."""
TOKEN_RATIO = 24
"""Memory allowed for tokens, relative to the size of the text. A token may be a single byte and takes four
bytes each in a list, in x and in y, and more while these grow."""
TOKENIZER_RATIO = 24
"""Memory allowed for the tables of a tokenizer, relative to the size of its tokenizer.json: 11 MB take
120."""


class _Ask(msgspec.Struct, frozen=True):
    data: str
    base: str
    keys: DataTable
    test: str | float
    validation: str | float
    like: SourceReading | None
    language: Language | None
    readable: list[str]
    seconds: int
    memory_bytes: int


class _Array(msgspec.Struct, frozen=True):
    part: str
    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return int(np.prod(self.shape, dtype=object)) * np.dtype(self.dtype).itemsize


class _Said(msgspec.Struct, frozen=True):
    """A line from the process: its progress, its findings, or the reason for a failure. Empty at the end."""

    progress: str = ""
    arrays: list[_Array] | None = None
    reading: SourceReading | None = None
    refused: str = ""
    do: str | None = None


def read_fenced(wish: SourceWish, folder: Path, tell: Tell = lambda _: None) -> SampleParts:
    """Read a request's sources in a separate process. The arrays are mapped from an unnamed file in `folder`.
    Raises UsageError."""
    with downloaded(wish, folder) as (here, names):
        shown_base = here.base
        here = replace(here, base=here.base.absolute())
        texts = [each for each in (here.data, here.test, here.validation) if isinstance(each, str) and each]
        sources = [here.base / Path(text).expanduser() for text in texts]
        for text, source in zip(texts, sources, strict=True):
            names.setdefault(str(source), str(shown_base / Path(text).expanduser()))
        if (language := here.language) is not None:
            tokenizer, model = (str(Path(each).absolute()) for each in (language.tokenizer, language.folder))
            names |= {tokenizer: language.tokenizer} | ({model: language.folder} if language.folder else {})
            language = Language(tokenizer, language.folder and model, language.window)
            here = replace(here, language=language)
        missing = [source for source in sources if not source.exists()]
        try:
            if missing:
                read(here)  # this reports the missing file
            samples = _asked(here, sources, folder, tell)
        except UsageError as error:
            raise renamed(error, names) from None
    samples.reading.source = wish.data
    if wish.language is not None and here.language is not None:
        form = samples.reading.form.replace(here.language.tokenizer, wish.language.tokenizer)
        samples.reading.form = form
    return samples


def convert_fenced(wish: SourceWish, folder: Path, tell: Tell = lambda _: None) -> SourceReading:
    """Write the parts of a source into `folder`, as `sources.convert` does. Raises UsageError."""
    return write(read_fenced(wish, folder, tell), folder)


def _asked(wish: SourceWish, sources: list[Path], folder: Path, tell: Tell) -> SampleParts:
    size = 0
    readable: list[str] = []
    for source in sources:
        more, places = _extent(source)
        size, readable = size + more, [*readable, *places]
    is_text = all(source.suffix.lower() in (".csv", ".tsv") for source in sources)
    numbers = TEXT_RATIO * size if is_text else COPIES * max(RATIO_FREE_BYTES, RATIO_MAX * size)
    seconds = round(START_SECONDS + size / SLOW_BYTES_PER_SECOND)
    language = wish.language
    if language is not None:
        tokenizer, folder = Path(language.tokenizer), Path(language.folder)
        more = _extent(tokenizer)[0] if tokenizer.is_file() else 0
        numbers = RATIO_FREE_BYTES + TOKEN_RATIO * size + TOKENIZER_RATIO * more
        seconds = round(START_SECONDS + size / TOKENS_BYTES_PER_SECOND)
        readable += [os.path.realpath(each) for each in _files_of(tokenizer, language.folder and folder)]
    ask = _Ask(
        wish.data,
        str(wish.base),
        wish.keys,
        wish.test,
        wish.validation,
        wish.like,
        language,
        readable,
        seconds,
        min(MEMORY_BYTES + numbers, ARRAYS_BYTES_MAX),
    )
    scratch = Scratch()
    with tempfile.TemporaryFile(dir=folder, buffering=0) as out:
        process = _start(out, scratch.path)
        timer = threading.Timer(seconds, process.kill)
        timer.daemon = True
        timer.start()
        begun = time.monotonic()
        try:
            return _converse(process, ask, out, tell)
        except EOFError:
            spent = time.monotonic() - begun
            reason = (
                f"more than {seconds} s" if spent >= seconds else f"more than {ask.memory_bytes >> 20} MiB"
            )
            raise UsageError(
                f"{sources[0]}: the process that reads it was ended: it takes {reason} for {size:,} bytes",
                "check whether it is damaged, or use a smaller file or one of arrays (npz), which takes less",
            ) from None
        finally:
            timer.cancel()
            process.kill()
            process.wait()
            scratch.remove()


def _files_of(tokenizer: Path, folder: Path | str) -> list[Path]:
    """Return the files that are read for a tokenizer and a model's folder."""
    found = [tokenizer, *(Path(folder) / name for name in READ_FILES if folder)]
    return [each for each in found if each.is_file()]


def _extent(source: Path) -> tuple[int, list[str]]:
    """Return the size of a source, and the paths that must be readable for it: the source and the targets of
    its links."""
    places = [os.path.realpath(source)]
    if not source.is_dir():
        return source.stat().st_size, places
    found, seen = 0, {places[0]}
    for at, folders, files in os.walk(source, followlinks=True):
        for name in [*folders, *files]:
            path = os.path.join(at, name)
            real = os.path.realpath(path) if os.path.islink(path) else path
            if real != path and real in seen and os.path.isdir(real):
                folders.remove(name)  # a link back to a visited folder
            elif real != path and os.path.exists(real):
                seen.add(real)
                places.append(real)
            if name in files and os.path.exists(path):
                found += os.stat(path).st_size
    return found, places


def _start(out: IO[bytes], scratch: str) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(  # noqa: S603 - our own program and arguments
        [sys.executable, "-P", "-m", "node.content.fenced_reading", str(out.fileno()), str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        pass_fds=(out.fileno(),),
        cwd=scratch,
        env=sandbox.environment(os.environ, scratch=scratch, path=_ROOT, threads=1) | _ARROW | _TOKENIZERS,
    )


def _converse(process: "subprocess.Popen[bytes]", ask: _Ask, out: IO[bytes], tell: Tell) -> SampleParts:
    assert process.stdin is not None
    assert process.stdout is not None
    with process.stdin as to, process.stdout as come:
        try:
            to.write(msgspec.json.encode(ask) + b"\n")
            to.flush()
            said = _listen(come, tell)
            if said.arrays is None or said.reading is None:
                raise EOFError
            size = sum(_padded(each) for each in said.arrays)
            if not 0 < size <= ARRAYS_BYTES_MAX or any(each.size_bytes <= 0 for each in said.arrays):
                raise UsageError(
                    f"{ask.data}: {size >> 30} GiB of samples; at most {ARRAYS_BYTES_MAX >> 30} GiB are read"
                )
            if hasattr(os, "posix_fallocate"):
                # A full disk raises an error here. Without the allocation, writing to the map would crash.
                os.posix_fallocate(out.fileno(), 0, size)
            else:
                out.truncate(size)
            mapping = mmap.mmap(out.fileno(), size, access=mmap.ACCESS_READ)
            to.write(b"go\n")
            to.flush()
            _listen(come, tell)
        except BrokenPipeError:
            raise EOFError from None
        except OSError as error:
            raise UsageError(
                f"{ask.data}: no room on disk for its arrays: {error.strerror or error}"
            ) from None
    return _samples(said.arrays, said.reading, mapping)


def _padded(array: _Array) -> int:
    return -(-array.size_bytes // 64) * 64


def _samples(arrays: list[_Array], reading: SourceReading, mapping: mmap.mmap) -> SampleParts:
    samples = SampleParts({}, reading)
    place = 0
    for each in arrays:
        kind = np.dtype(each.dtype)
        found = np.frombuffer(mapping, kind, each.size_bytes // kind.itemsize, place).reshape(each.shape)
        place += _padded(each)
        part: PartName = next(name for name in PARTS if name == each.part.removeprefix(_ORIGINS))
        if each.part.startswith(_ORIGINS):
            samples.origins[part] = found
        else:
            samples.parts.setdefault(part, {})[each.name] = found
    return samples


def _listen(come: IO[bytes], tell: Tell) -> _Said:
    while True:
        line = come.readline(LINE_BYTES_MAX)
        if not line:
            raise EOFError
        try:
            said = msgspec.json.decode(line, type=_Said)
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise EOFError from None
        if said.refused:
            raise UsageError(said.refused, said.do)
        if not said.progress:
            return said
        tell(said.progress)


# In the process


def main(arguments: list[str]) -> None:
    out, parent = map(int, arguments)
    die_with(parent)
    gc.disable()  # millions of rows without reference cycles, which the collector would scan repeatedly
    ask = msgspec.json.decode(sys.stdin.buffer.readline(), type=_Ask)
    resource.setrlimit(resource.RLIMIT_CPU, (ask.seconds, ask.seconds))
    _load_readers(ask.readable, ask.language)
    try:
        fenced = sandbox.enter(
            scratch=os.getcwd(),
            device="cpu",
            memory_bytes=ask.memory_bytes,
            allow_unfenced=True,
            readable=ask.readable,
        )
        wish = SourceWish(
            ask.data, Path(ask.base), ask.keys, ask.test, ask.validation, ask.like, ask.language
        )
        samples = read(wish, _teller())
        samples.reading.notes += [f"read without a fence: {each}" for each in fenced.unfenced]
        _give(samples, out)
    except UsageError as error:
        _say(_Said(refused=error.written[0], do=error.written[1]))
    except sandbox.NotFenced as error:
        _say(_Said(refused=f"{ask.data}: no process can be fenced in to read it: {error}"))
    except MemoryError:
        limit = ask.memory_bytes >> 20
        _say(
            _Said(refused=f"{ask.data}: takes more than {limit} MiB to read, which its size does not explain")
        )


def _load_readers(sources: list[str], language: Language | None) -> None:
    """Load the readers of these sources: no library can be loaded behind the fence."""
    suffixes = {Path(source).suffix.lower() for source in sources}
    try:
        if language is not None:
            import jinja2.sandbox  # noqa: F401 - so that they are loaded
            import tokenizers  # noqa: F401
        if ".parquet" in suffixes:
            import pyarrow.parquet

            pyarrow.set_cpu_count(1)
            pyarrow.set_io_thread_count(1)
        if any(map(os.path.isdir, sources)):
            from PIL import Image

            Image.init()
    except ImportError:
        return  # the reader itself reports what is not installed


def _teller() -> Callable[[str], None]:
    last = time.monotonic()

    def tell(text: str) -> None:
        nonlocal last
        if time.monotonic() - last >= TELL_SECONDS:
            last = time.monotonic()
            _say(_Said(progress=text))

    return tell


def _give(samples: SampleParts, out: int) -> None:
    found: list[tuple[_Array, Any]] = []
    for part, arrays in samples.parts.items():
        for name, array in arrays.items():
            found.append((_Array(part, name, array.dtype.str, array.shape), array))
    for part, numbers in samples.origins.items():
        found.append((_Array(f"{_ORIGINS}{part}", "", numbers.dtype.str, numbers.shape), numbers))
    _say(_Said(arrays=[each for each, _ in found], reading=samples.reading))
    if not sys.stdin.buffer.readline():
        return
    place = 0
    with mmap.mmap(out, sum(_padded(each) for each, _ in found)) as mapping:
        for each, array in found:
            target: Any = np.frombuffer(mapping, each.dtype, array.size, place).reshape(each.shape)
            target[...] = array
            del target
            place += _padded(each)
    _say(_Said())


def _say(said: _Said) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(said) + b"\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
