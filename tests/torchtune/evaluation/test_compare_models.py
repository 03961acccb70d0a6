"""Comparisons of two models: formulas in float64 by hand, and which layer differs."""

import math

import pytest
import torch

import torchtune
from tests.tiny import write_checkpoint
from tests.torchtune.checkpoints.small import randomize_adapter, write_folder
from torchtune.evaluation import EvaluationError, compare_layers, compare_models, logits_of
from torchtune.modules.peft import LoRA


def test_differences_of_logits_are_those_of_the_formulas():
    generator = torch.Generator().manual_seed(0)
    first = [torch.randn(length, 7, generator=generator) for length in (3, 2)]
    second = [logits + torch.randn(logits.shape, generator=generator) for logits in first]
    comparison = compare_models(first, second)

    def probabilities(row):
        return [math.exp(value) / sum(map(math.exp, row)) for value in row]

    rows = list(zip(torch.cat(first).tolist(), torch.cat(second).tolist(), strict=True))
    differences = []
    kl = []
    variances = []
    num_equal = 0
    for first_row, second_row in rows:  # logits of a token, [v]
        differences += [abs(a - b) for a, b in zip(first_row, second_row, strict=True)]
        pairs = zip(probabilities(first_row), probabilities(second_row), strict=True)
        kl.append(sum(p * math.log(p / q) for p, q in pairs))
        mean = sum(first_row) / 7
        variances.append(sum((value - mean) ** 2 for value in first_row) / 7)
        num_equal += first_row.index(max(first_row)) == second_row.index(max(second_row))
    assert comparison.max_difference == pytest.approx(max(differences))
    assert comparison.mean_difference == pytest.approx(sum(differences) / 35)
    assert comparison.spread == pytest.approx(math.sqrt(sum(variances) / 5))
    assert comparison.kl == pytest.approx(sum(kl) / 5)
    assert (comparison.equal_tokens, comparison.tokens) == (num_equal, 5)
    assert comparison.equal_tokens < 5

    first[1][1, 3] = math.nan
    comparison = compare_models(first, first)
    assert all(map(math.isnan, (comparison.max_difference, comparison.mean_difference, comparison.kl)))
    with pytest.raises(EvaluationError, match=r"the logits of a prompt are \[3, 7\] and \[3, 6\]"):
        compare_models(first, [logits[:, :6] for logits in first])


def test_logits_of_a_classifier_are_those_after_the_last_token(tmp_path):
    judge, _ = torchtune.load(write_checkpoint(tmp_path / "judge", is_reward=True), device="cpu")
    (logits,) = logits_of(judge, [torch.tensor([5, 6, 7, 8])])
    assert logits.shape == (1, 1)


def test_layers_with_an_adapter_equal_merged_ones_and_the_changed_one_is_named(tmp_path):
    base = write_folder(tmp_path / "base", "qwen3_moe")
    model, _ = torchtune.load(base, adapter=LoRA(rank=2, alpha=6, apply_to_mlp=True), device="cpu")
    randomize_adapter(model)
    merged, _ = torchtune.load(torchtune.save(model, tmp_path / "merged", contents="merged"), device="cpu")
    names = set()
    for layer in range(3):
        names |= {f"model.layers.{layer}.self_attn.{part}_proj.weight" for part in "qkvo"}
    counted = []
    errors = compare_layers(model, merged, lambda number, total: counted.append((number, total)))
    assert counted == [(number, len(counted)) for number in range(1, len(counted) + 1)]
    assert len(counted) > 1
    assert names < errors.keys()
    assert max(errors.values()) < 1e-5
    with torch.no_grad():
        merged.layers[1].mlp.experts.up_proj[3] += 0.1 * merged.layers[1].mlp.experts.up_proj[3].std()
        merged.layers[2].sa_norm.scale[0] = torch.nan
    errors = {name: error for name, error in compare_layers(model, merged).items() if error > 1e-4}
    assert errors.keys() == {"model.layers.1.mlp.experts.3.up_proj.weight", "model.layers.2.input_layernorm.weight"}
    assert 0.02 < errors["model.layers.1.mlp.experts.3.up_proj.weight"] < 0.2
    assert math.isinf(errors["model.layers.2.input_layernorm.weight"])
