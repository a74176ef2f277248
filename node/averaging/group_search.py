"""One participant's search for the group of each attempt: its wish, and the wait for peers with the same
wish.

The core `gossip.matchmaking` does the matchmaking; this file makes the wishes, and waits for the outcome.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import Literal

import trio
from blake3 import blake3

from crypto.identity import PeerId, short_peer
from gossip.averaging.arrivals import UploadRate
from gossip.averaging.grid import GROUP_SIZE_MIN
from gossip.averaging.group import GROUP_MEMBERS_MAX, NONCE_BYTES, Aggregate, Group, GroupMember, Terms
from gossip.averaging.robust.reduction import Vector
from gossip.averaging.walk import GridWalk, Spot
from gossip.matchmaking import CameLate, Formed, GroupWish, NotFormed
from gossip.roster import Roster
from node.averaging.context import ParticipationService
from node.averaging.expectations import Expectations, expected_in
from node.averaging.rounds import Gate, RoundWish

AGAIN_SECONDS = 4.0
"""How long later attempts of a round wait for any peer, in addition to their window."""
DECLARED_SECONDS = 3.0
"""Seconds added to a window if members find each other through the DHT, for storing a record and finding the
others' records."""
NAMED_MAX = 3
"""Maximum number of peers named in a status, which is one line."""
NEWCOMERS_SECONDS = 1.0
"""Seconds between two checks for peers that were unknown, or not admitted, when a wish was made."""
UNAWAITED_SECONDS = 0.25
"""How long a group waits if it expects no peer although others are listed; a listed peer that is ready may
still enter."""
SPOT_SECONDS = 1.0
"""How long a peer waits in its cell of the grid for any other peer, in addition to its window."""

Dtype = Literal["float32", "float64"]


class GroupSearch:
    """Finds the groups for one participant's rounds in one run."""

    def __init__(
        self,
        key: bytes,
        roster: Roster,
        service: ParticipationService,
        expectations: Expectations,
        upload: UploadRate,
        *,
        gate: Gate | None,
        aggregate: Aggregate,
        changed: Callable[[], Awaitable[object]],
        ended: Callable[[], str],
    ) -> None:
        """`changed` returns when the participants have changed. `ended` returns why this peer no longer takes
        part, or an empty text while it does."""
        self._key = key
        self._roster = roster
        self._service = service
        self._expectations = expectations
        self._upload = upload
        self._gate = gate
        self._aggregate = aggregate
        self._changed = changed
        self._ended = ended
        self._peer = service.seams.network.peer
        self._formed: dict[bytes, trio.Event] = {}
        self._outcomes: dict[bytes, Formed | NotFormed] = {}
        self._items = 1
        self._dtype: Dtype = "float32"
        self._begun_at = 0.0
        self.walk = GridWalk(key, self._peer)
        """This peer's walk over the grid, which is used if not all participants fit into one group."""
        self.status = ""
        """The reason why the present search waits, as a text for people; empty if there is no search."""
        self.looked_seconds = 0.0
        """The seconds of the present round spent on finished searches for groups."""
        self.look_seconds: float | None = None
        """How long, from its beginning, the present round may search for a group; None while it does not
        search."""

    def begin(self, now: float) -> None:
        """Begin a round at time `now`."""
        self._begun_at, self.looked_seconds = now, 0.0

    def matched(self, event: object) -> None:
        """Handle an event of this node's matchmaking, which may be about a different run."""
        if isinstance(event, Formed | NotFormed) and event.key in self._formed:
            self._outcomes[event.key] = event
            self._formed[event.key].set()
        elif isinstance(event, CameLate):
            self._expectations.came_late(event)

    def close(self) -> None:
        """End the present search."""
        for formed in self._formed.values():
            formed.set()

    async def find(
        self, vector: Vector | None, wanted: RoundWish, attempt: int
    ) -> tuple[Group, Spot | None] | str:
        """Return the group that forms for an attempt of a round and its spot in the grid, if it has one,
        or the reason why none forms. If no peer comes to the spot, search again without a spot, for the next
        group that forms."""
        spot = None
        if wanted.round is None:
            count = 0 if self._roster.is_whole else self._roster.count
            spot = self.walk.spot(expected_in(self._roster, None), wanted.size_max, count)
        found = await self._find_at(spot, vector, wanted, attempt)
        if isinstance(found, str) and spot is not None and not self._ended():
            spot = None
            found = await self._find_at(None, vector, wanted, attempt)
        return found if isinstance(found, str) else (found, spot)

    async def _find_at(
        self, spot: Spot | None, vector: Vector | None, wanted: RoundWish, attempt: int
    ) -> Group | str:
        service = self._service
        wish, patience_seconds = self._wish(spot, vector, wanted, attempt)
        formed = self._formed[wish.key] = trio.Event()
        self._outcomes.pop(wish.key, None)
        self.status = f"a group of {len(self._roster.reports) + 1} peers"
        self.look_seconds = wish.begun_at - self._begun_at + patience_seconds
        try:
            service.match(lambda now: service.matches.begin(now, wish))
            async with trio.open_nursery() as nursery:
                if self._is_declared(spot):
                    nursery.start_soon(service.declare, wish.key, patience_seconds)
                else:
                    nursery.start_soon(self._tell_newcomers, wish, wanted.round)
                await formed.wait()
                nursery.cancel_scope.cancel()
        finally:
            self.status, self.look_seconds = "", None
            self.looked_seconds += service.seams.clock.monotonic() - wish.begun_at
            if self._formed.get(wish.key) is formed:
                del self._formed[wish.key]
            outcome = self._outcomes.pop(wish.key, None)
            for each in self._expectations.ended(wish, is_kept=outcome is not None):
                service.match(lambda _, each=each: service.matches.end(each))  # type: ignore[misc]  # bound now
        if isinstance(outcome, Formed):
            return outcome.group
        return self._ended() if outcome is None else outcome.reason

    def _wish(
        self, spot: Spot | None, vector: Vector | None, wanted: RoundWish, attempt: int
    ) -> tuple[GroupWish, float]:
        """Return this peer's wish, and how many seconds it waits for any peer. Members of a failed group are
        still expected, except those known to be gone, because most of them only waited for another member."""
        roster, expectations = self._roster, self._expectations
        rate = self._upload.claimed if wanted.rate is None else wanted.rate
        nonce, coordinate = self._service.seams.entropy(NONCE_BYTES), 0 if spot is None else spot.coordinate
        near = self._awaited(wanted.round) if self._is_expecting(wanted.round) else ()
        expected = expectations.of(near)
        is_declared = self._is_declared(spot)
        window, patience, size_hoped = self._waits(spot, wanted, attempt, is_alone=not expected, near=near)
        now = self._service.seams.clock.monotonic()
        wish = GroupWish(
            GroupMember(self._peer, nonce, rate, vector is not None, coordinate),
            self._meeting_key(spot, wanted.round, attempt),
            expected,
            self._maker(vector, wanted, attempt),
            now,
            window_seconds=window + (DECLARED_SECONDS if is_declared else 0.0),
            patience_seconds=patience,
            size_min=min(wanted.size_min, wanted.size_max if self._fits_all else GROUP_SIZE_MIN),
            size_max=wanted.size_max,
            is_exclusive=wanted.round is not None,
            others=() if is_declared else tuple(roster.reports),
            size_hoped=size_hoped,
            admits=None if self._gate is None else self._gate.admits,
            waits=expectations.waits(now, expected, wanted),
            leaves_out=expectations.leaves_out,
            declines=expectations.declines,
            rank=None if is_declared else expectations.rank,
        )
        return wish, patience

    def _waits(
        self, spot: Spot | None, wanted: RoundWish, attempt: int, *, is_alone: bool, near: Sequence[PeerId]
    ) -> tuple[float, float, int]:
        """Return a wish's window in seconds, how many seconds it waits for any peer, and the size at which it
        stops waiting. It `is_alone` if it expects no peer; `near` are the peers that may come."""
        window, patience = wanted.window_seconds, wanted.patience_seconds
        size_hoped = 0 if spot is None else spot.size
        are_others_busy = wanted.round is not None and self._roster.own.has_state and self._roster.reports
        if is_alone and (near or are_others_busy):
            # A peer that is ready nevertheless enters, and so do the peers that follow immediately.
            window, size_hoped = min(window, UNAWAITED_SECONDS), GROUP_MEMBERS_MAX
            patience = patience if wanted.round is None else 2 * window
        if attempt:  # members that succeeded in the previous attempt do not come again
            patience = min(patience, window + AGAIN_SECONDS)
        if spot is not None:  # a peer alone in its cell moves to where others are
            patience = min(patience, window + SPOT_SECONDS)
        if self._is_declared(spot):  # a search in the DHT takes some time
            patience += DECLARED_SECONDS
        return window, patience, size_hoped

    def _meeting_key(self, spot: Spot | None, round: int | None, attempt: int) -> bytes:  # noqa: A002 - the field's word
        """Return the key under which the members of a group find each other."""
        number = -1 if round is None else round
        name = self._key + self._roster.signature + number.to_bytes(8, "big", signed=True)
        if round is not None and attempt:  # late peers cannot enter the group of the first attempt
            name += attempt.to_bytes(1, "big")
        return blake3(name + (b"" if spot is None else spot.key)).digest()

    def _maker(
        self, vector: Vector | None, wanted: RoundWish, attempt: int
    ) -> Callable[[tuple[GroupMember, ...]], Group]:
        """Return a function that creates the group for its members. If there is no vector, the terms have the
        shape of the previous one."""
        if vector is not None:
            self._items, self._dtype = vector.size, ("float64" if vector.dtype.itemsize == 8 else "float32")
        round_number = self.walk.turn if wanted.round is None else wanted.round
        terms = Terms(
            wanted.mode, wanted.codec, self._roster.signature, self._items, self._dtype, self._aggregate
        )
        return lambda members: Group(self._key, round_number, attempt, terms, members)

    @property
    def _fits_all(self) -> bool:
        """Whether all participants fit into one group."""
        return len(self.walk.axes) < 2

    def _is_expecting(self, round: int | None) -> bool:  # noqa: A002 - the field's word
        """Return whether particular peers are expected. In a grid, only the number of peers in each cell is
        known."""
        return round is not None or self._fits_all

    def _is_declared(self, spot: Spot | None) -> bool:
        """Return whether members find each other through the DHT."""
        return spot is not None and not self._roster.is_whole

    def _awaited(self, round: int | None) -> Sequence[PeerId]:  # noqa: A002 - the field's word
        """Return the expected peers; without a round number these include joining peers, which may be
        ready."""
        return tuple(self._roster.reports) if round is None else expected_in(self._roster, round)

    async def _tell_newcomers(self, wish: GroupWish, round: int | None) -> None:  # noqa: A002 - the field's word
        """Send a wish to peers that become known after it was made, since it would not reach them otherwise.
        Update the status with the peers it waits for. Runs until cancelled."""
        matches, told, key = self._service.matches, set(self._roster.reports), wish.key
        are_expected = self._is_expecting(round)
        while True:
            if missing := wish.awaited:
                names = ", ".join(short_peer(peer) for peer in missing[:NAMED_MAX])
                more = f" and {len(missing) - NAMED_MAX} more" if len(missing) > NAMED_MAX else ""
                self.status = f"peers that are not ready yet: {names}{more}"
            with trio.move_on_after(NEWCOMERS_SECONDS):
                await self._changed()
            new = [peer for peer in self._roster.reports if peer not in told]
            if not new:
                continue
            told.update(new)
            expected = set(self._expectations.of(self._awaited(round))) if are_expected else set()
            awaited = [peer for peer in new if peer in expected]
            others = [peer for peer in new if peer not in expected]
            self._service.match(lambda now, awaited=awaited: matches.expect(now, key, awaited))  # type: ignore[misc]  # bound now
            self._service.match(lambda _, others=others: matches.introduce(key, others))  # type: ignore[misc]  # bound now
