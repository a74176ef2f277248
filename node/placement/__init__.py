"""Placement of stages: which peers to ask for a stage, and which requests this node accepts."""
