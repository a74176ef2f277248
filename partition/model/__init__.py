"""A model as data: its graph, the checks of it, the positions of cuts, and the stages.

No torch. `graph` is the format, `check` validates a graph from an unknown peer, `layers` and `cut` divide it.
`partition.capture` makes a graph from an `nn.Module`; `partition.execute` runs a stage.
"""
