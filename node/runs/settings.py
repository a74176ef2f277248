"""The settings of a node's service of runs: what each does, its bounds against its siblings, a good value.

Not here: how long members wait for each other (`partition.run.settings`).
"""

from dataclasses import dataclass, field

from node.content.graphs import GraphSettings
from node.pipeline.frame_store import FRAMES_BYTES_MAX
from node.runs.readiness import SpareSettings


@dataclass(frozen=True)
class RunServiceSettings:
    """The limits of one node's part in runs. Raises ValueError where they contradict each other."""

    graphs: GraphSettings = field(default_factory=GraphSettings)
    """The graphs that are fetched and kept."""

    spares: SpareSettings = field(default_factory=SpareSettings)
    """The process that waits for a stage."""

    frames_bytes_max: int = FRAMES_BYTES_MAX
    """A stage's frames in memory; those beyond go to the disk. 0 has all there. 512 MiB."""

    outside_max: int = 64
    """Others' runs whose end this node waits for, limited because strangers decide how many leave it out. 0
    waits for none. 64."""

    issued_bytes_min: int = 1 << 20
    """Bytes that are worth a receipt: less is not worth two signatures and a call, and is added to later
    work. At least 1. 1 MiB."""

    def __post_init__(self) -> None:
        bounds = (
            (self.frames_bytes_max >= 0, "frames at least 0"),
            (self.outside_max >= 0, "outside at least 0"),
            (self.issued_bytes_min >= 1, "a receipt for a byte at least"),
        )
        for holds, rule in bounds:
            if not holds:
                raise ValueError(f"settings of runs: {rule}")
