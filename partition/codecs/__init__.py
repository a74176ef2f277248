"""Codecs for the tensors of a payload: lossless (`lossless`), in half the bytes (`floats`), or as small
integers (`block_quantization`). Rounding errors can be kept for the next tensor (`error_feedback`), and
`choice` selects a codec for a link. `partition.codecs.codec` defines payloads and checks their claims."""
