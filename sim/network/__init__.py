"""The simulated network: instants, who is where and how well connected, and the fate of each message."""
