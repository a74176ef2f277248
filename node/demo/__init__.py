"""`peerloom demo`: five real nodes, a training run, a killed node, a result. Each part of it has its own
file."""
