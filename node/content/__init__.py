"""What is named by its hash and how it gets here: graphs, data sets and blobs."""
