"""Copies of a run's state on several members: made, kept, exported and restored."""
