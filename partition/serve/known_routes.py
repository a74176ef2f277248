"""The services that a door (the node that asks) uses: the replicas of each stage, and the peers that are not
asked for a while."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import inf

from crypto.identity import PeerId
from partition.serve.generation import OpenGeneration
from partition.serve.routes import StageReplica
from partition.serve.timeouts import RETRY_SECONDS

OTHER_CLASS = "stage {stage} is answered only by machines of another bit class, so the text might change"


@dataclass(frozen=True)
class Missing:
    """There is no route; `reason` is for display. `stage` is the stage without a usable replica, -1 if a
    stage has replicas but only of another bit class."""

    reason: str
    stage: int = -1


class KnownRoutes:
    """The known replicas of the services of one door."""

    def __init__(self) -> None:
        self._routes: dict[bytes, dict[int, dict[PeerId, StageReplica]]] = {}
        self._loading: dict[bytes, frozenset[int]] = {}
        self._gone_until: dict[PeerId, float] = {}
        self._asked_at: dict[bytes, float] = {}
        """The time when routes of each service were last asked for."""
        self._formers: set[PeerId] = set()
        """Peers that speak the previous version of the protocol."""

    def learn(
        self, service: bytes, replicas: Mapping[int, Sequence[StageReplica]], loading: Collection[int]
    ) -> None:
        """Set the replicas of a service's stages, and the stages that a member is loading."""
        self._loading[service] = frozenset(loading)
        self._routes[service] = {
            stage: {each.peer: each for each in rows} for stage, rows in replicas.items()
        }

    def replicas(self, service: bytes) -> list[list[StageReplica]]:
        """Return the known replicas of a service's stages."""
        return [list(rows.values()) for rows in self._routes.get(service, {}).values()]

    def is_loading(self, service: bytes, stage: int) -> bool:
        """Return whether a member is loading a stage."""
        return stage in self._loading.get(service, ())

    def bits(self, service: bytes, route: Sequence[PeerId]) -> tuple[bytes, ...]:
        """Return the bit classes of a route's stages."""
        known = self._routes[service]
        return tuple(known[stage][peer].bits for stage, peer in enumerate(route))

    def note_former(self, peer: PeerId) -> None:
        """Note that a peer speaks the previous version of the protocol. This holds until the peer is lost."""
        self._formers.add(peer)

    def is_current(self, route: Collection[PeerId]) -> bool:
        """Return whether all peers of a route speak the newest version, which has bases and hidden states."""
        return self._formers.isdisjoint(route)

    def note_lost(self, now: float, peer: PeerId) -> None:
        """Forget a peer until it is reported again, because it may be dead for good."""
        self._formers.discard(peer)
        self._gone_until[peer] = now + RETRY_SECONDS
        for rows in self._routes.values():
            for replicas in rows.values():
                replicas.pop(peer, None)

    def expire(self, now: float) -> None:
        """Forget the waits of lost peers that may be asked again."""
        self._gone_until = {peer: until for peer, until in self._gone_until.items() if until > now}

    def keep_only(self, services: Collection[bytes]) -> None:
        """Forget all services except these, which are in use."""
        self._routes = {name: rows for name, rows in self._routes.items() if name in services}
        self._loading = {name: rows for name, rows in self._loading.items() if name in services}
        if not services:
            self._asked_at = {}

    def may_look(self, now: float, service: bytes) -> bool:
        """Return whether it is time to look for routes of a service again. If so, note that this is done
        now."""
        if now - self._asked_at.get(service, -inf) < RETRY_SECONDS:
            return False
        self._asked_at[service] = now
        return True

    def candidates(
        self, now: float, generation: OpenGeneration
    ) -> tuple[list[list[StageReplica]], bool] | Missing:
        """Return, for each stage, the replicas that may be asked, and whether all stages can continue with
        the bit classes of the tokens so far. If a stage has replicas of its class, only those are
        returned."""
        shape, is_exact = generation.shape, True
        known = self._routes.get(shape.service, {})
        stages: list[list[StageReplica]] = []
        for stage in range(shape.stages):
            rows = known.get(stage, {}).values()
            found = [each for each in rows if self._may_ask(now, generation, each.peer)]
            if not found:
                return Missing(f"nobody answers for stage {stage + 1}", stage)
            if generation.bits:
                alike = [each for each in found if each.bits and each.bits == generation.bits[stage]]
                if not alike and generation.wish.is_exact:
                    return Missing(OTHER_CLASS.format(stage=stage + 1))
                is_exact = is_exact and bool(alike)
                found = alike or found
            stages.append(found)
        return stages, is_exact

    def _may_ask(self, now: float, generation: OpenGeneration, peer: PeerId) -> bool:
        if generation.wish.is_hidden and peer in self._formers:
            return False
        return max(self._gone_until.get(peer, now), generation.avoided.get(peer, now)) <= now
