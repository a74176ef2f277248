"""How the tensors of a payload are made smaller: without loss (`lossless`), in half the bytes (`floats`), or
in small whole numbers (`blocks`); with what was rounded off kept for the next time (`feedback`), and as the
link wants it (`choice`). What a payload is and who may claim what of it is `partition.codecs.codec`.
"""
