"""One training step as messages: frames, and the trainer's and the replica's state machines."""
