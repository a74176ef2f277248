"""The invariant of answers: each token equals that of an undisturbed answer, whichever peers die
meanwhile."""

from sim.checkers.checker import Checker
from sim.events import AnswerEnded
from sim.observers import Observation, World


class AnswersAreRight(Checker):
    """Check that each token of each answer follows from the tokens before it."""

    name = "answers"

    def __init__(self) -> None:
        super().__init__()
        self.handlers = {AnswerEnded: self._see}

    def _see(self, observed: Observation, world: World) -> None:
        if not observed.event.is_right:
            assert observed.peer is not None
            raise self.broken(
                f"{world.name(observed.peer)} received a wrong token in the answer {observed.event.tokens}"
            )
