"""The rules of runs in local mode: sans-IO cores that nodes and the simulator drive."""
