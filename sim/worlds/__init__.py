"""The two fidelities: `cores`, protocol machines on the engine; `stack`, whole nodes under trio."""
