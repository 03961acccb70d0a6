"""The recipes with a model of text and images."""

import math
import shutil
from contextlib import nullcontext

import pytest
import torch
from safetensors.torch import load_file
from transformers import MllamaForConditionalGeneration

from tests import tiny_vision
from tests.recipes.runs import load_recipe, resume, start, write_config
from tests.recipes.test_generate import recipe_of
from tests.tiny import CHATS, read_lines, write_lines
from tests.tiny_vision import images, logits_of_transformers, sees
from torchtune import generate
from torchtune.config import instantiate, load_and_check
from torchtune.data import padded_collate_tiled_images_and_mask
from torchtune.estimate._check_run import find_problems
from torchtune.estimate._simulate import SimulationError, simulated_kind
from torchtune.generation import read_prompts
from torchtune.models import from_hf_config
from torchtune.training import fit_vocabulary
from torchtune.utils import UserError

SETTINGS = {
    "dataset": {"_component_": "tests.tiny_vision.Rows"},
    "collate_fn": "torchtune.data.padded_collate_tiled_images_and_mask",
    "lr_scheduler": None,
}


@pytest.fixture
def folder(tmp_path):
    tiny_vision.write_vision_checkpoint(tmp_path / "checkpoint")
    return tmp_path


def run(kind, folder, **settings):
    return start(f"{kind}_finetune_single_device", folder, **{**SETTINGS, "batch_size": 3, **settings})


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_training_resumes_to_the_bit_and_transformers_reads_what_comes_out(kind, folder):
    settings = {"epochs": 2, "save_every_n_steps": 1, "checkpointer__keep_last_n_checkpoints": 9}
    full_run = run(kind, folder, **settings)
    assert len(full_run.losses) == 4
    again = resume(f"{kind}_finetune_single_device", folder, full_run, 2, **SETTINGS, batch_size=3, **settings)
    # Every trained parameter has moved: embeddings of tiles where there were images.
    before = run(kind, folder, max_steps_per_epoch=1, train=False).trained
    still = [name for name, value in full_run.trained.items() if torch.equal(value, before[name])]
    assert still == []

    tokens = torch.tensor([[1, tiny_vision.IMAGE_TOKEN, 5, 9, 7]])
    image_inputs = images([(2, 1)])
    mask = sees(tokens, image_inputs["aspect_ratio"])
    exported = MllamaForConditionalGeneration.from_pretrained(again.output_dir / "step_4").eval()
    model = again.recipe.model.eval().cpu()
    with torch.no_grad():
        expected = logits_of_transformers(exported, tokens, image_inputs, mask)
        logits = model(tokens, encoder_input=image_inputs, encoder_mask=mask)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-3)


def test_answers_are_learned_from_the_pixels_of_files(folder):
    """Questions are all the same, so that text alone leaves ln 3 to each answer of three colors."""
    settings = {**tiny_vision.write_pictures(folder, times=14), "batch_size": 6, "epochs": 1, "shuffle": True}
    done = run("full", folder, **settings, optimizer={"_component_": "torch.optim.AdamW", "lr": 5e-3})
    row = done.recipe.loader.dataset[0]
    labels = sum(label != -100 for label in row["labels"])
    assert list(done.losses.values())[-1] * labels < math.log(3) / 2


def test_frozen_parts_stay_as_they_were(folder):
    model = {"_component_": "tests.tiny_vision.with_parts", "checkpoint_dir": str(folder / "checkpoint")}
    settings = {"enable_activation_checkpointing": True, "epochs": 1}
    parts = {"decoder_trainable": False, "encoder_trainable": False}
    done = run("full", folder, model={**model, **parts}, **settings)
    before, after = (load_file(at / "model.safetensors") for at in (folder / "checkpoint", done.output_dir / "epoch_0"))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    starts = ("language_model.model.layers.1.", "language_model.model.layers.4.")  # of cross-attention
    starts += ("vision_model.global_transformer.", "multi_modal_projector.", "language_model.model.embed_tokens.")
    assert changed == {name for name in before if name.startswith(starts)}
    rows = before["language_model.model.embed_tokens.weight"] != after["language_model.model.embed_tokens.weight"]
    assert rows.any(-1).nonzero().min() == tiny_vision.IMAGE_TOKEN  # before it are those of the decoder


@pytest.mark.parametrize(
    ("name", "settings", "sentence"),
    [
        ("full_finetune_distributed", {"tensor_parallel_dim": 2}, "tensor_parallel_dim is 2: a model of text and"),
        ("lora_finetune_distributed", {"context_parallel_dim": 2}, "context_parallel_dim is 2: a model of text and"),
        ("full_dpo_single_device", {}, "reads images, and this recipe trains on text only"),
        ("lora_grpo_single_device", {}, "reads images, and this recipe trains on text only"),
        ("qat_single_device", {}, "quantizer: a model of text and images is not written quantized"),
        ("knowledge_distillation_single_device", {}, "reads images, and this recipe trains on text only"),
    ],
)
def test_settings_that_do_not_fit_images_are_refused_before_the_run(name, settings, sentence, folder):
    config = write_config(name, folder, folder / "output", **(SETTINGS if settings else {}), **settings)
    module = load_recipe(name, folder)
    cfg = load_and_check(config, [], module.recipe_main)
    processes = 2 if settings else 1
    assert any(sentence in problem for problem in find_problems(cfg, processes))


def test_a_simulation_has_no_images(folder):
    config = write_config("full_finetune_distributed", folder, folder / "output", **SETTINGS)
    cfg = load_and_check(config, [], load_recipe("full_finetune_distributed", folder).recipe_main)
    with pytest.raises(SimulationError, match="images cannot be simulated"):
        simulated_kind(cfg)


@pytest.mark.parametrize("part", ["encoder_trainable", "fusion_trainable"])
def test_text_alone_under_a_frozen_decoder_trains_nothing_and_says_so(part, folder, caplog):
    """A batch of text among others with images must not end the run: its gradients are zero."""
    parts = {"decoder_trainable": False, "encoder_trainable": False, "fusion_trainable": False, part: True}
    model = tiny_vision.with_parts(str(folder / "checkpoint"), **parts).train()
    model(torch.tensor([[1, 2]])).sum().backward()
    grads = [parameter.grad for parameter in model.parameters() if parameter.requires_grad]
    assert all(not grad.any() for grad in grads if grad is not None)
    assert any(grad is not None for grad in grads)
    assert "A batch without images trains nothing" in caplog.text


def test_a_run_on_text_that_would_train_nothing_is_refused_before_its_first_step(folder):
    """Weight decay alone would move the weights, so that the end of the run would not tell."""
    settings = tiny_vision.write_pictures(folder, count=1)
    model = {"_component_": "tests.tiny_vision.with_parts", "checkpoint_dir": str(folder / "checkpoint")}
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "r"}]
    text = {**CHATS, "source": str(write_lines(folder / "text.jsonl", [{"image": None, "messages": turns}]))}
    for dataset, trains in ((text, False), ([text, text], False), ([text, settings["dataset"]], True)):
        for decoder in (False, True):
            with nullcontext() if trains or decoder else pytest.raises(UserError, match="dataset: it has no images"):
                run(
                    "full", folder, tokenizer=settings["tokenizer"], dataset=dataset, train=False, batch_size=1,
                    model={**model, "decoder_trainable": decoder},
                )  # fmt: skip


def test_a_question_about_a_picture_is_answered_as_by_transformers(folder):
    pictures = tiny_vision.write_pictures(folder)
    hf_model = MllamaForConditionalGeneration.from_pretrained(folder / "checkpoint").eval()
    answers = set()
    for name, cached in (("0", True), ("0", False), ("7", True)):
        image = str(folder / f"{name}.png")
        prompt = {"user": "?", "image": image} if cached else {"user": {"text": "?", "image": image}}  # as formerly
        settings = {"tokenizer": pictures["tokenizer"], "prompt": prompt, "temperature": 0, "enable_kv_cache": cached}
        recipe, cfg = recipe_of(folder, **settings, max_new_tokens=4)
        row = recipe.prompt_row(cfg.prompt)
        batch = padded_collate_tiled_images_and_mask([row], pad_direction="left", pad_max_tiles=tiny_vision.TILES)
        tokens, image_inputs, mask = batch["tokens"], batch["encoder_input"], batch["encoder_mask"]
        image_inputs["images"] = image_inputs["images"].float()
        for _ in range(4):
            with torch.no_grad():
                token = logits_of_transformers(hf_model, tokens, image_inputs, mask)[:, -1:].argmax(-1)
            tokens, mask = torch.cat([tokens, token], dim=1), torch.cat([mask, mask[:, -1:]], dim=1)
        text = recipe.generate(cfg)
        assert text == recipe.tokenizer.decode(tokens[0, len(row["tokens"]) :].tolist())
        answers.add(tuple(tokens[0, len(row["tokens"]) :].tolist()))
    assert len(answers) == 2  # another picture, another answer


def test_a_file_of_questions_about_pictures_is_answered_as_each_of_them(folder):
    tokenizer = tiny_vision.write_pictures(folder, count=8)["tokenizer"]
    model = MllamaForConditionalGeneration.from_pretrained(folder / "checkpoint")
    model.lm_head.weight.data[256:] = 0  # ids without a text are not answers
    model.save_pretrained(folder / "checkpoint")
    zero = folder / "0.png"
    seven = folder / "7.png"
    texts = []
    for image in (str(zero), None, str(seven)):
        recipe, cfg = recipe_of(
            folder, tokenizer=tokenizer, prompt={"user": "?", "image": image}, temperature=0, max_new_tokens=4
        )
        texts.append(recipe.generate(cfg))
    assert len(set(texts)) == 3
    parts = [{"type": "image_url", "image_url": {"url": str(seven)}}, {"type": "text", "text": "?"}]
    lines = [{"prompt": "?", "image": str(zero)}, "?", {"prompt": "<image>?", "images": [str(seven)]}]
    lines += [[{"role": "user", "content": parts}], {"prompt": "?", "image": None}]
    file = folder / "prompts.jsonl"
    output = folder / "answers.jsonl"

    def answers(lines):
        write_lines(file, lines)
        cfg.prompts, cfg.output = str(file), str(output)
        recipe.prompts = read_prompts(file)
        recipe.answer_file(cfg)
        return [row["answer"] for row in read_lines(output)]

    assert answers(lines) == [*texts, texts[2], texts[1]]
    shutil.copy(seven, zero)
    with pytest.raises(UserError, match=r"output: .* the answer of another model or of other settings"):
        answers(lines[:1])
    zero.write_bytes(b"no picture")
    with pytest.raises(UserError, match=r"prompts.jsonl, line 1: the image .*0.png cannot be read \(it is of no kind"):
        answers(lines)
    with pytest.raises(UserError, match=r"line 1: .* 1 images, but its turns have 0 parts of type 'image'"):
        answers([{"messages": [{"role": "user", "content": "?"}], "image": str(seven)}])
    recipe.model = recipe.model.decoder
    with pytest.raises(UserError, match=r"line 1: it has an image, but a TransformerDecoder with a Llama3VisionTrans"):
        answers(lines)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"tile_size": 42}, "tiles of 42 pixels in patches of 14, but those of the model have 28 in patches of 14"),
        ({"patch_size": 7}, "tiles of 28 pixels in patches of 7, but"),
        ({"max_num_tiles": 6}, "max_num_tiles is 6, but the model reads 4 at most"),
    ],
)
def test_images_of_another_size_than_the_models_are_refused(change, sentence, folder):
    tokenizer = instantiate({**tiny_vision.write_pictures(folder)["tokenizer"], **change})
    with torch.device("meta"):
        model = from_hf_config(str(folder / "checkpoint"))
    with pytest.raises(UserError, match=sentence):
        fit_vocabulary(model, tokenizer)
    with pytest.raises(UserError, match="gives images, but the model reads text only"):
        fit_vocabulary(model.decoder, tokenizer)


def test_no_way_of_generating_or_training_drops_images(folder):
    settings = tiny_vision.write_pictures(folder, count=0)["tokenizer"]
    with pytest.raises(UserError, match="tiles of 42 pixels"):
        recipe_of(folder, tokenizer={**settings, "tile_size": 42}, prompt={"user": "?", "image": "a.png"})
    torch.manual_seed(0)
    model = tiny_vision.with_parts(str(folder / "checkpoint"))
    generate(model, instantiate(settings), "?", max_new_tokens=1, temperature=0)  # a question without an image
    with pytest.raises(ValueError, match="encoder_input has images, but this model reads text only"):
        model.decoder(torch.tensor([[1, 2]]), encoder_input=images([(1, 1)]))
