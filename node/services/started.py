"""What a node says of itself once it has a place in the network."""

from crypto.identity import PeerId
from node.config import Config
from node.events import NodeStarted
from node.seams import Network
from node.transport.network import RealNetwork


def node_started(at: float, config: Config, peer: PeerId, network: Network, *, is_new: bool) -> NodeStarted:
    """Return the event; `is_new` is whether the identity was made just now."""
    wanted = config.listen.addresses[0].port
    return NodeStarted(
        at=at,
        peer=peer,
        name=config.name,
        swarm=config.swarm.name,
        is_private=config.swarm.key_file is not None,
        addresses=tuple(address.short for address in network.addresses),
        identity_is_new=is_new,
        data_dir=str(config.data_dir),
        port_wanted=wanted,
        port=network.addresses[0].port if network.addresses else wanted,
        moved=network.moved if isinstance(network, RealNetwork) else (),
        is_open=isinstance(network, RealNetwork) and config.listen.is_open,
    )
