"""Positions of the tokens to pool."""

import torch


def get_unmasked_sequence_lengths(mask: torch.Tensor) -> torch.Tensor:
    """Return the index of the last unmasked position of each row; 0 for a row that is fully masked.

    Args:
        mask: bool [b, s], True at padding.

    Returns:
        int64 [b], indices of the last hidden state of each row.

    Example:
        >>> torchtune.training.get_unmasked_sequence_lengths(torch.tensor([[False, False, True]]))
        tensor([1])
    """
    positions = torch.arange(mask.shape[-1], device=mask.device)
    return torch.where(mask, torch.zeros_like(positions), positions).amax(dim=-1)
