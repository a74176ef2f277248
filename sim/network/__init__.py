"""The simulated network: instants, the location and connection of each peer, and the fate of each message."""
