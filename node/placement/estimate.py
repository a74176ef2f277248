"""Estimates when a run that waits for slots may begin, from the answers of busy providers."""

from collections.abc import Sequence

from node.protocols.manifest import Manifest


def expected_wait(manifest: Manifest, free: int, waits: Sequence[int]) -> int | None:
    """Return after how many seconds enough further slots may be free for a run; None if too few of the busy
    providers gave an estimate."""
    missing = max(1, max(1, manifest.stages) * (manifest.replicas or manifest.replicas_min) - free)
    return sorted(waits)[missing - 1] if missing <= len(waits) else None
