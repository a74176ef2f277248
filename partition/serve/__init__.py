"""Serving: a model split over peers answers as one. Pure cores; the driver is `node.serving`."""
