"""Messages among nodes about runs, on streams: requests, signed manifests, and how to ask."""
