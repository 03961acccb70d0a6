"""Preparation of a model for a run: dropout, vocabulary, parameters without data."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from torchtune import training, utils
from torchtune.models.llama3_2 import llama3_2


def test_every_kind_of_dropout_is_disabled():
    model = nn.Sequential(nn.Dropout(0.3), nn.Sequential(nn.Dropout1d(0.1)), nn.Linear(2, 2))
    model[2].attn_dropout = 0.2
    training.disable_dropout(model)
    assert (model[0].p, model[1][0].p, model[2].attn_dropout) == (0.0, 0.0, 0.0)


def test_parameter_left_on_meta_is_refused_by_name():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    training.validate_no_params_on_meta_device(model[:1])
    with pytest.raises(RuntimeError, match=r"parameter 1\.weight is still on the meta device"):
        training.validate_no_params_on_meta_device(model)


def test_embedding_smaller_than_the_tokenizer_is_refused_or_resized():
    tokenizer = SimpleNamespace(vocab_size=70)
    model = llama3_2(
        vocab_size=64, num_layers=1, num_heads=2, num_kv_heads=1, embed_dim=8, max_seq_len=8, intermediate_dim=8
    )
    with pytest.raises(utils.UserError, match="has 70 tokens but the checkpoint's embedding has 64 rows"):
        training.fit_vocabulary(model, tokenizer)
    training.fit_vocabulary(model, tokenizer, resize=True)
    assert model.tok_embeddings.weight.shape == (70, 8)
    assert model(torch.tensor([[69]])).shape == (1, 1, 70)
    training.fit_vocabulary(model, tokenizer)
    with pytest.raises(utils.UserError, match="has no vocab_size, which the embedding of the model needs"):
        training.fit_vocabulary(model, object())
