"""Replaying a recorded node at a desk: the same cores, given the same turns, in virtual time."""
