"""Records the inputs and outputs of a node's cores, call by call.

`Recorder.core` makes a core that looks to its shell like any other. Each call of it is a turn. A turn has the
arguments, the answers that the core asked for during the call (a signature, the live members, where a peer
was seen), its events and its messages. So the record holds all input of the six seams, in order, at the one
place where it reaches the protocols. It holds no key, because signatures are written instead of the signer.
`sim.replay` gives the same turns to the same cores again. `node.recording.blocks` defines the format of the
file, `node.recording.values` that of the values.
"""

import dataclasses
import os
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from hashlib import blake2b
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, Any

import trio

from crypto.errors import ProtocolError
from node.config import Config
from node.containment import log
from node.errors import UsageError
from node.forks import keep_from_children
from node.recording import values
from node.recording.blocks import MAGIC, pack_block
from node.recording.values import Unrecordable, written
from node.seams import Clock, Executor

RECORD_BYTES_MAX = 256 << 20
"""Maximum size of a file, compressed. At the limit the record ends, but the node continues."""
WAITING_BYTES_MAX = 32 << 20
"""Maximum size of uncompressed data that waits for the disk. A slower disk ends the record."""
WRITE_SECONDS = 0.5
BLOCK_DATA_BYTES = 6 << 20
"""Maximum data in one block, which fits `BLOCK_BYTES_MAX` even if it cannot be compressed."""
DIGEST_BYTES = 8
HANDED_MAX = 32
"""Maximum number of work items remembered that cores have handed out; a core has one or two at a time."""

QUIET = frozenset({
    "acquainted", "deadline", "document", "export", "get", "is_replica", "member", "others", "status", "wall",
})  # fmt: skip
"""Methods that only read and do not change a core."""
PARTS = frozenset(
    {"between", "checkpoints", "end", "failures", "hosting", "losses", "origins", "saves", "vouched"}
)
"""Parts of cores that shells change directly, so these changes are turns too. A test looks for others."""
OUTBOXES = ("events", "sends")
ENDED = "the node has ended"


class Recorder:
    """Writes one file. It never harms the node: a failed write ends the record, and `over` says why. The
    constructor raises OSError if the file cannot be created."""

    def __init__(self, path: Path, *, bytes_max: int = RECORD_BYTES_MAX) -> None:
        self.path = path
        self.over = ""
        self.turns = 0
        self.size_bytes = len(MAGIC)
        self._bytes_max = bytes_max
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        self._file: IO[bytes] = os.fdopen(os.open(path, flags, 0o600), "wb")
        # otherwise an exiting child would write the buffered data a second time
        keep_from_children(self._file)
        # the file has names and addresses of members, and an older file may be world-readable
        path.chmod(0o600)
        self._file.write(MAGIC)
        self._before = MAGIC
        self._waiting: list[bytearray] = []
        self._has_failed = False
        self._cores: dict[int, int] = {}
        self._kept: dict[int, object] = {}
        self._made = 0
        self._asked = 0
        self._handed = Handed()
        self._listens = False

    def core(self, kind: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Make a core, and record its turns from now on."""
        if self.over or not isinstance(kind, type):
            return kind(*arguments, **named)
        self._made += 1
        number = self._made
        given = [self._wrap(each) for each in arguments]
        by_name = {name: self._wrap(each) for name, each in named.items()}
        before = self._begin("make", number, f"{kind.__module__}:{kind.__qualname__}", given, by_name)
        core = kind(*[_bare(each) for each in given], **{name: _bare(each) for name, each in by_name.items()})
        self._cores[id(core)] = number
        self._kept[number] = core  # keep it, so that no other object gets its id
        self._end(before, core, {}, None)
        recorded = RecordedCore(self, core, number)
        weakref.finalize(recorded, self._forget, id(core), number).atexit = False
        return recorded

    def _forget(self, name: int, number: int) -> None:
        """Forget a core that was freed."""
        self._cores.pop(name, None)
        self._kept.pop(number, None)
        self._put(["gone", number])

    def event(self, document: dict[str, Any]) -> None:
        """Record an event for people, in the form of `events --json`."""
        self._put(["event", document])

    def begin(self, peer: str, config: Config, clock: Clock) -> None:
        """Record which node this is, its configuration, and when the record begins."""
        about = {"peer": peer, "name": config.name, "swarm": config.swarm.name, "version": _version()}
        self._put(["node", {**about, "wall": clock.wall(), "monotonic": clock.monotonic()}])

    async def run(self, executor: Executor) -> None:
        """Write recorded data to disk until cancelled."""
        while True:
            await trio.sleep(WRITE_SECONDS)
            blocks = self._take()
            with trio.CancelScope(shield=True):  # data that was taken must be written, and in order
                await executor.run(partial(self._save, blocks))

    def close(self, reason: str = ENDED) -> None:
        """End the record."""
        if not self.over:
            self._stop(reason)
        self._save(self._take())
        with suppress(OSError):
            self._file.close()

    # Turns

    def call(
        self, core: Any, number: int, name: str, method: Any, given: tuple[Any, ...], by_name: Any
    ) -> Any:
        """Call a method of the core, and record its input and output."""
        if self.over:
            return method(*given, **by_name)
        wrapped = [self._noted(each) for each in given]
        named = {key: self._noted(each) for key, each in by_name.items()}
        lengths = {name: len(getattr(core, name)) for name in OUTBOXES if hasattr(core, name)}
        before = self._begin("call", number, name, wrapped, named)
        bare = {key: _bare(each) for key, each in named.items()}
        try:
            returned = method(*[_bare(each) for each in wrapped], **bare)
        except ProtocolError as error:
            self._end(before, core, lengths, ["raised", type(error).__name__, str(error)])
            raise
        except BaseException:
            self._stop(f"{name} of {type(core).__name__} failed (see errors.log)")
            self._listens = before
            raise
        self._end(before, core, lengths, returned)
        self._handed.note(returned)
        return returned

    def assign(self, core: Any, number: int, path: str, value: Any) -> None:
        """Change an attribute of a core, or of a part of it."""
        wrapped = self._wrap(value)
        self._write(lambda: ["set", number, path, written(wrapped, self._refer)])
        *parts, name = path.split(".")
        for part in parts:
            core = getattr(core, part)
        setattr(core, name, _bare(wrapped))

    def ask(self, number: int, name: str, answer: Callable[[], Any]) -> Any:
        """Let a core ask something of its environment, and record the answer."""
        if self.over or not self._listens:
            return answer()
        self._listens = False
        try:
            found = answer()
        except ProtocolError as error:
            raised = ["raised", type(error).__name__, str(error)]
            self._write(lambda: ["answer", number, name, raised])
            raise
        finally:
            self._listens = True
        self._write(lambda: ["answer", number, name, written(found, self._refer)])
        return found

    def _begin(self, what: str, number: int, name: str, given: list[Any], named: dict[str, Any]) -> bool:
        self.turns += 1
        self._write(lambda: [what, number, name, written(given, self._refer), written(named, self._refer)])
        before, self._listens = self._listens, True
        return before

    def _end(self, before: bool, core: Any, lengths: dict[str, int], returned: Any) -> None:
        self._listens = before
        self._write(lambda: ["end", *outcome(core, lengths, returned, self._refer)])

    # Values

    def _noted(self, value: Any) -> Any:
        """Wrap a function that is given to a core, so that its answers are recorded."""
        if not callable(value):
            return value
        self._asked += 1
        return Asked(self, self._asked, value, "")

    def _wrap(self, value: Any) -> Any:
        """Wrap functions, and objects such as a signer, that a core may ask."""
        if callable(value):
            return self._noted(value)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            found = {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
            if any(callable(each) for each in found.values()):
                return type(value)(**{name: self._noted(each) for name, each in found.items()})
            return value
        if _is_known(value) or self._refer(value) is not None:
            return value
        self._asked += 1
        return AskedObject(self, self._asked, value)

    def _refer(self, value: object) -> list[Any] | None:
        if isinstance(value, RecordedCore):
            return ["core", value.recorded_number]
        if isinstance(value, Asked):
            return ["asked", value.asked_number]
        if isinstance(value, AskedObject):
            return ["asked", value.asked_number, value.asked_names]
        number = self._cores.get(id(value))
        if number is not None:
            return ["core", number]
        number = self._handed.number(value)
        return None if number is None else ["handed", number]

    # The file

    def _write(self, item: Callable[[], Any]) -> None:
        try:
            self._put(item())
        except Exception as error:
            self._stop(f"a value cannot be written: {error}")

    def _put(self, item: Any) -> None:
        if self.over:
            return
        data = values.encode(item)
        if len(data) > BLOCK_DATA_BYTES:
            self._stop(f"an item of {len(data)} bytes is too long for a block")
            return
        if not self._waiting or len(self._waiting[-1]) + len(data) > BLOCK_DATA_BYTES:
            self._waiting.append(bytearray())
        self._waiting[-1] += len(data).to_bytes(4, "little") + data
        if sum(map(len, self._waiting)) > WAITING_BYTES_MAX:
            self._waiting.clear()
            self._stop("the disk is too slow")

    def _stop(self, reason: str) -> None:
        self._put(["over", reason[:200]])
        if not self.over and reason != ENDED:
            log.warning("the record %s ends here: %s", self.path, reason)
        self.over = self.over or reason

    def _take(self) -> list[bytearray]:
        blocks, self._waiting = self._waiting, []
        return blocks

    def _save(self, blocks: Sequence[bytearray]) -> None:
        """Write blocks. A failure ends the record, because later blocks would not follow the failed one."""
        if self._has_failed or self._file.closed:
            return
        try:
            for data in blocks:
                block, self._before = pack_block(bytes(data), self._before)
                self._file.write(block)
                self.size_bytes += len(block)
            self._file.flush()
        except Exception as error:
            self._has_failed = True
            self._stop(f"it cannot be written: {error}")
            return
        if self.size_bytes > self._bytes_max and not self.over:
            self._stop(f"the record has {self.size_bytes} bytes, but at most {self._bytes_max} are allowed")


def open_record(path: Path, flag: str) -> Recorder:
    """Begin a record in the file that a person named with `flag`. Raises UsageError."""
    try:
        return Recorder(path)
    except OSError as error:
        raise UsageError(f"{flag} {path}: {(error.strerror or str(error)).lower()}") from None


class Handed:
    """The newest work items that cores handed out. They are remembered because each comes back as the very
    same object."""

    def __init__(self) -> None:
        self._count = 0
        self._objects: dict[int, object] = {}
        self._numbers: dict[int, int] = {}

    def note(self, returned: object) -> None:
        """Remember a value that a core returned."""
        if dataclasses.is_dataclass(returned):
            self._count += 1
            self._objects[self._count] = returned
            self._numbers[id(returned)] = self._count
            old = self._objects.pop(self._count - HANDED_MAX, None)
            if old is not None and self._numbers.get(id(old)) == self._count - HANDED_MAX:
                del self._numbers[id(old)]

    def number(self, value: object) -> int | None:
        """Return the number of a value, counted from the first; None if it is not remembered."""
        return self._numbers.get(id(value))

    def get(self, number: int) -> object:
        """Return the value with this number. Raises KeyError."""
        return self._objects[number]


def outcome(
    core: Any, lengths: dict[str, int], returned: Any, refer: values.Refer
) -> tuple[list[Any], str, str]:
    """Return the outcome of a turn: its events, the kinds of its messages, and a digest of everything."""
    made = {name: getattr(core, name)[lengths.get(name, 0) :] for name in OUTBOXES if hasattr(core, name)}
    try:
        answer = written(returned, refer)
    except Unrecordable:
        answer = type(returned).__name__
    events = [_shown(each, refer) for each in made.get("events", ())]
    sent = [answer, [_shown(each, refer) for each in made.get("sends", ())]]
    digest = blake2b(values.encode([events, sent]), digest_size=DIGEST_BYTES).hexdigest()
    return events, _in_short(returned, made.get("sends", ())), digest


def _shown(value: Any, refer: values.Refer) -> Any:
    try:
        return written(value, refer)
    except Unrecordable:
        return ["a", type(value).__qualname__]


def _in_short(returned: Any, sends: Any) -> str:
    """Return the kinds of messages that a turn sends, such as `Ping Ping Facts`."""
    if isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], list):
        returned = returned[1]
    found = [*(returned if isinstance(returned, list) else ()), *sends]
    names = [type(each[1]).__name__ for each in found if isinstance(each, tuple) and len(each) == 2]
    return " ".join(names[:32])


def _is_known(value: Any) -> bool:
    try:
        written(value, lambda each: ["core", 0] if isinstance(each, RecordedCore) else None)
    except Unrecordable:
        return False
    return True


def _version() -> str:
    try:
        return version("peerloom")
    except PackageNotFoundError:
        return "a checkout"


def _bare(value: Any) -> Any:
    """Return the value inside a wrapper, because cores know each other directly."""
    return value.recorded_core if isinstance(value, RecordedCore) else value


class RecordedCore:
    """A core as its shell sees it, with every call recorded."""

    def __init__(self, recorder: Recorder, core: Any, number: int, path: str = "") -> None:
        set_own = object.__setattr__
        set_own(self, "recorded_core", core)
        set_own(self, "recorded_number", number)
        set_own(self, "_recorder", recorder)
        set_own(self, "_path", path)
        set_own(self, "_whole", core)

    def __getattr__(self, name: str) -> Any:
        core = self.recorded_core
        found = getattr(core, name)
        if name.startswith("_") or self._recorder.over:
            return found
        if name in PARTS and not self._path:
            part = RecordedCore(self._recorder, found, self.recorded_number, f"{name}.")
            object.__setattr__(part, "_whole", self._whole)
            object.__setattr__(self, name, part)
            return part
        if not callable(found) or name in QUIET:
            return found
        recorder, number, path, whole = self._recorder, self.recorded_number, self._path + name, self._whole

        def turn(*given: Any, **named: Any) -> Any:
            return recorder.call(whole, number, path, found, given, named)

        object.__setattr__(self, name, turn)
        return turn

    def __setattr__(self, name: str, value: Any) -> None:
        self._recorder.assign(self._whole, self.recorded_number, self._path + name, value)


class Asked:
    """A function given to a core, which records its answers."""

    def __init__(self, recorder: Recorder, number: int, function: Callable[..., Any], name: str) -> None:
        self.asked_number = number
        self._recorder = recorder
        self._function = function
        self._name = name

    def __call__(self, *given: Any, **named: Any) -> Any:
        return self._recorder.ask(self.asked_number, self._name, lambda: self._function(*given, **named))


class AskedObject:
    """An object given to a core, such as a signer. Its answers are recorded, but not the object."""

    def __init__(self, recorder: Recorder, number: int, value: Any) -> None:
        self.asked_number = number
        self.asked_names = sorted(
            name
            for name in dir(type(value))
            if not name.startswith("_") and callable(getattr(type(value), name))
        )
        self._recorder = recorder
        self._value = value

    def __getattr__(self, name: str) -> Any:
        if name in self.asked_names:
            return Asked(self._recorder, self.asked_number, getattr(self._value, name), name)
        return self._recorder.ask(self.asked_number, name, lambda: getattr(self._value, name))
