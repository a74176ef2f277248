"""The formats in which model families write tool calls and reasoning, and the reading of these formats.
Pure."""
