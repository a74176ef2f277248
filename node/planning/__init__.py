"""Plans that people ask for: peers from a file or a swarm, and the plan with its reasons."""
