"""Reports the status and figures of an optimizer that trains with peers, and of these peers."""

import logging
from collections.abc import Callable
from typing import Any

from gossip.roster import Report
from node.optimizer.differences import Differences
from node.optimizer.health import Health
from node.optimizer.hyperparameters import differences
from node.optimizer.joined import JoinedOptimizer
from node.optimizer.position import RunPosition
from node.optimizer.session import TrainingSession
from node.optimizer.settings import Settings, Stats
from node.optimizer.status import StatusLine
from node.optimizer.trained import TrainedTensors

log = logging.getLogger("peerloom")


class TrackedOptimizer(JoinedOptimizer):
    """The part of `node.optimizer.wrapper` that only observes."""

    settings: Settings
    global_step: int
    _differences: Differences | None
    _health: Health
    _line: StatusLine
    _position: RunPosition
    _session: TrainingSession | None
    _stats: Stats
    _trained: TrainedTensors
    _used: bytes

    @property
    def status(self) -> str:
        """Return one sentence: what this peer does in its run or waits for, for how long, and what ends
        that."""
        reports = [] if self._session is None else self._session.view.reports
        drift = differences(self._used, self.global_step, reports, self.param_groups)
        parts = [self._health.sickness() or self._line.sentence(), self._health.failures(), drift]
        return "; ".join(part for part in parts if part)

    @property
    def _status(self) -> str:
        return self._line.text

    @_status.setter
    def _status(self, text: str) -> None:
        self._line.say(text)

    @property
    def _others(self) -> list[Report]:
        """Return the reports of the other members that have a state."""
        assert self._session is not None
        return self._position.others(self._session.view.reports)

    @property
    def _voices(self) -> list[Report]:
        """Return the reports of peers that average with this one, or could."""
        assert self._session is not None
        return self._position.others(self._session.view.voices)

    def _alone_or_not(self) -> str:
        if self._session is None or self._session.error:
            return "alone: " + (self._session.error if self._session is not None else "not in a run")
        view = self._session.view
        others = self._others
        if others and self._position.is_alone(others):
            unlikely = (
                f"alone at step {self.global_step}: the others claim steps that the run cannot have reached"
            )
            return f"{unlikely}; if they are right, start this script again to take their state"
        if view.peers:
            return f"step {self.global_step}, {view.peers} peers{self._unlike()}"
        return f"alone in run {self.settings.run_id!r}{self._unlike()}"

    def _unlike(self) -> str:
        """Name the differences of other peers that use this run's name."""
        strays = self._trained.strays()
        signatures = () if self._session is None else self._session.view.stranger_signatures
        texts = [] if self._differences is None else self._differences.texts(signatures)
        return "".join(f"; {text}" for text in [*texts, *([strays] if strays else [])])

    def _update(self, **changed: Any) -> None:
        self._stats = Stats(**{**vars(self._stats), **changed})

    def _quietly(self, part: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Call a function that only concerns the run. If it fails, because of a bug or a full disk, training
        goes on."""
        try:
            return part(*arguments, **options)
        except Exception as error:
            self._status = f"the run's part failed here: {type(error).__name__}: {error}"
            log.error("%s", self._status, exc_info=error)
            self._update(last_error=self._status)
            return None
