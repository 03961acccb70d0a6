"""Modules that are trained whole beside an adapter: PEFT's ``modules_to_save``, both ways."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import nn

import torchtune
from tests.torchtune.checkpoints import ranks
from tests.torchtune.checkpoints.small import (
    build,
    close,
    hf_model,
    in_peft,
    in_transformers,
    load,
    logits,
    randomize_adapter,
    read,
    resume,
    same_bits,
    some_tokens,
    started,
    stored,
    write_folder,
)
from torchtune.checkpoints import CheckpointError, FullModelHFCheckpointer, adapted_copy, adapter_conversion
from torchtune.modules import classifier_model, resize_token_embeddings
from torchtune.modules.conversion import apply_conversions
from torchtune.modules.low_precision import QuantizeBase
from torchtune.modules.peft import LoRA
from torchtune.training import fit_vocabulary
from torchtune.utils import UserError

# Our train_modules, and PEFT's modules_to_save.
MODULES: dict[str, tuple[list[str], list[str]]] = {
    "head": (["output"], ["lm_head"]),
    "embedding and head": (["tok_embeddings", "output"], ["embed_tokens", "lm_head"]),
    "final norm": (["norm"], ["model.norm"]),
    "linear layers": (
        ["layers.0.mlp", "w2"],
        ["model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj", "down_proj"],
    ),
}


def train(model: nn.Module, steps: int = 3) -> torch.Tensor:
    """Train on a few tokens, so that everything that is trained moves; return the logits."""
    if isinstance(model, PeftModel):
        model.train()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.3)
    tokens = some_tokens()
    for _ in range(steps):
        out = model(tokens)
        out = out if isinstance(out, torch.Tensor) else out.logits
        nn.functional.cross_entropy(out[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return logits(model.eval())


def trained_by_peft(folder: Path, shape: str = "llama", **settings: Any) -> nn.Module:
    torch.manual_seed(5)
    model = get_peft_model(hf_model(shape), LoraConfig(r=4, lora_alpha=6, target_modules=["q_proj"], **settings))
    train(model)
    model.save_pretrained(folder)
    return in_peft(hf_model(shape), folder)


def lora(*modules: str, **options: Any) -> LoRA:
    return LoRA(4, 6, attn_modules=["q_proj"], train_modules=modules, **options)


@pytest.mark.parametrize("modules", MODULES)
@pytest.mark.parametrize("shape", ["llama", "qwen2"])
def test_trained_modules_are_exchanged_with_peft(shape, modules, tmp_path):
    module_names, saved_modules = MODULES[modules]
    source = write_folder(tmp_path / "in", shape)
    checkpointer, model = started(source, lora(*module_names))
    before = logits(model)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    untrained = {name: p.detach().clone() for name, p in model.named_parameters() if name not in trained}
    expected = train(model)
    assert (expected - before).abs().max() > 0.1
    assert same_bits({name: model.get_parameter(name).detach() for name in untrained}, untrained)

    saved = checkpointer.save("epoch_0", model, contents="adapter")
    assert not list(saved.glob("model*"))
    assert read(saved / "adapter_config.json")["modules_to_save"] == sorted(saved_modules)
    peft_model = in_peft(hf_model(shape), saved)
    close(logits(peft_model), expected)
    by_peft = tmp_path / "peft"
    peft_model.save_pretrained(by_peft)
    assert same_bits(load_file(by_peft / "adapter_model.safetensors"), load_file(saved / "adapter_model.safetensors"))

    again = load(source, lora(*module_names), adapter_checkpoint=by_peft)
    assert same_bits(again.state_dict(), model.state_dict())
    loaded, _ = torchtune.load(source, adapter=by_peft, dtype="fp32", device="cpu")
    assert torch.equal(logits(loaded), expected)
    assert {name for name, parameter in loaded.named_parameters() if parameter.requires_grad} == trained
    merged = checkpointer.save("epoch_1", model, contents=("adapter", "merged"))
    close(logits(in_transformers(merged)), expected)
    close(logits(in_peft(hf_model(shape), merged / "adapter")), expected)


@pytest.mark.parametrize("modules", [["lm_head"], ["embed_tokens", "lm_head"], ["norm"], ["mlp"]])
def test_adapters_that_peft_trained_with_modules_have_its_logits(modules, tmp_path):
    source = write_folder(tmp_path / "in")
    peft_model = trained_by_peft(tmp_path / "adapter", modules_to_save=modules)
    loaded = load(
        source, adapter_conversion(build(source), tmp_path / "adapter"), adapter_checkpoint=tmp_path / "adapter"
    )
    close(logits(loaded), logits(peft_model))


@pytest.mark.parametrize("merge", [False, True], ids=["adapter only", "merged"])
@pytest.mark.parametrize("modules", [["tok_embeddings"], ["tok_embeddings", "output"]])
def test_tied_embedding_is_trained_as_one_with_the_output(modules, merge, tmp_path):
    source = write_folder(tmp_path / "in", "llama_tied")
    checkpointer, model = started(source, lora(*modules))
    expected = train(model)
    saved = checkpointer.save("epoch_0", model, contents=("adapter", "merged") if merge else "adapter")
    if merge:
        assert "lm_head.weight" not in stored(saved)
        close(logits(in_transformers(saved)), expected)
        saved = saved / "adapter"
    settings = read(saved / "adapter_config.json")
    assert settings["modules_to_save"] == ["embed_tokens", "lm_head"]
    peft_model = in_peft(hf_model("llama_tied"), saved)
    close(logits(peft_model), expected)
    assert torch.equal(logits(load(source, lora(*modules), adapter_checkpoint=saved)), expected)
    # Trained on by peft, both stay one.
    continued = PeftModel.from_pretrained(hf_model("llama_tied"), saved, is_trainable=True)
    close(logits(continued), expected)
    expected = train(continued)
    assert (expected - logits(model)).abs().max() > 0.01
    continued.save_pretrained(tmp_path / "peft")
    close(logits(load(source, lora(*modules), adapter_checkpoint=tmp_path / "peft")), expected)


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.parametrize("modules", [["embed_tokens"], ["lm_head"], ["embed_tokens", "lm_head"]])
def test_adapter_that_unties_weights_is_refused(modules, tmp_path):
    source = write_folder(tmp_path / "in", "llama_tied")
    trained_by_peft(tmp_path / "adapter", "llama_tied", modules_to_save=modules)
    reason = "alone, which peft unties .*ensure_weight_tying=True"
    if len(modules) == 2:  # each with its own values
        reason = "differs from 'model.embed_tokens.weight' although the model shares the two"
    with pytest.raises(CheckpointError, match=reason):
        torchtune.load(source, adapter=tmp_path / "adapter", dtype="fp32", device="cpu")
    with pytest.raises(CheckpointError, match=r"differs from the model's.*train_modules"):
        load(source, lora(), adapter_checkpoint=tmp_path / "adapter")


@pytest.mark.parametrize("patterns", [{}, {"rank_pattern": {"layers.1.self_attn.q_proj": 2}}])
def test_adapter_that_keeps_weights_tied_is_read_and_written(patterns, tmp_path):
    source = write_folder(tmp_path / "in", "llama_tied")
    settings = {"modules_to_save": ["embed_tokens", "model.norm"], "ensure_weight_tying": True, **patterns}
    peft_model = trained_by_peft(tmp_path / "adapter", "llama_tied", **settings)
    expected = logits(peft_model)
    loaded, _ = torchtune.load(source, adapter=tmp_path / "adapter", dtype="fp32", device="cpu")
    close(logits(loaded), expected)
    ranks = {"rank_pattern": {"layers.1.attn.q_proj": 2}} if patterns else {}
    adapter = lora("tok_embeddings", "norm", **ranks)
    checkpointer, model = started(source, adapter, adapter_checkpoint=str(tmp_path / "adapter"))
    close(logits(model), expected)
    saved = checkpointer.save("epoch_0", model, contents="adapter")
    close(logits(in_peft(hf_model("llama_tied"), saved)), expected)


def test_classifier_with_an_adapter_is_exchanged_with_peft(tmp_path):
    source = write_folder(tmp_path / "in")
    folder = str(source)
    with torch.device("meta"):
        model = classifier_model(3, "torchtune.models.from_hf_config", checkpoint_dir=folder)
        apply_conversions(model, [lora("score")])
    checkpointer = FullModelHFCheckpointer(source, output_dir=tmp_path / "out")
    checkpointer.load_model(model)
    randomize_adapter(model)
    expected = model.eval()(some_tokens())[:, -1]  # of the last token
    saved = checkpointer.save("epoch_0", model, state={"progress": {}}, contents="adapter")
    settings = read(saved / "adapter_config.json")
    assert (settings["modules_to_save"], settings["task_type"]) == (["score"], "SEQ_CLS")

    base = transformers.AutoModelForSequenceClassification.from_pretrained(source, num_labels=3, dtype=torch.float32)
    peft_model = in_peft(base, saved)
    close(peft_model(some_tokens()).logits, expected)
    peft_model.save_pretrained(tmp_path / "peft")
    for adapter in (saved, tmp_path / "peft"):
        again, _ = torchtune.load(source, adapter=adapter, dtype="fp32", device="cpu")
        assert torch.equal(again(some_tokens())[:, -1], expected)
        assert again.description.num_classes == 3
    merged = checkpointer.save("epoch_1", model, contents=("adapter", "merged"))
    classifier = transformers.AutoModelForSequenceClassification.from_pretrained(merged, dtype=torch.float32)
    close(classifier(some_tokens()).logits, expected)


def test_run_with_trained_modules_resumes_bit_exact(tmp_path):
    source = write_folder(tmp_path / "in", dtype=torch.bfloat16)
    checkpointer, model = started(source, lora("tok_embeddings", "output"), dtype=torch.bfloat16)
    again = load(source, lora("tok_embeddings", "output"), dtype=torch.bfloat16)
    train(model)
    checkpointer.save("step_3", model, state={"progress": {"global_step": 3}}, contents="adapter")
    resume(checkpointer, again)
    assert same_bits(again.state_dict(), model.state_dict())


def test_modules_are_trained_beside_adapters_of_a_quantized_base(tmp_path):
    """QuantizeBase leaves embedding, output and norms in their dtype."""
    source = write_folder(tmp_path / "in")
    conversions = [QuantizeBase(block_size=16), lora("tok_embeddings", "output", "norm")]
    checkpointer, model = started(source, *conversions)
    expected = train(model)
    saved = checkpointer.save("epoch_0", model, contents=("adapter", "merged"))
    close(logits(in_transformers(saved)), expected)
    again = load(source, *conversions, adapter_checkpoint=saved / "adapter")
    assert torch.equal(logits(again), expected)


@pytest.mark.parametrize("modules", [["embed_tokens"], ["q_proj", "embed_tokens"]])
def test_adapter_of_an_embedding_is_refused(modules, tmp_path):
    base = write_folder(tmp_path / "base")
    settings = LoraConfig(r=4, lora_alpha=6, target_modules=modules)
    get_peft_model(hf_model("llama"), settings).save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    reason = r"'base_model\.model\.model\.embed_tokens\.lora_embedding_A', and LoRA on an embedding is not supported"
    with pytest.raises(CheckpointError, match=reason):
        torchtune.load(base, adapter=tmp_path / "adapter", device="cpu")
    with pytest.raises(CheckpointError, match=reason):
        load(base, lora(), adapter_checkpoint=tmp_path / "adapter")


def test_adapters_that_do_not_fit_the_trained_modules_are_refused(tmp_path):
    source = write_folder(tmp_path / "in")
    checkpointer, model = started(source, lora("output"))
    train(model)
    saved = checkpointer.save("epoch_0", model, contents="adapter")
    with pytest.raises(CheckpointError, match=r"'base_model\.model\.lm_head\.weight', which differs .*train_modules"):
        load(source, lora(), adapter_checkpoint=saved)
    with pytest.raises(CheckpointError, match=r"lacks 'norm\.scale', which the model in the run's config trains whole"):
        load(source, lora("output", "norm"), adapter_checkpoint=saved)


@pytest.mark.parametrize("shape", ["llama", "llama_tied"])
def test_new_tokens_of_an_embedding_that_is_trained_whole_are_read_again(shape, tmp_path):
    source = write_folder(tmp_path / "in", shape)
    checkpointer, model = started(source, lora("tok_embeddings", "output"))
    resize_token_embeddings(model, 325)
    expected = train(model)
    saved = checkpointer.save("epoch_0", model, contents="adapter")
    again = load(source, lora("tok_embeddings", "output"), adapter_checkpoint=saved)
    assert torch.equal(logits(again), expected)
    base = hf_model(shape)
    base.resize_token_embeddings(325)
    close(logits(in_peft(base, saved)), expected)


@pytest.mark.parametrize("module", ["tok_embeddings", "output"])
def test_new_tokens_with_one_trained_matrix_of_two_are_refused(module, tmp_path):
    model = load(write_folder(tmp_path / "in"), lora(module))
    with pytest.raises(UserError, match="learned by half: train both"):
        fit_vocabulary(model, SimpleNamespace(vocab_size=400), resize=True)


def test_part_of_a_fused_weight_is_refused(tmp_path):
    source = write_folder(tmp_path / "in", "phi3")
    checkpointer, model = started(source, LoRA(4, 6, attn_modules=["output_proj"], train_modules=["layers.0.mlp.w1"]))
    with pytest.raises(CheckpointError, match=r"'layers\.0\.mlp\.w1\.weight' is one weight with 'layers\.0\.mlp\.w3"):
        checkpointer.check_contents(model, contents="adapter")


def test_copy_with_an_adapter_leaves_the_weights_of_its_model(tmp_path):
    source = write_folder(tmp_path / "in")
    checkpointer, trained = started(source, lora("output"))
    expected = train(trained)
    saved = checkpointer.save("epoch_0", trained, contents="adapter")
    model = load(source)
    before = logits(model)
    copy = adapted_copy(model, saved)
    assert torch.equal(logits(copy), expected)
    assert torch.equal(logits(model), before)
    assert copy.tok_embeddings.weight is model.tok_embeddings.weight


def sharded(folder: Path) -> None:
    torch.manual_seed(0)
    model = ranks.shard(build(folder / "in", lora("tok_embeddings")), "fsdp")
    checkpointer = FullModelHFCheckpointer(folder / "in", output_dir=folder / "out", adapter_checkpoint=folder / "one")
    checkpointer.load_model(model)
    alone = load(folder / "in", lora("tok_embeddings"), adapter_checkpoint=folder / "one")
    for name, parameter in alone.named_parameters():
        assert torch.equal(ranks.whole(model.get_parameter(name)), parameter.detach()), name
    checkpointer.save("epoch_0", model, contents="adapter")


def test_trained_modules_of_sharded_models_are_read_and_saved(tmp_path):
    source = write_folder(tmp_path / "in", "llama_tied")
    checkpointer, model = started(source, lora("tok_embeddings"), output=tmp_path / "single")
    train(model)
    saved = checkpointer.save("epoch_0", model, contents="adapter")
    saved.rename(tmp_path / "one")
    ranks.run(2, [sharded], tmp_path)
    assert same_bits(
        load_file(tmp_path / "out" / "epoch_0" / "adapter_model.safetensors"),
        load_file(tmp_path / "one" / "adapter_model.safetensors"),
    )
