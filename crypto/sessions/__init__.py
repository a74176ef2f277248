"""Datagram sessions like WireGuard's: encrypted packets between peers that know each other's id.

Follows "WireGuard: Next Generation Kernel Network Tunnel" (Donenfeld, 2017) with Noise's IKpsk2. In addition,
the first packet already carries a request, and an address that has not proved itself is sent at most three
times as many bytes as came from it.

    packets    the wire format, and how much fits
    macs       checks before any answer: the keyed check of each handshake packet, and cookies
    handshakes initiation, response, cookie
    limits     how many handshakes are computed
    replay_window  the packets already received
    memories   the stamps that must not be replayed
    session    one pair of keys
    state      the state of one peer
    table      all peers, bounded
    core       `Sessions`, which a socket drives

Pure: time is passed in as numbers and unpredictable bytes as a function; packets are return values.
"""
