"""Datagram sessions as WireGuard's: encrypted packets between peers that know each other's id.

Follows "WireGuard: Next Generation Kernel Network Tunnel" (Donenfeld, 2017) with Noise's IKpsk2. Beyond it:
the first packet carries a request already, and no address that has not proved itself is sent more than
three times what came from it.

    packets    what lies on the wire, and how much fits
    macs       who may be answered at all: the keyed check of each handshake packet, and cookies
    limits     how many handshakes, from whom
    window     what came before
    session    one pair of keys
    state      all that is kept of one peer
    table      all peers: `Sessions`, which a socket drives

Pure: time comes in as numbers, unpredictable bytes from a function, packets go out as values.
"""
