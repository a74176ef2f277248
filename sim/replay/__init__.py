"""Replay of a recorded node: the same cores get the same inputs again, in virtual time."""
