"""The time at which a door (the node that asks a service) last heard each provider. A silent provider is
given up. A part of `partition.serve.door`."""

from collections.abc import Iterable, Iterator

from crypto.identity import PeerId
from partition.serve.generation import OpenGeneration, silent_peers
from partition.serve.timeouts import ALIVE_SECONDS, STALL_SECONDS


class Hearing:
    """The providers that serve a generation now, and when each was last heard."""

    def __init__(self) -> None:
        self._heard_at: dict[PeerId, float] = {}
        self._seen_at = float("-inf")

    def __contains__(self, peer: object) -> bool:
        return peer in self._heard_at

    def __iter__(self) -> Iterator[PeerId]:
        return iter(sorted(self._heard_at))

    def note_time(self, now: float) -> None:
        """Note that this node is running. Other peers' silence while this node was suspended does not
        count."""
        if self._heard_at and now - self._seen_at > STALL_SECONDS:
            self._heard_at = {peer: max(at, now - ALIVE_SECONDS) for peer, at in self._heard_at.items()}
        self._seen_at = now

    def begin(self, now: float, peers: Iterable[PeerId]) -> None:
        """Begin to track these peers, unless they are tracked already."""
        for peer in peers:
            self._heard_at.setdefault(peer, now)

    def heard(self, now: float, peer: PeerId) -> None:
        """Note that a peer sent something. A peer that serves no generation is ignored."""
        if peer in self._heard_at:
            self._heard_at[peer] = now

    def end(self, peer: PeerId) -> None:
        """Forget a peer that no longer serves any generation."""
        self._heard_at.pop(peer, None)

    def silent(self, now: float, generations: Iterable[OpenGeneration]) -> list[tuple[PeerId, str]]:
        """Return the providers to give up because of their silence, with reasons."""
        return silent_peers(now, generations, self._heard_at)
