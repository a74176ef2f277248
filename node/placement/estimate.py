"""When a run that waits for slots may begin, by what busy providers said."""

from collections.abc import Sequence

from node.protocols.manifest import Manifest


def expected_wait(manifest: Manifest, free: int, waits: Sequence[int]) -> int | None:
    """Return when as many slots may be free as a run needs beside those that are; None where too few of the
    busy providers say."""
    missing = max(1, max(1, manifest.stages) * (manifest.replicas or manifest.replicas_min) - free)
    return sorted(waits)[missing - 1] if missing <= len(waits) else None
