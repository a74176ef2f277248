"""The way from measured machines and a model's costs to a plan: cost, solver, plan, schedule."""
