"""A solver's problem: layers, peers, links and constraints, in integers. Pure data, no torch.

Peers are sorted by name when a `Problem` is made, so a plan depends neither on the order in which peers are
given nor on a hash seed. Times are nanoseconds for one micro-batch; sizes are bytes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from partition.plan.cost import STAGE_BASELINE_BYTES, LayerCost

Objective = Literal["throughput", "latency", "energy"]
Pipeline = Literal["1f1b", "gpipe"]

LINK_BYTES_PER_SECOND = 12_500_000
"""Assumed rate of an unmeasured link: 100 Mbit/s, a home uplink at its best."""
LINK_NANOSECONDS = 1_000_000
"""Assumed one-way delay of an unmeasured link: a local network with a switch or two."""
FRAME_BYTES_MAX = 2**63 - 1
"""The value for callers that do not limit frames."""
IDLE_MILLIWATTS, BUSY_MILLIWATTS = 10_000, 45_000
"""Assumed power of a machine without a readable meter: a laptop's processor. It was not measured."""


class Infeasible(Exception):
    """No split fits. `need`, `have` and `do` are texts to display: what is needed, what there is, and what
    would help."""

    def __init__(self, what: str, *, need: str = "", have: str = "", do: str = "") -> None:
        super().__init__(what)
        self.need = need
        self.have = have
        self.do = do


@dataclass(frozen=True)
class Link:
    """One direction between two peers."""

    bytes_per_second: int = LINK_BYTES_PER_SECOND
    nanoseconds: int = LINK_NANOSECONDS


@dataclass(frozen=True)
class PeerCost:
    """One peer's cost for this model: `forward` and `backward` nanoseconds of each layer.

    `baseline_bytes` is the size of its stage process before it holds a model. `step_nanoseconds` is its
    optimizer's time for one parameter tensor, and for a MiB of parameters. `node_nanoseconds` is the time of
    its node in addition to the stage's process, for a micro-batch and for a MiB of its frames;
    `node_step_nanoseconds` is the node's additional time for a step.
    """

    name: str
    memory_bytes: int
    forward: tuple[int, ...]
    backward: tuple[int, ...]
    baseline_bytes: int = STAGE_BASELINE_BYTES
    step_nanoseconds: tuple[int, int] = (0, 0)
    node_nanoseconds: tuple[int, int] = (0, 0)
    node_step_nanoseconds: int = 0
    busy_milliwatts: int = BUSY_MILLIWATTS
    idle_milliwatts: int = IDLE_MILLIWATTS


@dataclass(frozen=True)
class Constraints:
    """Constraints of a plan. If `stages` or `replicas` is 0, the solver chooses the number.

    `together` are half-open ranges of layers that stay in one stage. A frame between two stages has at most
    `frame_bytes_max` bytes.
    """

    stages: int = 0
    replicas: int = 0
    replicas_min: int = 1
    together: tuple[tuple[int, int], ...] = ()
    frame_bytes_max: int = FRAME_BYTES_MAX


@dataclass(frozen=True)
class Problem:
    """The assignment of layers to peers that is to be solved.

    `input_bytes` is the size of the first stage's input for a micro-batch. `moments` is the number of the
    optimizer's vectors in addition to parameters, gradient sums and totals. `trains` is false for serving,
    where only the forward pass counts. `wire_permille` is the share of a frame's bytes that is left after the
    codec. `links` are keyed by the peers' names, each direction separately. `hides_links`: enough
    micro-batches are in flight to compute some while others travel.
    """

    layers: tuple[LayerCost, ...]
    peers: tuple[PeerCost, ...]
    microbatches: int = 1
    links: Mapping[tuple[str, str], Link] = field(default_factory=dict)
    default_link: Link = Link()
    objective: Objective = "throughput"
    pipeline: Pipeline = "1f1b"
    recompute: bool = False
    moments: int = 2
    trains: bool = True
    input_bytes: int = 0
    wire_permille: int = 1000
    hides_links: bool = False
    constraints: Constraints = Constraints()

    def __post_init__(self) -> None:
        peers = tuple(sorted(self.peers, key=lambda peer: peer.name))
        if len({peer.name for peer in peers}) < len(peers):
            raise ValueError("two peers have the same name")
        if any(len(peer.forward) != len(self.layers) for peer in peers):
            raise ValueError("a peer's times do not match the number of layers")
        object.__setattr__(self, "peers", peers)

    def link(self, sender: int, receiver: int) -> Link:
        """Return the link from one peer to another, given by their indices."""
        names = self.peers[sender].name, self.peers[receiver].name
        return self.links.get(names, self.default_link)

    def may_cut(self, position: int) -> bool:
        """Return whether a stage may end before layer `position`."""
        rules = self.constraints
        if any(first < position < last for first, last in rules.together):
            return False
        return self.layers[position - 1].output_bytes <= rules.frame_bytes_max

    def in_flight(self, stages_left: int) -> int:
        """Return the number of micro-batches between their two passes in a stage, if `stages_left` stages are
        left to the end, including this one."""
        if not self.trains:
            return 1
        return self.microbatches if self.pipeline == "gpipe" else min(self.microbatches, stages_left)


@dataclass(frozen=True)
class Split:
    """The layers and the peers of each stage. `ranges[s]` are the layers of stage s (half open), `groups[s]`
    are indices of the problem's (sorted) peers.

    `bottleneck_nanoseconds` is the time of each further micro-batch. `score` is the objective: nanoseconds of
    a step, nanoseconds of one pass, or nanojoules of a micro-batch. `is_exact`: no split has a better
    bottleneck (for throughput) or score (for the other objectives).
    """

    ranges: tuple[tuple[int, int], ...]
    groups: tuple[tuple[int, ...], ...]
    bottleneck_nanoseconds: int
    score: int
    is_exact: bool = False


def uniform_peers(
    layers: Sequence[LayerCost], offers: Sequence[tuple[str, int, int]], *, backward_ratio: int = 2
) -> tuple[PeerCost, ...]:
    """Return peers of which only the name, the FLOP/s and the memory are known. Backward takes
    `backward_ratio` times as long as forward."""
    peers = []
    for name, flops_per_second, memory_bytes in offers:
        forward = tuple(layer.forward_flops * 1_000_000_000 // max(1, flops_per_second) for layer in layers)
        backward = tuple(backward_ratio * time for time in forward)
        peers.append(PeerCost(name, memory_bytes, forward, backward))
    return tuple(peers)
