"""Serving: a model that is split over peers answers like one model. Pure cores; the driver is
`node.serving`."""
