"""The measures of an experiment: watchers that turn the stream of events into rows and a few summary
figures."""
