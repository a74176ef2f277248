"""The two fidelities: `cores`, bare protocol cores on the engine; `stack`, whole nodes under trio."""
