"""Makes the event that a node emits once it is on the network."""

from crypto.contact import Address
from crypto.identity import PeerId
from node.config import Config
from node.events import NodeStarted
from node.seams import Network
from node.transport.network import RealNetwork

LOOPBACK_ONLY = "none: this node listens only on this machine; --listen 0.0.0.0:9747 lets others in"
NO_NETWORK = (
    "none: this machine is on no network (it has only loopback addresses and those of its own containers)"
)
LINK_LOCAL_ONLY = (
    "none to type: this machine has only link-local IPv6 addresses; nodes on its link find each other"
)


def node_started(at: float, config: Config, peer: PeerId, network: Network, *, is_new: bool) -> NodeStarted:
    """Return the event; `is_new` means that the identity was made just now."""
    wanted = config.listen.addresses[0].port
    real = network if isinstance(network, RealNetwork) else None
    join = real.address_for_others if real is not None else next(iter(network.addresses), None)
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
        moved=real.moved if real is not None else (),
        is_open=real is not None and config.listen.is_open,
        join_address=None if join is None else join.short,
        join_hint="" if join is not None else _hint(config, network.addresses),
    )


def _hint(config: Config, told: tuple[Address, ...]) -> str:
    """Return the reason why no address works on another machine."""
    if not told:
        return LINK_LOCAL_ONLY
    return NO_NETWORK if config.listen.is_open else LOOPBACK_ONLY
