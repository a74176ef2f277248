"""What this node was told to give, as the page shows it: from its configuration, without secrets."""

from typing import Any

from node.config import Config


def document(config: Config) -> dict[str, Any]:
    """The limits of a configuration; a key file is only said to be there."""
    resources = config.resources
    return {
        "device": resources.device,
        "memory": str(resources.memory),
        "scratch": str(resources.scratch),
        "disk": str(resources.disk),
        "slots": config.offer.slots,
        "upload_bytes_per_second": config.offer.upload_bytes_per_second,
        "download_bytes_per_second": config.offer.download_bytes_per_second,
        "cores": resources.cores,
        "location": resources.location,
        "accept_runs": "never" if config.observer else resources.accept_runs,
        "allow_unfenced": resources.allow_unfenced,
        "observer": config.observer,
        "preset": config.swarm.preset,
        "lan": config.join.lan,
        "remember": config.join.remember,
    }
