"""The settings of a node's runs service: what each does, its bounds relative to others, and a good value.

Not here: how long members wait for each other (`partition.run.settings`).
"""

from dataclasses import dataclass, field

from node.content.graphs import GraphSettings
from node.pipeline.frame_store import FRAMES_BYTES_MAX
from node.runs.readiness import SpareSettings


@dataclass(frozen=True)
class RunServiceSettings:
    """The limits of one node's part in runs. Raises ValueError if they contradict each other."""

    graphs: GraphSettings = field(default_factory=GraphSettings)
    """Limits on the graphs that are fetched and kept."""

    spares: SpareSettings = field(default_factory=SpareSettings)
    """When a spare process waits for a stage."""

    frames_bytes_max: int = FRAMES_BYTES_MAX
    """Maximum bytes of a stage's frames in memory; further frames go to the disk. 0: all go to the disk.
    Default: 512 MiB."""

    outside_max: int = 64
    """Maximum number of others' runs whose end this node waits for after leaving them. It is limited because
    unknown peers can cause such runs. 0: it waits for none. Default: 64."""

    issued_bytes_min: int = 1 << 20
    """Minimum number of bytes that are worth a receipt; fewer do not justify two signatures and a call, and
    are added to later work. At least 1. Default: 1 MiB."""

    def __post_init__(self) -> None:
        bounds = (
            (self.frames_bytes_max >= 0, "frames at least 0"),
            (self.outside_max >= 0, "outside at least 0"),
            (self.issued_bytes_min >= 1, "a receipt for a byte at least"),
        )
        for holds, rule in bounds:
            if not holds:
                raise ValueError(f"settings of runs: {rule}")
