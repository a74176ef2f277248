"""The life of a run at one of its members: pure parts that nodes and the simulator drive alike."""
