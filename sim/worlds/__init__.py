"""The two kinds of simulated worlds: `cores` runs bare protocol cores on the engine, `stack` whole nodes
under trio."""
