"""Services: a model that is split over peers answers. The driver of `partition.serve`."""
