"""Models as stages: specification, cost, solver, plan, schedule, frames, steps and execution."""
