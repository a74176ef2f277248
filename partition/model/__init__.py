"""A model as data: its graph, the checks of it, the positions of cuts, and the stages.

No torch. `graph` is the format, `check` validates a stranger's graph, `layers` and `cut` divide it.
`partition.capture` makes a graph of an `nn.Module`; `partition.execute` runs a stage.
"""
