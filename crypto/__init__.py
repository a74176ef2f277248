"""Identity, peer ids, contacts, signed facts and Noise sessions: bytes in, bytes out.

Pure: no sockets, clocks, threads, logs or globals. Imports nothing of the other packages.
"""
