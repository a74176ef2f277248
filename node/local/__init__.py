"""Runs in local mode: members train the whole model on shards of their own, and average in groups."""
