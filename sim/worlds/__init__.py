"""The two fidelities: `cores`, protocol machines on the heap engine; `stack`, whole nodes under trio."""
