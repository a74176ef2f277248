"""What an experiment measured: watchers that turn the stream of events into rows and a few figures."""
