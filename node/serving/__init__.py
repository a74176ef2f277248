"""Services: models that are split over peers and answer. The driver of `partition.serve`."""
