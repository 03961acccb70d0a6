import torch

from torchtune import training


def test_position_of_the_last_unmasked_token_is_returned():
    mask = torch.tensor([[0, 0, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1], [1, 0, 0, 1], [0, 1, 1, 1]]).bool()
    lengths = training.get_unmasked_sequence_lengths(mask)
    assert lengths.tolist() == [2, 3, 0, 2, 0]
    assert lengths.dtype == torch.int64
