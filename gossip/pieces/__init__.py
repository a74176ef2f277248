"""The exchange of a data set, peer to peer, in pieces that each have a hash."""
