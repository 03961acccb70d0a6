"""Functions of earlier releases that the library itself no longer calls."""

import torch

from torchtune import rlhf, training


def test_position_of_the_last_unmasked_token_is_returned():
    mask = torch.tensor([[0, 0, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1], [1, 0, 0, 1], [0, 1, 1, 1]]).bool()
    lengths = training.get_unmasked_sequence_lengths(mask)
    assert lengths.tolist() == [2, 3, 0, 2, 0]
    assert lengths.dtype == torch.int64


def test_weights_of_a_reward_model_are_renamed_both_ways():
    rng = torch.Generator().manual_seed(0)
    weights = {
        "model.embed_tokens.weight": torch.randn(5, 8, generator=rng),
        "model.layers.0.self_attn.q_proj.weight": torch.randn(8, 8, generator=rng),
        "score.weight": torch.randn(1, 8, generator=rng),
    }
    converted = rlhf.utils.reward_hf_to_tune({**weights, "score.bias": torch.zeros(1)}, 2, 2, 8)
    assert converted.keys() == {"tok_embeddings.weight", "layers.0.attn.q_proj.weight", "output.weight"}
    back = rlhf.utils.reward_tune_to_hf(converted, 2, 2, 8)
    assert back.keys() == weights.keys()
    assert all(torch.equal(back[name], weights[name]) for name in weights)
