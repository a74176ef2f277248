"""Runs in local mode: each member trains the whole model on its own shard of the data, and members average
their parameters in groups."""
