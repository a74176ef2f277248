"""The life of a run as one of its members sees it: pure parts, which nodes and the simulator drive alike."""
