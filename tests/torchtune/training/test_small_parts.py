"""Dropout, gradients, positions, threads, devices."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from torchtune import training, utils
from torchtune.models.llama3_2 import llama3_2


def test_disable_dropout():
    model = nn.Sequential(nn.Dropout(0.3), nn.Sequential(nn.Dropout1d(0.1)), nn.Linear(2, 2))
    model[2].attn_dropout = 0.2
    training.disable_dropout(model)
    assert (model[0].p, model[1][0].p, model[2].attn_dropout) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize("foreach", [None, False])
def test_scale_grads(foreach):
    parameters = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2).bfloat16()), nn.Parameter(torch.ones(1))]
    parameters[0].grad, parameters[1].grad = torch.full((3,), 4.0), torch.full((2,), 2.0).bfloat16()
    training.scale_grads_(parameters, torch.tensor(0.5), foreach=foreach)
    assert parameters[0].grad.tolist() == [2.0] * 3
    assert parameters[1].grad.tolist() == [1.0] * 2
    assert parameters[2].grad is None
    training.scale_grads_(parameters[0], torch.tensor(2.0))
    assert parameters[0].grad.tolist() == [4.0] * 3


def test_unmasked_sequence_lengths():
    mask = torch.tensor([[0, 0, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1], [1, 0, 0, 1], [0, 1, 1, 1]]).bool()
    lengths = training.get_unmasked_sequence_lengths(mask)
    assert lengths.tolist() == [2, 3, 0, 2, 0]
    assert lengths.dtype == torch.int64


def test_processes(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert not training.is_distributed()
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "1")
    assert training.is_distributed()
    assert training.get_distributed_backend("cpu") == "gloo"
    assert training.get_distributed_backend("cuda", offload_ops_to_cpu=True) == "cuda:nccl,cpu:gloo"


def test_restarts(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)
    assert not training.is_restart()
    for count, expected in (("0", False), ("1", True)):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", count)
        assert training.is_restart() is expected


def test_threads_are_shared_among_ranks(monkeypatch):
    before = torch.get_num_threads()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1000")
    try:
        training.set_torch_num_threads()
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_parameters_left_on_meta():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    training.validate_no_params_on_meta_device(model[:1])
    with pytest.raises(RuntimeError, match=r"parameter 1\.weight is still on the meta device"):
        training.validate_no_params_on_meta_device(model)


def test_a_tokenizer_larger_than_the_embedding():
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
