"""Both fidelities."""
