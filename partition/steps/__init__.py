"""One training step as messages: frames, and the state machines of committer, feeder and replica."""
