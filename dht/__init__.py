"""Kademlia as a pure state machine: keys, routing table, lookups, signed expiring records."""
