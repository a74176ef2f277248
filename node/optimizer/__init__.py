"""The optimizer wrapper: a `torch.optim.Optimizer` that averages with peers. It is the only package of the
node's own process that imports torch, in a user's script, and only when `me.optimizer(...)` is called."""
