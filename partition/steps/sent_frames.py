"""The frames that a replica has sent, kept so that they can be sent again until their step is applied.

Frames are opaque objects of the driver, identified by their micro-batch and direction.
"""

from collections.abc import Callable
from dataclasses import dataclass

from crypto.identity import PeerId
from partition.steps.frames import Direction
from partition.steps.routes import Routes

Key = tuple[bool, int, Direction]
"""Whether the frame is for training, the micro-batch, and the direction."""


@dataclass
class _Kept:
    frame: object
    receiver: PeerId | None = None
    plan: bytes = b""


class KeptFrames:
    """Frames by key, each with the receiver to which it was last sent, and the plan under which it was
    sent."""

    def __init__(self) -> None:
        self._kept: dict[Key, _Kept] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, key: Key, frame: object) -> None:
        """Keep a frame that was just made. If the same frame was made before, the earlier one stays."""
        if key not in self._kept:
            self._kept[key] = _Kept(frame)

    def due(self, key: Key, receiver: PeerId | None, plan: bytes) -> object | None:
        """Return the frame if `receiver` has not been sent it under this plan, and mark it as sent; otherwise
        None."""
        kept = self._kept.get(key)
        if kept is None or receiver is None or (kept.receiver, kept.plan) == (receiver, plan):
            return None
        kept.receiver, kept.plan = receiver, plan
        return kept.frame

    def wanted(
        self, key: Key, routes: Routes, stage: int, plan: bytes
    ) -> tuple[PeerId | None, object | None]:
        """Return the receiver of a frame of `stage`, and the frame if it must be sent (see `due`)."""
        train, number, direction = key
        if routes.train != train:
            return None, None
        receiver = routes.wants(stage + (1 if direction == "input" else -1), number)
        return receiver, self.due(key, receiver, plan)

    def keys(self) -> list[Key]:
        """Return the keys in the order in which the frames were made."""
        return list(self._kept)

    def sent_to(self, receiver: PeerId, plan: bytes) -> list[object]:
        """Return the frames that a broken stream to `receiver` may have lost."""
        return [row.frame for row in self._kept.values() if (row.receiver, row.plan) == (receiver, plan)]

    def drop(self, unwanted: Callable[[Key], bool]) -> None:
        """Forget the frames whose key is unwanted."""
        for key in [key for key in self._kept if unwanted(key)]:
            del self._kept[key]

    def clear(self) -> None:
        """Forget all frames, because their step is applied."""
        self._kept.clear()
