"""The life of a run at one of its members: pure parts, which nodes and the simulator drive alike."""
