"""Masks and positions of left-padded prompts."""

import torch
from torch import Tensor
from torch.nn import functional as F


def get_causal_mask_from_padding_mask(padding_mask: Tensor, target_seq_len: int | None = None) -> Tensor:
    """Make the causal mask of a padded batch.

    Args:
        padding_mask: bool ``[b, s]``, True for real tokens.
        target_seq_len: number of key positions t (the length of the KV cache), at least s; by default s.

    Returns:
        bool ``[b, s, t]``: a token attends to itself and to earlier real tokens. Padding attends to itself, so that
        no row is empty; key positions from s on are never attended.

    Raises:
        AssertionError: ``target_seq_len`` below s.

    Example:
        >>> torchtune.generation.get_causal_mask_from_padding_mask(torch.tensor([[False, True, True]])).int()
        tensor([[[1, 0, 0],
                 [0, 1, 0],
                 [0, 1, 1]]], dtype=torch.int32)
    """
    b, s = padding_mask.shape
    target_seq_len = s if target_seq_len is None else target_seq_len
    assert target_seq_len >= s, f"target_seq_len ({target_seq_len}) is shorter than the sequence ({s})."
    mask = padding_mask[:, None, :].expand(b, s, s).tril()
    mask = mask | torch.eye(s, dtype=torch.bool, device=mask.device)
    return F.pad(mask, (0, target_seq_len - s))


def get_position_ids_from_padding_mask(padding_mask: Tensor) -> Tensor:
    """Return positions int ``[b, s]`` that count real tokens from 0; padding gets 0.

    Args:
        padding_mask: bool ``[b, s]``, True for real tokens.

    Example:
        >>> torchtune.generation.get_position_ids_from_padding_mask(torch.tensor([[False, True, True]]))
        tensor([[0, 0, 1]], dtype=torch.int32)
    """
    return ((padding_mask.cumsum(-1) - 1) * padding_mask).to(torch.int)
