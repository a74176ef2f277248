"""A stage in a process of its own: its host, its limits and its fences."""
