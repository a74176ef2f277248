"""The signed frames of committed steps, kept for later audits. Pure, and bounded in steps, age and size.

A node keeps the frames of a run that its stage received or sent. It keeps those of the newest STEPS_KEPT
steps that were applied here, and those of the first step after the newest checkpoint, whose state can be
restored; all for at most KEPT_SECONDS. A frame is its signed header, which identifies its payload by digest.
Up to FACTS_MAX headers are kept. Payloads are kept only up to PAYLOADS_BYTES_MAX in total.

Not here: whether a frame is right (`node.runs.audits`).
"""

from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from crypto.facts import Fact
from partition.codecs.codec import Payload
from partition.steps.frames import Direction, FrameHeader

STEPS_KEPT = 16
KEPT_SECONDS = 600.0
FACTS_MAX = 8_192
"""Maximum number of headers. At some 500 bytes each, they take 4 MB."""
PAYLOADS_BYTES_MAX = 64 << 20


class FrameKey(NamedTuple):
    """The key of a frame in the archive."""

    run: bytes
    step: int
    stage: int
    """The stage that receives the frame."""
    direction: Direction
    microbatch: int
    author: bytes


class KeptFrame(NamedTuple):
    """A signed header, with its payload as long as there is room for it."""

    fact: Fact
    payload: Payload | None
    at: float


class FrameArchive:
    """The archive of one node, over all its runs. Times are in seconds of the caller's clock."""

    def __init__(self, facts_max: int = FACTS_MAX, bytes_max: int = PAYLOADS_BYTES_MAX) -> None:
        self._facts_max = facts_max
        self._bytes_max = bytes_max
        self._frames: OrderedDict[FrameKey, KeptFrame] = OrderedDict()
        self._with_payload: dict[FrameKey, None] = {}
        self._committed: defaultdict[bytes, set[int]] = defaultdict(set)
        self._marked: dict[bytes, int] = {}
        self.held_bytes = 0

    def __len__(self) -> int:
        return len(self._frames)

    def note(self, now: float, run: bytes, header: FrameHeader, fact: Fact, payload: Payload) -> None:
        """Keep a frame. The same frame under a later attempt replaces it."""
        key = FrameKey(run, header.step, header.stage, header.direction, header.microbatch, fact.author)
        self._drop(key)
        self._frames[key] = KeptFrame(fact, payload, now)
        self._with_payload[key] = None
        self.held_bytes += len(payload.data)
        while len(self._frames) > self._facts_max:
            self._drop(next(iter(self._frames)))
        if self.held_bytes > self._bytes_max:
            self._make_room()

    def marked(self, run: bytes, step: int) -> None:
        """Note that a run's checkpoint after `step` steps was saved, so that frames of the next step can be
        audited."""
        self._marked[run] = step

    def committed(self, now: float, run: bytes, step: int) -> None:
        """Note that a step was applied here: its frames may now be asked for, and frames of old steps are
        dropped."""
        self.expire(now)
        self._committed[run].add(step)
        for key in [key for key in self._frames if key.run == run and self._is_old(key, step)]:
            self._drop(key)
        kept = {each for each in self._committed[run] if each > step - STEPS_KEPT}
        self._committed[run] = kept | (self._committed[run] & {self._marked.get(run, -1)})

    def expire(self, now: float) -> None:
        """Forget frames older than KEPT_SECONDS."""
        for key, frame in list(self._frames.items()):
            if frame.at > now - KEPT_SECONDS:
                break
            self._drop(key)
        for run in self._committed.keys() - {key.run for key in self._frames}:
            del self._committed[run]
            self._marked.pop(run, None)

    def get(self, key: FrameKey) -> KeptFrame | None:
        """Return a frame of a step that was applied here, or None."""
        return self._frames.get(key) if key.step in self._committed.get(key.run, ()) else None

    def of_step(self, run: bytes, step: int) -> Iterator[FrameKey]:
        """Yield the keys of the frames of a step that was applied here."""
        if step in self._committed.get(run, ()):
            yield from (key for key in self._frames if key.run == run and key.step == step)

    def _is_old(self, key: FrameKey, newest: int) -> bool:
        return key.step <= newest - STEPS_KEPT and key.step != self._marked.get(key.run)

    def _drop(self, key: FrameKey) -> None:
        self._drop_payload(key)
        self._frames.pop(key, None)

    def _drop_payload(self, key: FrameKey) -> None:
        frame = self._frames.get(key)
        if frame is not None and frame.payload is not None:
            self.held_bytes -= len(frame.payload.data)
            self._frames[key] = frame._replace(payload=None)
        self._with_payload.pop(key, None)

    def _make_room(self) -> None:
        """Drop the oldest payloads. Those of marked steps are dropped last."""
        spared = []
        while self.held_bytes > self._bytes_max and self._with_payload:
            key = next(iter(self._with_payload))
            if key.step == self._marked.get(key.run):
                spared.append(key)
                del self._with_payload[key]
            else:
                self._drop_payload(key)
        self._with_payload.update(dict.fromkeys(spared))
        for key in spared:
            if self.held_bytes > self._bytes_max:
                self._drop_payload(key)
