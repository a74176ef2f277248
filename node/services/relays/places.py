"""Places (reservations) of this node at relays: chooses relays, and renews places. Cores without I/O.

`PlaceSearch` chooses relays, `PlaceLease` renews a place at one of them. `now` is monotonic seconds. The
conversation itself and its connections are in `reservations`, and in the simulator.
"""

from collections.abc import Sequence
from typing import Any

from crypto.identity import PeerId
from node.services.relays.settings import RELAYS, RelaySettings
from node.transport.announced import CIRCUITS_TOLD_MAX

WANTED = CIRCUITS_TOLD_MAX
"""Number of relays in use: more than one, because a relay may vanish."""
RENEW_SECONDS = 20.0
"""Seconds between renewals, which also test whether a router still knows the connection. A place lasts thirty
times as long."""
ANSWER_SECONDS = 5.0
"""Time limit for the answer to a renewal."""
TRIED_MAX = 256
"""Maximum number of relays remembered as to be left alone: as many as there are members in view."""


class PlaceSearch:
    """The relays of one node: those that are asked or keep a place, and those that are left alone for a
    while."""

    def __init__(self, settings: RelaySettings = RELAYS) -> None:
        self._settings = settings
        self._asked: dict[PeerId, None] = {}
        self._left_alone: dict[PeerId, float] = {}
        self._kept_since: dict[PeerId, float] = {}
        # How many places in a row each relay lost early, the latest last.
        self._short: dict[PeerId, int] = {}

    @property
    def asked(self) -> tuple[PeerId, ...]:
        """The relays that are asked for a place, or keep one."""
        return tuple(self._asked)

    @property
    def sizes(self) -> dict[str, tuple[int, int]]:
        """The size and limit of each table that others can make grow."""
        return {
            "asked": (len(self._asked), WANTED),
            "left alone": (len(self._left_alone), TRIED_MAX),
            "short": (len(self._short), TRIED_MAX),
        }

    def next(self, now: float, candidates: Sequence[PeerId]) -> PeerId | None:
        """Return the relay to ask now, and record that it is asked. Return None if there are enough relays,
        or there is no further one. `candidates` are sorted, the best first."""
        self._left_alone = {peer: until for peer, until in self._left_alone.items() if until > now}
        if len(self._asked) >= WANTED:
            return None
        for relay in candidates:
            if relay not in self._asked and relay not in self._left_alone:
                self._asked[relay] = None
                return relay
        return None

    def kept(self, now: float, relay: PeerId) -> None:
        """Note that a relay keeps a place from now on."""
        self._kept_since[relay] = now

    def ended(self, now: float, relay: PeerId) -> None:
        """Note that a relay refused or failed, or that the place there is lost."""
        self._asked.pop(relay, None)
        since = self._kept_since.pop(relay, None)
        seconds = self._settings.refused_seconds if since is None else self._lost_seconds(now, relay, since)
        self._left_alone.pop(relay, None)
        self._left_alone[relay] = now + seconds
        _shorten(self._left_alone)

    def _lost_seconds(self, now: float, relay: PeerId, since: float) -> float:
        """Return how long to leave a relay alone after a place there was lost."""
        before = self._short.pop(relay, 0)
        if now - since >= self._settings.stood_seconds:
            return self._settings.lost_seconds
        self._short[relay] = before + 1
        _shorten(self._short)
        longer_seconds = self._settings.lost_seconds * 4.0 ** min(before, 16)
        return float(min(self._settings.refused_seconds, longer_seconds))


def _shorten(table: dict[PeerId, Any]) -> None:
    if len(table) > TRIED_MAX:
        del table[next(iter(table))]


class PlaceLease:
    """A place at one relay, from the first request on. The first request is sent immediately."""

    def __init__(self, now: float) -> None:
        self._is_answered = False
        self.deadline = now + ANSWER_SECONDS
        """When to call `wake`."""

    @property
    def awaits_answer(self) -> bool:
        """Whether the relay was asked, and has not answered yet."""
        return not self._is_answered

    def kept(self, now: float) -> None:
        """Note that the relay keeps the place."""
        self._is_answered, self.deadline = True, now + RENEW_SECONDS

    def wake(self, now: float) -> bool:
        """Return whether to renew now. False means that the relay did not answer the previous request, so the
        place is lost."""
        if not self._is_answered:
            return False
        self._is_answered, self.deadline = False, now + ANSWER_SECONDS
        return True
