"""The optimizer wrapper: a `torch.optim.Optimizer` that averages with peers. It alone of all the node's side
imports torch, in a user's own process, and only when `me.optimizer(...)` is called."""
