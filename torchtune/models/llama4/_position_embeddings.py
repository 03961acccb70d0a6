"""Rotary embeddings of Llama 4."""

from torchtune.modules.position_embeddings import ScaledRotaryPositionalEmbeddings


class Llama4ScaledRoPE(ScaledRotaryPositionalEmbeddings):
    """Rotary embeddings with Llama 3.1's scaling and the numbers of Llama 4 Scout.

    Args:
        dim: number of rotated channels of a head.
        max_seq_len: informational.
        base: base (theta) of the frequencies.
        scale_factor: factor of long wavelengths; ``None``: no scaling.
        low_freq_factor: defines the long wavelengths.
        high_freq_factor: defines the short wavelengths.
        old_context_len: pre-training context length.
    """

    def __init__(
        self,
        dim: int,
        max_seq_len: int = 10_485_760,
        base: int = 500_000,
        scale_factor: float | None = 16.0,
        low_freq_factor: float = 1.0,
        high_freq_factor: float = 1.0,
        old_context_len: int = 8192,
    ) -> None:
        factor = 1.0 if scale_factor is None else scale_factor
        super().__init__(dim, max_seq_len, base, factor, low_freq_factor, high_freq_factor, old_context_len)
