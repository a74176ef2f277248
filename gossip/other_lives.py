"""Other lives of this peer's own key: earlier ones, and concurrent ones.

A life is one start of a process. Its alive facts carry its name (`gossip.messages.life_of`) and the name of
one other known life. An earlier life cannot name a later one. So a fact that names this life proves that its
author runs concurrently, as after copying a data folder. The younger of the two, with the greater name, stops
announcing itself, and the driver of its core ends it. The elder announces itself again once the younger has
ended. `gossip.displaced_lives` spreads the facts.
"""

from collections.abc import Callable
from math import inf

from crypto.facts import Fact
from gossip.member import Event, OtherLifeHeard, RivalFound, RivalOutlived
from gossip.messages import LIFE_BYTES, AliveBody, Body, LeftBody, read_alive, started_of

LIVES_MAX = 16
"""Maximum number of other lives remembered, the latest ones; each start of a copy is a new life."""
AGAIN_SECONDS = (1.0, 2.0)
"""Pauses before the elder announces itself again. The younger runs for 0.6 s after it has found the elder,
longer under load, and may meanwhile take over others' sessions."""
AGAIN_LISTENERS_MAX = 32
"""Maximum number of members to which the elder itself sends each of these announcements."""


class OtherLives:
    """The other lives known here. `life` is this process's own. `announce(above, rival)` announces this life
    in an incarnation higher than `above`, naming the life `rival`. `check` checks a signature, and `events`
    receives what is found."""

    __slots__ = (
        "_announce",
        "_check",
        "_events",
        "_heard",
        "_pauses",
        "_rivals",
        "again_at",
        "is_silent",
        "life",
    )

    def __init__(
        self,
        life: bytes,
        events: list[Event],
        *,
        announce: Callable[[int, bytes], None],
        check: Callable[[Fact, Body], None],
    ) -> None:
        self.life = life
        self.is_silent = False
        """Whether an older life of this key is running now, so that this one must stop."""
        self.again_at = inf
        """The time at which this life, as the elder of two, is announced again."""
        self._announce = announce
        self._check = check
        self._events = events
        self._pauses: tuple[float, ...] = ()
        self._heard: dict[bytes, None] = {}
        self._rivals: dict[bytes, None] = {}

    def hear(self, now: float, fact: Fact, body: AliveBody | LeftBody, incarnation: int) -> None:
        """Handle a fact about a different life of this key. Announce the name of that life. If its
        incarnation is at least as high as ours, rise above it.

        An earlier life has such an incarnation if its clock has since been set back. A life that names ours
        is concurrent.
        """
        life = body.life if isinstance(body, AliveBody) and len(body.life) == LIFE_BYTES else b""
        is_other = bool(life) and life != self.life
        is_named = is_other and isinstance(body, AliveBody) and body.rival == self.life
        is_rival, is_higher = is_named and life not in self._rivals, body.incarnation >= incarnation
        is_new = is_other and life not in self._heard
        if not (is_new or is_rival or is_higher):
            return
        self._check(fact, body)
        if is_new and isinstance(body, AliveBody):
            _remember(self._heard, life)
            self._events.append(OtherLifeHeard(read_alive(fact, body).profile.addresses))
        if is_rival and isinstance(body, AliveBody):
            if life < self.life:
                # the final announcement, so that the elder learns of this life
                self._announce(body.incarnation, life)
            self.meet(now, life, body.incarnation)
            profile = read_alive(fact, body).profile
            found = RivalFound(started_of(life), profile.name, profile.addresses, life > self.life)
            self._events.append(found)
        elif is_higher and life in self._rivals and life > self.life:
            self._outlive(now, body.incarnation, life)
        elif is_higher:
            self._announce(body.incarnation, life if is_other else b"")

    def meet(self, now: float, life: bytes, incarnation: int) -> None:
        """Handle a different life of this key that runs now, in this incarnation. The elder announces itself
        with a higher incarnation; the younger stops announcing itself."""
        _remember(self._rivals, life)
        if life > self.life:
            self._outlive(now, incarnation, life)
        else:
            self.is_silent = True
            self.again_at = inf

    def announce_again(self, now: float) -> None:
        """Announce this life again, because the other life should have ended by now."""
        self._announce(0, b"")
        self._events.append(RivalOutlived())
        self._plan(now)

    def _outlive(self, now: float, above: int, life: bytes) -> None:
        if not self.is_silent:
            self._announce(above, life)
            self._events.append(RivalOutlived())
            self._pauses = AGAIN_SECONDS
            self._plan(now)

    def _plan(self, now: float) -> None:
        self.again_at = now + self._pauses[0] if self._pauses else inf
        self._pauses = self._pauses[1:]


def _remember(lives: dict[bytes, None], life: bytes) -> None:
    lives[life] = lives.pop(life, None)
    if len(lives) > LIVES_MAX:
        del lives[next(iter(lives))]
