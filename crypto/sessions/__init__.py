"""Datagram sessions as WireGuard's: encrypted packets between peers that know each other's id.

Follows "WireGuard: Next Generation Kernel Network Tunnel" (Donenfeld, 2017) with Noise's IKpsk2. Beyond it:
the first packet carries a request already, and no address that has not proved itself is sent more than three
times what came from it.

    packets    the wire format, and how much fits
    macs       checks before any answer: the keyed check of each handshake packet, and cookies
    handshakes initiation, response, cookie
    limits     how many handshakes are computed
    replay_window  the packets that came before
    memories   the stamps that must not be replayed
    session    one pair of keys
    state      the state of one peer
    table      all peers, bounded
    core       `Sessions`, which a socket drives

Pure: time comes in as numbers, unpredictable bytes from a function, packets go out as values.
"""
