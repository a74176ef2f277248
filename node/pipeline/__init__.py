"""The shells of one step: replicas, committer, trainers, and the links between them."""
