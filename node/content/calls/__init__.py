"""What a model says beside its text, in the formats of model families: calls of tools, and reasoning.
Pure."""
