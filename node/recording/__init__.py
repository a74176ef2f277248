"""Recording of a node: the inputs and outputs of its cores, in a file that `sim.replay` plays."""
