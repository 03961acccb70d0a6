"""What layers need of a mixer, whether it is attention or not."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from torchtune.modules.mixers._state_cache import StateCache


class RecurrentMixer(nn.Module, ABC):
    """A layer's mixer of positions with a state, in the place of attention (``TransformerSelfAttentionLayer.attn``).

    It is called as attention is. The state is zero before every position 0 of ``input_pos``: documents of a packed
    batch begin there, and so does the text of a prompt that is padded on the left. A subclass has ``_mix`` and
    ``_new_cache``.

    Example:
        >>> issubclass(torchtune.modules.mixers.ShortConv, torchtune.modules.mixers.RecurrentMixer)
        True
    """

    pos_embeddings = None
    window = None
    softcap = None
    sinks = None

    def __init__(self) -> None:
        super().__init__()
        self.kv_cache: StateCache | None = None
        self.cache_enabled = False

    @property
    def state_elements(self) -> int:
        """Elements of the state of one sequence; 0 for a mixer that only convolves."""
        return 0

    @abstractmethod
    def _mix(self, x: Tensor, reach: Tensor, cache: StateCache | None) -> Tensor:
        """``[b, s, d]`` to ``[b, s, d]``; ``reach`` ``[b, s]`` counts earlier positions of the same document."""

    @abstractmethod
    def _new_cache(self, batch_size: int, dtype: torch.dtype) -> StateCache:
        """An empty cache on the device that tensors are made on."""

    def setup_cache(self, batch_size: int, dtype: torch.dtype, max_seq_len: int) -> None:
        """Make room for the state of ``batch_size`` rows; its size does not depend on ``max_seq_len``."""
        if self.kv_cache is None:
            self.kv_cache = self._new_cache(batch_size, dtype)
            self.cache_enabled = True

    def reset_cache(self) -> None:
        """Empty the cache. Raises ``RuntimeError`` if there is none."""
        if self.kv_cache is None:
            raise RuntimeError("There is no cache to reset: call setup_cache() first.")
        self.kv_cache.reset()

    def forward(
        self,
        x: Tensor,
        *,
        mask: object = None,
        input_pos: Tensor | None = None,
        documents: object = None,
        rope: object = None,
    ) -> Tensor:
        """Mix positions; ``mask``, ``documents`` and ``rope`` are attention's, ``input_pos`` says the same here.

        Args:
            x: ``[b, s, d]``.
            mask: not used.
            input_pos: position of each token in its document, ``[b, s]``, ``[1, s]`` or ``[s]``; by default each row is
                one document.
            documents: not used.
            rope: not used.

        Returns:
            Tensor ``[b, s, d]``.
        """
        if input_pos is None:
            input_pos = torch.arange(x.shape[1], device=x.device)
        reach = input_pos.view(-1, x.shape[1]).expand(x.shape[0], -1)
        return self._mix(x, reach, self.kv_cache if self.cache_enabled else None)
