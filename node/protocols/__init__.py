"""What nodes say to each other about runs, on streams: messages, signed manifests, and how to ask."""
