"""Averaging tensors with peers: the shells around the cores of `gossip.averaging`."""
