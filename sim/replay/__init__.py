"""Replay of a recorded node: the same cores, given the same turns, in virtual time."""
