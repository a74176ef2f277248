"""Other lives of this peer's own key: earlier ones, and concurrent ones.

A life is one start of a process. Its alive facts carry its name (`gossip.messages.life_of`) and the name of
another known life. An earlier life cannot name a later one, so a fact that names this life proves that its
author lives now, as after copying a data folder. The younger of two, with the greater name, stops announcing
itself; the driver of its core ends it. The elder announces itself again once the other has ended.
`gossip.displaced_lives` spreads the facts.
"""

from collections.abc import Callable
from math import inf

from crypto.facts import Fact
from gossip.member import Event, OtherLifeHeard, RivalFound, RivalOutlived
from gossip.messages import LIFE_BYTES, AliveBody, Body, LeftBody, read_alive, started_of

LIVES_MAX = 16
"""Other lives that are remembered, the latest ones; each start of a copy is another life."""
AGAIN_SECONDS = (1.0, 2.0)
"""Pauses before the elder announces itself again. The younger runs for 0.6 s after it has met the elder,
longer under load, and may take others' sessions meanwhile."""
AGAIN_LISTENERS_MAX = 32
"""Members to which the elder itself sends each of these announcements."""


class OtherLives:
    """The other lives known here. `life` is this one. `announce(above, rival)` announces it, in a higher
    incarnation and naming another life. `check` checks a signature, and `events` takes what is found."""

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
        """Whether an older life of this key runs now, so that this one must stop."""
        self.again_at = inf
        """When this life, as the elder of two, is announced again."""
        self._announce = announce
        self._check = check
        self._events = events
        self._pauses: tuple[float, ...] = ()
        self._heard: dict[bytes, None] = {}
        self._rivals: dict[bytes, None] = {}

    def hear(self, now: float, fact: Fact, body: AliveBody | LeftBody, incarnation: int) -> None:
        """Handle a fact about another life of this key. Name that life, and rise above its incarnation if
        that is as high as ours.

        An earlier life has such an incarnation if its clock was set back since. A life that names ours is
        concurrent.
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
                # the last announcement: the elder must learn of this life
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
        """Handle another life of this key that runs now, in this incarnation: the elder announces itself
        above it, the younger stops announcing itself."""
        _remember(self._rivals, life)
        if life > self.life:
            self._outlive(now, incarnation, life)
        else:
            self.is_silent = True
            self.again_at = inf

    def announce_again(self, now: float) -> None:
        """Announce this life again: the other one should have ended."""
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
