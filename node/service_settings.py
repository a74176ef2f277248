"""Settings of a node's services that its owner cannot set by file or flag.

The node receives one value and passes each service its part. Owners set `node.config.Config` instead.
"""

from dataclasses import dataclass, field

from node.runs.settings import RunServiceSettings
from node.services.autonat_core import ReachSettings
from node.services.relays.settings import RelaySettings
from node.transport.settings import TransportSettings
from partition.run.settings import RunSettings


@dataclass(frozen=True)
class ServiceSettings:
    """One struct of settings for each service."""

    runs: RunSettings = field(default_factory=RunSettings)
    run_service: RunServiceSettings = field(default_factory=RunServiceSettings)
    transport: TransportSettings = field(default_factory=TransportSettings)
    reach: ReachSettings = field(default_factory=ReachSettings)
    relays: RelaySettings = field(default_factory=RelaySettings)
