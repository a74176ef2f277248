"""The optimizer wrapper: a `torch.optim.Optimizer` that averages with peers. In the node's own process, this
is the only package that imports torch. It does so only in a user's script, when `me.optimizer(...)` is
called."""
