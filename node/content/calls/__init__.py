"""The formats in which model families write tool calls and reasoning, and how these are read. Pure."""
