"""Records the inputs and outputs of a node's cores in a file, which `sim.replay` plays."""
