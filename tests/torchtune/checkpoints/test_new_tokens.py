"""New rows of the vocabulary beside an adapter are trained, saved as peft saves them, merged and resumed."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from peft import get_peft_model_state_dict
from safetensors.torch import load_file
from torch import nn

from tests.tiny_images import image_text_model, mistral3_config, qwen3_5_config
from tests.torchtune.checkpoints.small import (
    build,
    close,
    hf_model,
    in_peft,
    in_transformers,
    load,
    read,
    resume,
    same_bits,
    started,
    write_folder,
)
from tests.torchtune.models.families import FAMILIES
from torchtune.checkpoints import CheckpointError, FullModelHFCheckpointer
from torchtune.models import from_hf_config
from torchtune.modules.conversion import ConversionError
from torchtune.modules.loss import LinearCrossEntropyLoss
from torchtune.modules.peft import LoRA
from torchtune.training import add_token_rows, fit_vocabulary, setup_optimizer

ROWS, OLD = 328, 320
LORA = LoRA(4, 8, attn_modules=["q_proj", "v_proj"], use_dora=True)


def tokens() -> torch.Tensor:
    """[2, 24] ids, some of them new."""
    return torch.randint(3, ROWS, (2, 24), generator=torch.Generator().manual_seed(2)).index_fill_(
        1, torch.tensor([1, 20]), ROWS - 1
    )


def grown(source: Path) -> tuple[FullModelHFCheckpointer, nn.Module]:
    store, model = started(source, LORA)
    fit_vocabulary(model, SimpleNamespace(vocab_size=ROWS), resize=True)
    return store, model


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return setup_optimizer(lambda parameters: torch.optim.AdamW(parameters, lr=0.02, weight_decay=0.5), model)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    loss_fn = LinearCrossEntropyLoss()
    loss_fn.set_model_output(model)
    loss = loss_fn(model(tokens()[:, :-1]), tokens()[:, 1:])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    model.skip_output_layer = False
    return loss.item()


@torch.no_grad()
def logits(model: nn.Module) -> torch.Tensor:
    out = model(tokens())
    return (out if isinstance(out, torch.Tensor) else out.logits).float()


def base_of_peft(shape: str) -> nn.Module:
    model = hf_model(shape)
    model.resize_token_embeddings(ROWS, mean_resizing=False)
    return model


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")
@pytest.mark.parametrize("shape", ["llama", "qwen2_tied"])
def test_new_rows_are_trained_saved_and_resumed(shape, tmp_path):
    source = write_folder(tmp_path / "in", shape)
    (store, model), (_, resumed) = grown(source), grown(source)
    start = logits(model)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = optimizer_of(model.train())
    for _ in range(3):
        step(model, optimizer)
    moved = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    outputs = [] if shape.endswith("tied") else ["output.new_rows"]
    assert {name for name in moved if "lora" not in name and "magnitude" not in name} == {
        "tok_embeddings.new_rows",
        *outputs,
    }
    expected = logits(model.eval())
    assert (expected - start).abs().max() > 0.1

    saved = store.save("step_3", model, state={"optimizer": optimizer, "progress": {}}, contents="adapter")
    assert read(saved / "config.json")["vocab_size"] == ROWS
    names = ["embed_tokens", *(["lm_head"] if outputs else [])]
    ids = list(range(OLD, ROWS))
    assert read(saved / "adapter_config.json")["trainable_token_indices"] == dict.fromkeys(names, ids)
    adapted = in_peft(base_of_peft(shape), saved)
    close(logits(adapted), expected)
    files = load_file(saved / "adapter_model.safetensors")
    peft_tensors = get_peft_model_state_dict(adapted)
    assert same_bits(
        {name: peft_tensors[name] for name in files}, files
    )  # it adds whole embeddings whose size has changed

    again = optimizer_of(resumed)
    resume(store, resumed, optimizer=again)
    assert same_bits(resumed.state_dict(), model.state_dict())
    assert step(resumed.train(), again) == step(model.train(), optimizer)
    assert same_bits(resumed.state_dict(), model.state_dict())

    expected = logits(model.eval())
    merged = store.save("epoch_0", model, contents=("adapter", "merged"))
    close(logits(in_transformers(merged)), expected)
    close(logits(in_peft(base_of_peft(shape), merged / "adapter")), expected)
    close(logits(load(merged)), expected)


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`:UserWarning")
def test_new_rows_of_a_family_whose_modules_have_other_names_than_its_files_are_read_by_peft(tmp_path):
    family, options = FAMILIES["nemotron_h"][:2]
    store, model = started(write_folder(tmp_path / "in", (family, options)), LoRA(2, 4, attn_modules=["q_proj"]))
    fit_vocabulary(model, SimpleNamespace(vocab_size=ROWS), resize=True)
    with torch.no_grad():
        model.tok_embeddings.new_rows.normal_()
    saved = store.save("epoch_0", model, contents="adapter")
    hf = hf_model((family, options))
    hf.resize_token_embeddings(ROWS, mean_resizing=False)
    close(logits(in_peft(hf, saved)), logits(model))


@pytest.mark.parametrize("shape", ["llama", "qwen2_tied"])
def test_gradients_of_new_rows_are_those_of_the_whole_weights(shape, tmp_path):
    """autograd of a model whose embedding is trained whole, in float64, is the reference."""
    source = write_folder(tmp_path / "in", shape)
    adapted = load(source, LoRA(4, 8)).double()
    full_model = load(source).double()
    for model in (adapted, full_model):
        fit_vocabulary(model, SimpleNamespace(vocab_size=ROWS), resize=True)
        loss = nn.functional.cross_entropy(model(tokens()[:, :-1]).double().flatten(0, 1), tokens()[:, 1:].flatten())
        loss.backward()
    paths = ["tok_embeddings"] if shape.endswith("tied") else ["tok_embeddings", "output"]
    for path in paths:
        rows = adapted.get_parameter(f"{path}.new_rows").grad
        torch.testing.assert_close(rows, full_model.get_parameter(f"{path}.weight").grad[OLD:], atol=1e-6, rtol=1e-5)
        assert adapted.get_parameter(f"{path}.weight").grad is None


@pytest.mark.parametrize("config", [mistral3_config, qwen3_5_config])
def test_resized_vocabulary_of_a_model_with_images_is_read_by_transformers(config, tmp_path):
    hf = image_text_model(config())
    hf.save_pretrained(tmp_path / "in")
    with torch.device("meta"):
        model = from_hf_config(tmp_path / "in", images=True)
    store = FullModelHFCheckpointer(str(tmp_path / "in"), output_dir=str(tmp_path / "out"))
    store.load_model(model)
    fit_vocabulary(model, SimpleNamespace(vocab_size=ROWS), resize=True)
    read_back = type(hf).from_pretrained(store.save("epoch_0", model))
    assert read_back.get_input_embeddings().weight.shape[0] == ROWS
    assert read_back.get_output_embeddings().weight.shape[0] == ROWS


def test_new_rows_that_a_model_or_adapter_cannot_have_are_refused(tmp_path):
    source = write_folder(tmp_path / "in")
    model = load(source, LoRA(4, 8, apply_to_output=True))
    with pytest.raises(ConversionError, match="a LoRALinear or has a bias: leave out the adapter of the output"):
        fit_vocabulary(model, SimpleNamespace(vocab_size=ROWS), resize=True)
    assert model.tok_embeddings.weight.shape[0] == OLD
    store, trained = grown(source)
    saved = store.save("step_1", trained, contents="adapter")
    with pytest.raises(CheckpointError, match=r"has 8 new tokens, which this model cannot get; .* leave out the"):
        load(source, LoRA(4, 8, apply_to_output=True), adapter_checkpoint=saved)


@pytest.mark.parametrize("shape", ["llama", "qwen2_tied"])
def test_adapter_brings_its_new_rows_to_the_base(shape, tmp_path):
    source = write_folder(tmp_path / "in", shape)
    store, model = grown(source)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("new_rows"):
                parameter.normal_(generator=torch.Generator().manual_seed(4))
    saved = store.save("step_1", model, contents="adapter")
    again = load(source, LORA, adapter_checkpoint=saved)
    assert same_bits(again.state_dict(), model.state_dict())
    assert {name for name, parameter in again.named_parameters() if parameter.requires_grad} == {
        name for name, parameter in model.named_parameters() if parameter.requires_grad
    }
    fit_vocabulary(again, SimpleNamespace(vocab_size=ROWS))  # the rows are there: nothing to resize
    assert again.tok_embeddings.weight.shape[0] == ROWS


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")
@pytest.mark.parametrize("shape", ["llama", "llama_tied"])
def test_new_tokens_trained_modules_and_ranks_of_one_adapter_are_exchanged_with_peft(shape, tmp_path):
    """The rows are added on the meta device, where the adapter finds them, too."""
    source = write_folder(tmp_path / "in", shape)

    def started_again(**options: object) -> tuple[FullModelHFCheckpointer, nn.Module]:
        lora = LoRA(
            4,
            8,
            attn_modules=["q_proj", "v_proj"],
            train_modules=["norm", "layers.1.mlp"],
            rank_pattern={"layers.0.attn.q_proj": 8, "v_proj": 2},
            alpha_pattern={"v_proj": 6},
        )
        store = FullModelHFCheckpointer(source, output_dir=tmp_path / "out", **options)
        model = build(source, lora)
        add_token_rows(model, SimpleNamespace(vocab_size=ROWS))
        store.load_model(model)
        return store, model.eval()

    store, model = started_again()
    start = logits(model)
    optimizer = optimizer_of(model.train())
    for _ in range(3):
        step(model, optimizer)
    expected = logits(model.eval())
    assert (expected - start).abs().max() > 0.1
    saved = store.save("step_3", model, contents="adapter")
    adapted = in_peft(base_of_peft(shape), saved)
    close(logits(adapted), expected)
    adapted.save_pretrained(tmp_path / "peft")
    for adapter in (saved, tmp_path / "peft"):
        _, again = started_again(adapter_checkpoint=str(adapter))
        close(logits(again), expected)


@pytest.mark.parametrize(
    "ids",
    [
        [OLD, OLD + 2, *range(OLD + 3, ROWS + 1)],  # with a gap
        list(range(OLD + 5, ROWS + 5)),  # of a larger vocabulary
        list(range(10**12, 10**12 + ROWS - OLD)),
        [3, 4, 5, 6, 7, 8, 9, 10],  # not new
        list(range(OLD, ROWS + 1)),  # one more than there are rows in the file
    ],
)
def test_new_rows_that_do_not_continue_the_vocabulary_are_refused(ids, tmp_path):
    source = write_folder(tmp_path / "in")
    store, model = grown(source)
    saved = store.save("step_1", model, contents="adapter")
    settings = read(saved / "adapter_config.json") | {"trainable_token_indices": {"embed_tokens": ids, "lm_head": ids}}
    (saved / "adapter_config.json").write_text(json.dumps(settings))
    with pytest.raises(CheckpointError, match="do not continue the vocabulary of the base with its 320 rows"):
        load(source, LORA, adapter_checkpoint=saved)


@pytest.mark.parametrize("ids", [list(range(OLD, ROWS)), list(range(OLD, ROWS - 1))], ids=["of the rows", "others"])
def test_ids_of_new_rows_may_be_a_list(ids, tmp_path):
    """peft takes a list instead of lists by module; it has to name the rows of the file all the same."""
    source = write_folder(tmp_path / "in")
    store, model = grown(source)
    saved = store.save("step_1", model, contents="adapter")
    settings = read(saved / "adapter_config.json") | {"trainable_token_indices": ids}
    (saved / "adapter_config.json").write_text(json.dumps(settings))
    if ids == list(range(OLD, ROWS)):
        close(logits(load(source, LORA, adapter_checkpoint=saved).eval()), logits(model.eval()))
    else:
        with pytest.raises(CheckpointError, match="trainable_token_indices"):
            load(source, LORA, adapter_checkpoint=saved)
