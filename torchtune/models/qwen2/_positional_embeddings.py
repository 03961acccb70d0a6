"""Compatibility: rotary positions of the Qwen families, by their public name."""

from torchtune.modules.position_embeddings import RotaryPositionalEmbeddings


class Qwen2RotaryPositionalEmbeddings(RotaryPositionalEmbeddings):
    """Rotary positions with channels paired half a head apart.

    Args:
        dim: channels of a head.
        max_seq_len: kept for information.
        base: of the geometric series of wavelengths.
    """

    def __init__(self, dim: int, max_seq_len: int = 4096, base: float = 1_000_000.0) -> None:
        super().__init__(dim, max_seq_len, base, layout="half")
