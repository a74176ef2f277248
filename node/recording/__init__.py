"""Recording a node: what its cores were given and what they answered, in a file that `sim.replay` plays."""
