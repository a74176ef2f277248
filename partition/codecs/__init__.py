"""Codecs for the tensors of a payload: without loss (`lossless`), in half the bytes (`floats`), or in small
whole numbers (`block_quantization`); with rounding errors kept for the next time (`error_feedback`), and
chosen for a link (`choice`). `partition.codecs.codec` defines payloads and checks their claims."""
