"""A participant of a named averaging run that lies about itself: it uses the real classes, but makes its own
claims."""

from typing import Any

import torch

from crypto.encoding import decode, encode
from crypto.identity import PeerId
from node.averaging.signature import signatures_of
from node.averaging.transfer import PROTOCOL, TABLE_BYTES_MAX, Answer, StateRequest
from node.library.sync import SyncNode
from node.optimizer.differences import classes_of, kind_of
from node.optimizer.layout import Layout
from node.optimizer.open import choose_rule
from node.optimizer.session import TrainingSession
from node.optimizer.settings import Settings, names_of
from node.optimizer.state import copy_state
from node.protocols.calls import conversation


class LyingParticipant:
    """Takes part in a run, averages nothing, and hands out a state in which every value is `value`."""

    def __init__(
        self, me: SyncNode, optimizer: torch.optim.Optimizer, run_id: str, *, value: float, **options: Any
    ) -> None:
        """`optimizer` and its model must be of the kind that the run trains; the model is filled with
        `value`."""
        settings = Settings(run_id, **options)
        self._layout = Layout(names_of([optimizer], None))
        for slot in self._layout.slots:
            slot.tensor.detach().fill_(value)
        self._optimizer = optimizer
        portal = self._portal = me._portal
        rule = choose_rule(settings, is_private=False)
        signature, _ = signatures_of(
            kind_of(settings, classes_of([optimizer])), list(self._layout.rows), rule
        )
        averaging = portal.subject.averaging
        self.run = portal.call_sync(averaging.open, run_id, signature, None, rule)
        self._session = TrainingSession(portal, self.run)

    def claim(self, step: int, *, samples: int = 0, rounds: int = 0, lineage: bytes = bytes(32)) -> None:
        """Announce these counts, and offer the filled model as the state of that step."""
        self._session.tell(step=step, samples=samples, rounds=rounds, lineage=lineage, has_state=True)
        self._session.offer(step, rounds, lineage, copy_state(self._layout, [self._optimizer], {}))

    def ask_for_state(self, peer: PeerId, step: int) -> Answer:
        """Ask a member for its state at this step; return the answer."""

        async def ask() -> Answer:
            network = self._portal.subject.network
            talk = conversation(network, peer, PROTOCOL, seconds=60, message_bytes_max=TABLE_BYTES_MAX)
            async with talk as stream:
                await stream.send(encode(StateRequest(self.run.key, self.run.roster.signature, step)))
                answer: Answer = decode(await stream.receive(), Answer, bytes_max=TABLE_BYTES_MAX)
                return answer

        return self._portal.run(ask)

    def close(self) -> None:
        """Leave the run."""
        self._session.close()
