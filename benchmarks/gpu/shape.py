"""Llama3-8B, and the sequence that all of these benchmarks use."""

SEQ, HIDDEN, FFN, VOCAB = 8192, 4096, 14336, 128_256
HEADS, GROUPS, HEAD = 32, 8, 128
LAYER = (
    (HIDDEN, HEADS * HEAD + 2 * GROUPS * HEAD),
    (HEADS * HEAD, HIDDEN),
    (HIDDEN, 2 * FFN),
    (FFN, HIDDEN),
)
"""Inputs and outputs of a layer's four matrices."""


def parameters(layers: int) -> int:
    """Weights of the whole model."""
    return layers * (sum(i * o for i, o in LAYER) + 2 * HIDDEN) + HIDDEN + 2 * VOCAB * HIDDEN
