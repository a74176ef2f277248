"""The limits of this node as the page shows them, taken from its configuration, without secrets."""

from typing import Any

from node.config import Config
from node.planning.planner import rate_text


def document(config: Config) -> dict[str, Any]:
    """Return the limits of a configuration. For a key file, only whether there is one."""
    resources = config.resources
    return {
        "device": resources.device,
        "memory": str(resources.memory),
        "scratch": str(resources.scratch),
        "disk": str(resources.disk),
        "slots": config.offer.slots,
        "upload": _rate(config.offer.upload_bytes_per_second),
        "download": _rate(config.offer.download_bytes_per_second),
        "cores": resources.cores or "all",
        "location": resources.location,
        "accept_runs": "never" if config.observer else resources.accept_runs,
        "allow_unfenced": resources.allow_unfenced,
        "observer": config.observer,
        "preset": config.swarm.preset,
        "lan": config.join.lan,
        "remember": config.join.remember,
    }


def _rate(bytes_per_second: int) -> str:
    return rate_text(bytes_per_second) if bytes_per_second else "any"
