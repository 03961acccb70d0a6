"""Compatibility: public name of the rotary embeddings of the Phi families."""

from torchtune.modules.position_embeddings import RotaryPositionalEmbeddings


class Phi3RotaryPositionalEmbeddings(RotaryPositionalEmbeddings):
    """Rotary embeddings that rotate pairs of channels half a head apart.

    Args:
        dim: h, channels of a head.
        max_seq_len: informational.
        base: base (theta) of the frequencies.
    """

    def __init__(self, dim: int, max_seq_len: int = 4096, base: float = 10_000) -> None:
        super().__init__(dim, max_seq_len, base, layout="half")
