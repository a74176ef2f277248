"""The order in which a stage computes units: doors (nodes that ask) take turns according to the tokens
computed for them, and so do the shares within a door.

This is deficit round robin at two levels. A door counts once, according to its weight, however many sessions
it has. A share is a group of sessions that the door defines, for instance all sessions of one API key, so a
door with many shares only divides its own turns. If several doors or shares want the stage, a call has only a
few units of each. An idle door earns at most one unit of credit. If a session's next unit is on its way, it
would miss a call that begins just before it arrives, and would have to wait for that call and then for its
own. So the stage waits for the unit, for a small part of a call, if the session was punctual after its
previous answer (anticipatory scheduling, Iyer and Druschel, 2001).
"""

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable
from math import inf

from crypto.identity import PeerId
from partition.model.serving import ROWS_MAX
from partition.serve.messages import UNIT_TOKENS_MAX, UnitWork
from partition.serve.served_session import ServedSession, SessionPart

BATCH_TOKENS_MAX = 1_024
"""Maximum number of tokens of one call to the stage: two of the largest chunks, or one chunk and everything
that all sessions decode."""
BATCH_ROWS_MAX = ROWS_MAX
"""Maximum number of rows of logits in one call."""
UNITS_BESIDE_MAX = 4
"""Maximum number of units of one door in a call if other doors want the stage too. Four together take less
than twice as long as one."""
TOKENS_BESIDE_MAX = 128
"""Number of tokens for each door in such a call, or for each share if only one door wants the stage. A single
one may use the total. The number is one chunk of a prompt."""
WANTED_SECONDS = 1.0
"""How long after its latest unit a session still counts as wanting the stage, because its door is preparing
the next token."""
WAIT_PART = 0.25
"""How long a stage waits for a unit, as a share of the previous call's time. This is the cost if the unit
does not come. The stage does not wait for a session whose previous unit came later than this."""
WEIGHT_MIN = 1e-3

Share = tuple[PeerId, int]


class StageTurns:
    """The turns of all doors at one node. `weight_of` returns a door's weight."""

    def __init__(self, weight_of: Callable[[PeerId], float]) -> None:
        self._weight_of = weight_of
        self._weights: dict[PeerId, float] = {}
        self._served: dict[PeerId, float] = {}
        """The tokens computed for each door that has a session, divided by its weight, and counted from a
        common beginning."""
        self._shares: dict[Share, float] = {}

    def enter(self, session: ServedSession) -> None:
        """Note that a session was opened. A new door or share gets no credit for the time before."""
        door = session.door
        self._served.setdefault(door, min(self._served.values(), default=0.0))
        self._weights[door] = max(WEIGHT_MIN, self._weight_of(door))
        beside = [count for (each, _), count in self._shares.items() if each == door]
        self._shares.setdefault((door, session.share), min(beside, default=0.0))

    def leave(self, session: ServedSession, left: Iterable[ServedSession]) -> None:
        """Note that a session is over. `left` are the other sessions of its door."""
        shares = {each.share for each in left}
        if session.share not in shares:
            self._shares.pop((session.door, session.share), None)
        if not shares:
            self._served.pop(session.door, None)
            self._weights.pop(session.door, None)

    def give_back(self, part: SessionPart, tokens: int) -> None:
        """Undo the count for a unit that was chosen but not computed."""
        self._served[part.door] -= tokens / self._weights[part.door]
        self._shares[part.door, part.share] -= tokens

    def choose(self, now: float, sessions: Collection[SessionPart]) -> list[SessionPart]:
        """Return the parts whose next units are computed together, the least served first."""
        ready: dict[PeerId, dict[int, deque[SessionPart]]] = {}
        for each in sessions:
            if each.may_compute:
                ready.setdefault(each.door, {}).setdefault(each.share, deque()).append(each)
        wanting = _wanting(now, sessions)
        doors = {door for door, _ in wanting}
        self._bound_credit(wanting)
        least = min((self._weights[door] for door in doors), default=1.0)
        left, rows_left = BATCH_TOKENS_MAX, BATCH_ROWS_MAX
        if len(doors) > 1:
            left = min(left, int(TOKENS_BESIDE_MAX * sum(self._weights[door] for door in ready) / least))
        elif len(wanting) > 1:
            left = min(left, TOKENS_BESIDE_MAX * sum(map(len, ready.values())))
        chosen: list[SessionPart] = []
        units: Counter[PeerId | Share] = Counter()
        while ready:
            door = min(ready, key=lambda peer: (self._served[peer], peer))
            share = min(ready[door], key=lambda number: (self._shares[door, number], number))
            session = ready[door][share].popleft()
            work = session.waiting[0].message
            assert isinstance(work, UnitWork)
            if chosen and (work.tokens > left or work.wanted > rows_left):
                break  # it has the next turn
            left -= work.tokens
            rows_left -= work.wanted
            self._served[door] += work.tokens / self._weights[door]
            self._shares[door, share] += work.tokens
            chosen.append(session)
            units.update((door, (door, share)))
            has_enough = len(doors) == 1 < len(wanting) and units[door, share] >= UNITS_BESIDE_MAX
            if has_enough or not ready[door][share]:
                del ready[door][share]
            has_enough = len(doors) > 1 and units[door] * least >= UNITS_BESIDE_MAX * self._weights[door]
            if has_enough or not ready[door]:
                del ready[door]
        return chosen

    def _bound_credit(self, wanting: Collection[Share]) -> None:
        """Limit the credit of the doors that want the stage to one unit less than the most served of them. A
        door with more credit did not use its turns."""
        floor: dict[PeerId | None, float] = {}
        for door, share in wanting:
            served = self._served[door] - UNIT_TOKENS_MAX / self._weights[door]
            floor[None] = max(floor.get(None, 0.0), served)
            floor[door] = max(floor.get(door, 0.0), self._shares[door, share] - UNIT_TOKENS_MAX)
        for door, share in wanting:
            self._served[door] = max(self._served[door], floor[None])
            self._shares[door, share] = max(self._shares[door, share], floor[door])


def wait_until(now: float, sessions: Collection[SessionPart], call_seconds: float) -> float:
    """Return the time until which a stage waits for units that are on their way; -inf if it need not wait.
    Its previous call took `call_seconds`."""
    wait = WAIT_PART * call_seconds
    ready = {(each.door, each.share) for each in sessions if each.may_compute}
    return max(
        (
            each.silent_since + wait
            for each in sessions
            if (each.door, each.share) not in ready
            and not each.rests
            and each.pause_seconds <= wait
            and now - wait < each.silent_since < inf
        ),
        default=-inf,
    )


def _wanting(now: float, sessions: Collection[SessionPart]) -> set[Share]:
    """Return the shares that want the stage: one of their units waits, or came within `WANTED_SECONDS`."""
    return {
        (each.door, each.share)
        for each in sessions
        if not each.rests and each.silent_since > now - WANTED_SECONDS
    }
