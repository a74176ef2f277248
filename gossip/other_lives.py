"""Other lives of this peer's own key: those before this start of it, and those beside it.

A life is one start of a process. Its alive facts have its name (`gossip.messages.life_of`) and, once it has
heard of another, that one's. A life of long ago cannot name one that began later: so a fact that names this
life proves that its author lives now, as a copied data folder makes it. Of two the greater name, which began
later, is silent from then on; whoever drives its core ends it.
"""

from crypto.facts import Fact
from crypto.identity import PeerId
from gossip.member import OtherLifeHeard, RivalFound
from gossip.messages import LIFE_BYTES, AliveBody, AliveFact, Body, read_alive, read_body, started_of

LIVES_MAX = 16
"""Other lives that are told of: one key on more machines is one mistake."""
DISPLACED_MAX = 64
"""Members that came back in another life and have not asked for a list since."""


class OtherLives:
    """What is known of them. `life` is this one."""

    __slots__ = ("_displaced", "_heard", "_rivals", "is_silent", "life")

    def __init__(self, life: bytes) -> None:
        self.life = life
        self.is_silent = False
        """Whether an older life of this key is beside this one, which has to go."""
        self._heard: set[bytes] = set()
        self._rivals: set[bytes] = set()
        self._displaced: dict[PeerId, Fact] = {}

    def is_other(self, body: Body) -> bool:
        """Return whether an own fact is of another life; one without a name is of an older version."""
        return isinstance(body, AliveBody) and len(body.life) == LIFE_BYTES and body.life != self.life

    def is_new(self, body: AliveBody) -> bool:
        """Return whether `hear` would tell of it."""
        return self.is_other(body) and body.life not in self._heard and len(self._heard) < LIVES_MAX

    def hear(self, fact: Fact, body: AliveBody) -> OtherLifeHeard:
        """Take in the first fact of another life, which was checked."""
        self._heard.add(body.life)
        return OtherLifeHeard(read_alive(fact, body).profile.addresses)

    def is_rival(self, body: Body) -> bool:
        """Return whether a fact proves that another life is beside this one, and that is news."""
        if not isinstance(body, AliveBody) or not self.is_other(body) or body.rival != self.life:
            return False
        return body.life not in self._rivals and len(self._rivals) < LIVES_MAX

    def meet(self, fact: Fact, body: AliveBody) -> RivalFound:
        """Take in such a fact, which was checked."""
        self._rivals.add(body.life)
        profile, is_younger = read_alive(fact, body).profile, body.life > self.life
        self.is_silent = self.is_silent or not is_younger
        return RivalFound(started_of(body.life), profile.name, profile.addresses, is_younger)

    def displace(self, held: AliveFact, said: AliveFact) -> None:
        """Note that a live member speaks in another life than it had: it is to hear of that one, which may go
        on."""
        before, now = read_body(held.fact), read_body(said.fact)
        is_other = isinstance(before, AliveBody) and isinstance(now, AliveBody) and before.life != now.life
        if is_other:
            self._displaced[said.peer] = held.fact
            if len(self._displaced) > DISPLACED_MAX:
                del self._displaced[next(iter(self._displaced))]

    def displaced_by(self, peer: PeerId) -> tuple[Fact, ...]:
        """Return the life that `peer` has displaced here, to be told to it once; nothing as a rule."""
        fact = self._displaced.pop(peer, None)
        return () if fact is None else (fact,)
