"""This node's place in a run, that is, its membership. The place is taken once, and again when the trained
tensors change.

When a notebook's cell runs again, its optimizer takes over the place of the previous optimizer.
"""

import logging
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from gossip.averaging.group import Aggregate
from node.averaging.door import TicketGate
from node.averaging.participation import Participation
from node.averaging.signature import Row, signatures_of
from node.optimizer.session import TrainingSession
from node.portal import Portal

log = logging.getLogger("peerloom")
Rows = tuple[Row, ...]

_places: "weakref.WeakKeyDictionary[Portal[Any], dict[str, RunPlace]]" = weakref.WeakKeyDictionary()
"""The places by node and run name."""


class RunPlace:
    """One node's place in one run, for one optimizer."""

    def __init__(
        self,
        portal: Portal[Any],
        run_id: str,
        kind: str,
        rule: Aggregate,
        door: TicketGate | None,
        join_seconds: float,
    ) -> None:
        self._portal = portal
        self._run_id = run_id
        self._kind = kind
        self._rule: Aggregate = rule
        self._door = door
        self._join_seconds = join_seconds
        self._rows: Rows = ()
        self._session: TrainingSession | None = None
        self._give_up: Callable[[], Callable[[], None] | None] = lambda: None

    def take(self, rows: Rows, give_up: Callable[[], None]) -> TrainingSession:
        """Take part with these tensors. `give_up`, a bound method, is called when another optimizer takes
        over the place. Raises UsageError, or ValueError if another optimizer holds the place with different
        tensors."""
        earlier = _places.setdefault(self._portal, {}).get(self._run_id)
        if earlier is not None and earlier._is_held:
            earlier._yield_to(rows)
        session = self._enter(rows)
        self._give_up = weakref.WeakMethod(give_up)
        _places[self._portal][self._run_id] = self
        return session

    def change(self, rows: Rows) -> TrainingSession:
        """Take part with different tensors. Other peers see this peer leave and come back. Raises UsageError,
        PortalClosed."""
        if self._session is not None:
            self._session.close()
        return self._enter(rows)

    @property
    def _is_held(self) -> bool:
        return self._session is not None and not self._session.error

    def _enter(self, rows: Rows) -> TrainingSession:
        portal, me = self._portal, self._portal.subject
        signature, alike = signatures_of(self._kind, rows, self._rule)
        opened = partial(me.averaging.open, self._run_id, signature, None, self._rule, alike, self._door)
        run: Participation = portal.call_sync(opened)
        if portal.call_sync(lambda: len(me.members())):
            portal.run(run.settle, self._join_seconds)
        self._rows = rows
        self._session = TrainingSession(portal, run)
        return self._session

    def _yield_to(self, rows: Rows) -> None:
        """Give this place up to another optimizer of this node."""
        assert self._session is not None
        give_up = self._give_up()
        if give_up is None:  # the optimizer was freed without being closed
            self._session.close()
            return
        if rows != self._rows:
            raise ValueError(
                f"run {self._run_id!r}: an optimizer of this script already takes part in "
                f"it, with other tensors ({len(self._rows)} there, {len(rows)} here). "
                "close() it first if a cell is run again; or give this one a different "
                "run_id if it trains another model"
            )
        log.warning("run %r: this optimizer takes the place of the one that was made before", self._run_id)
        give_up()
