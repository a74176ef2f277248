"""Providers that recently declined a stage. For a while they are the last to be asked."""

from crypto.identity import PeerId

DECLINED_SECONDS = 300.0
"""How long a provider that declined is asked last: longer than a placement, shorter than most runs."""
DECLINERS_MAX = 1_024
"""Maximum number of decliners remembered, the newest."""


class Decliners:
    """The providers that declined a request of this node. Times are monotonic seconds."""

    def __init__(self) -> None:
        self._until: dict[PeerId, float] = {}

    def note(self, peer: PeerId, now: float, seconds: float = DECLINED_SECONDS) -> None:
        """Note that a provider declined. It is asked last for `seconds`."""
        self._until.pop(peer, None)
        self._until[peer] = now + seconds
        while len(self._until) > DECLINERS_MAX:
            del self._until[next(iter(self._until))]

    def now(self, now: float) -> set[PeerId]:
        """Return the providers that are still asked last."""
        return {peer for peer, until in self._until.items() if now < until}
