"""A model as data: its graph, whether it makes sense, where it may be cut, and the stages it is cut into.

No torch. `graph` is the format, `check` what a stranger's graph is held to, `layers` and `cut` divide it.
What makes a graph of an `nn.Module` is `partition.capture`; what runs a stage is `partition.execute`.
"""
