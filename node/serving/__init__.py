"""Services: models that are split over peers and answer requests. This package drives `partition.serve`."""
