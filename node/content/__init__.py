"""Content named by its hash, and how it is fetched: graphs, data sets and blobs."""
