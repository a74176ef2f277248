"""Estimates when a run that waits for slots may begin, from busy providers' answers."""

from collections.abc import Sequence

from node.protocols.manifest import Manifest


def expected_wait(manifest: Manifest, free: int, waits: Sequence[int]) -> int | None:
    """Return when enough further slots may be free for a run; None if too few of the busy providers state a
    time."""
    missing = max(1, max(1, manifest.stages) * (manifest.replicas or manifest.replicas_min) - free)
    return sorted(waits)[missing - 1] if missing <= len(waits) else None
