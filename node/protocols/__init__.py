"""Messages between nodes about runs, sent on streams: requests, signed manifests, and how to ask."""
