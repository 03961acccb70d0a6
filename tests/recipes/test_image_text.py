"""Supervised recipes with a model of image tokens."""

import io
import random
import shutil

import pytest
import torch
from peft import PeftModel, set_peft_model_state_dict
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

import torchtune
from tests.recipes.runs import load_recipe, resume, start, write_config
from tests.recipes.test_generate import recipe_of
from tests.tiny import CHATS, read_lines, write_lines
from tests.tiny_images import (
    CONFIGS,
    image_text_model,
    inputs_of,
    write_image_checkpoint,
    write_pictures,
)
from torchtune import _recipe_registry
from torchtune.config import instantiate, load_and_check
from torchtune.data import Message
from torchtune.estimate import find_problems
from torchtune.generation import images_of_row, stream

BUILDERS = {"full": "torchtune.models.image_text_model", "lora": "torchtune.models.lora_image_text_model"}
LORA = {"lora_attn_modules": ["q_proj", "v_proj"], "apply_lora_to_mlp": True, "lora_rank": 2}


@pytest.fixture(scope="module")
def base(request, tmp_path_factory):
    """A folder with the checkpoint of a family, by default of Qwen 3 VL."""
    family = getattr(request, "param", "qwen3_vl")
    path = tmp_path_factory.mktemp(family)
    write_image_checkpoint(image_text_model(CONFIGS[family]()), path / "checkpoint")
    return path


# Endings of tensors that no run trains: bounds of activations and scales of layers.
CONSTANTS = ("_min", "_max", "std_bias", "std_scale", "layer_scalar")
every_family = pytest.mark.parametrize("base", CONFIGS, indirect=True)


@pytest.fixture
def folder(base, tmp_path):
    """A copy, into which a test may write."""
    shutil.copytree(base, tmp_path, dirs_exist_ok=True)
    return tmp_path


def full_settings(kind, folder, parts, **settings):
    """Settings of a run on pictures; ``parts`` says which parts of the model are trained, and how."""
    model = {"_component_": BUILDERS[kind], "checkpoint_dir": str(folder / "checkpoint"), **parts}
    if kind == "lora":
        model |= LORA
        settings["model_converters"] = []
    settings = {"batch_size": 3, "lr_scheduler": None, "collate_fn": "torchtune.data.collate_documents", **settings}
    return {"model": model, **write_pictures(folder), **settings}


def run(kind, folder, parts, **settings):
    return start(f"{kind}_finetune_single_device", folder, **full_settings(kind, folder, parts, **settings))


def inputs_of_transformers(reference, row):
    """What ``transformers`` takes for a row."""
    images = row["encoder_input"]["images"]
    tokens = torch.tensor([row["tokens"]])
    return {"input_ids": tokens, **inputs_of(reference, tokens, images.patches, images.grids)}


def answer_of_transformers(reference, row, **settings):
    """Six greedy tokens of ``transformers``."""
    inputs = inputs_of_transformers(reference, row)
    inputs["attention_mask"] = torch.ones(1, len(row["tokens"]), dtype=torch.int64)
    tokens = reference.generate(**inputs, max_new_tokens=6, do_sample=False, eos_token_id=-1, **settings)
    return tokens[0, len(row["tokens"]) :].tolist()


def compare(model, reference, transform, folder):
    """Logits of a conversation about two pictures, against ``transformers``."""
    content = [{"type": "image", "content": str(folder / f"{i}.png")} for i in (1, 4)]
    messages = [Message("user", [*content, {"type": "text", "content": "?"}]), Message("assistant", "r")]
    row = transform({"messages": messages})
    with torch.no_grad():
        expected = reference.eval()(**inputs_of_transformers(reference, row)).logits
        logits = model.eval()(torch.tensor([row["tokens"]]), encoder_input=row["encoder_input"])
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-3)


@every_family
def test_full_training_resumes_to_the_bit_and_transformers_reads_what_comes_out(folder):
    settings = {"epochs": 1, "save_every_n_steps": 2, "checkpointer__keep_last_n_checkpoints": 9}
    settings |= {"enable_activation_checkpointing": True}
    parts = {"vision_tower": "full"}
    full_run = run("full", folder, parts, **settings)
    assert len(full_run.losses) == 4
    resume("full_finetune_single_device", folder, full_run, 2, **full_settings("full", folder, parts, **settings))
    last = full_run.output_dir / "step_4"
    before = load_file(folder / "checkpoint" / "model.safetensors")
    after = load_file(last / "model.safetensors")
    unchanged = {name for name in before if torch.equal(before[name], after[name])}
    assert all(name.endswith(CONSTANTS) for name in unchanged), unchanged
    model, transform = torchtune.load(last, device="cpu", images=True)
    compare(model, AutoModelForImageTextToText.from_pretrained(last), transform, folder)
    preprocessor_config = (folder / "checkpoint" / "preprocessor_config.json").read_bytes()
    assert (last / "preprocessor_config.json").read_bytes() == preprocessor_config


@every_family
@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys did not match:RuntimeWarning")
def test_adapters_of_all_parts_are_those_of_peft(folder, base):
    parts = {"vision_tower": "lora", "projector": "lora"}
    if base.name.startswith("gemma4_unified_vl"):  # it has no tower
        with pytest.raises(torchtune.utils.UserError, match=r"vision_tower is 'lora', but .* none of its layers"):
            run("lora", folder, parts)
        parts["vision_tower"] = "frozen"
    done = run("lora", folder, parts, epochs=1)
    adapter = done.output_dir / "epoch_0" / "adapter"
    assert any(name.startswith("encoder.layers.") for name in done.trained) == (parts["vision_tower"] == "lora")
    assert any(name.startswith("encoder.projector.") for name in done.trained)
    assert any(".experts." in name for name in done.trained) == bool(done.recipe.model.description.num_experts)
    model, transform = torchtune.load(folder / "checkpoint", adapter=adapter, device="cpu", images=True)
    plain = AutoModelForImageTextToText.from_pretrained(folder / "checkpoint")
    reference = PeftModel.from_pretrained(plain, adapter)
    load_result = set_peft_model_state_dict(reference, load_file(adapter / "adapter_model.safetensors"))
    assert not load_result.unexpected_keys
    assert not [name for name in load_result.missing_keys if "lora_" in name]
    compare(model, reference, transform, folder)


PARTS = {"language_model": "model.language_model.", "projector": "model.visual.", "vision_tower": "model.visual."}


@pytest.mark.parametrize("part", PARTS)
def test_frozen_parts_stay_as_they_were(part, folder):
    parts = {**dict.fromkeys(PARTS, "frozen"), part: "full"}
    done = run("full", folder, parts, max_steps_per_epoch=1, epochs=1)
    before = load_file(folder / "checkpoint" / "model.safetensors")
    after = load_file(done.output_dir / "epoch_0" / "model.safetensors")
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    expected = set()
    for name in before:
        is_of_projector = "merger" in name  # its names begin as those of the tower
        if name.startswith(PARTS[part]) and is_of_projector == (part == "projector"):
            expected.add(name)
    assert changed == expected


@pytest.mark.parametrize(
    ("name", "processes"),
    [
        ("2B_lora_single_device", 1),
        ("32B_qlora_single_device", 1),
        ("4B_full_single_device", 1),
        ("8B_full", 2),
        ("32B_lora", 2),
    ],
)
def test_a_shipped_config_can_start(name, processes, folder):
    config = _recipe_registry.find_config(f"qwen3_vl/{name}")
    checkpoint = folder / "checkpoint"
    overrides = [f"checkpointer.checkpoint_dir={checkpoint}", f"tokenizer.path={checkpoint}", f"output_dir={folder}/o"]
    cfg = load_and_check(
        config,
        [*overrides, "device=cpu", "dtype=fp32"],
        load_recipe(_recipe_registry.recipe_of(config), folder).recipe_main,
    )
    assert find_problems(cfg, processes, thorough=True) == []


def test_text_under_a_frozen_decoder_is_refused_alone_and_trains_nothing_among_images(folder):
    parts = {"language_model": "frozen", "projector": "full"}
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "r"}]
    source = str(write_lines(folder / "text.jsonl", [{"image": None, "messages": turns}]))
    text = {**CHATS, "source": source}
    pictures = write_pictures(folder)["dataset"]
    for packed in (False, True):
        text_settings = {"dataset": {**text, "packed": packed}, "tokenizer__max_seq_len": 64}
        with pytest.raises(
            torchtune.utils.UserError, match=r"dataset: it has no images, .* train that \(language_model"
        ):
            run("full", folder, parts, train=False, **text_settings)
    done = run("full", folder, parts, dataset=[text, pictures], batch_size=1, epochs=1)
    assert len(done.losses) == 1 + 12


# What is cached -> the recipe and the parts of the model that it trains.
CACHED = {
    "tokens": ("lora", {}),  # the projector is frozen, too
    "input of the projector": ("full", {"projector": "full", "language_model": "frozen"}),
}


@pytest.fixture
def encoded():
    """The numbers of patches that towers encode."""
    patch_counts = []

    def note(module, inputs, output):
        if isinstance(module, torch.nn.ModuleList) or not hasattr(module, "attn") or module.attn.is_causal:
            return
        patch_counts.append(inputs[0].shape[1])

    hook = torch.nn.modules.module.register_module_forward_hook(note)
    yield patch_counts
    hook.remove()


@pytest.mark.parametrize(
    ("base", "kind"),
    [
        *(("qwen3_vl", kind) for kind in CACHED),
        *((name, "input of the projector") for name in ("qwen2_5_vl", "llama4_vl")),
        *((name, "tokens") for name in ("gemma4_vl", "smolvlm")),
    ],
    indirect=["base"],
)
def test_training_with_cached_features_is_training_without(kind, folder, encoded):
    kind, parts = CACHED[kind]
    settings = {"epochs": 2, "shuffle": False, "checkpointer__keep_last_n_checkpoints": 9, "save_every_n_steps": 3}
    settings |= {"dataset_val": write_pictures(folder)["dataset"], "run_val_every_n_steps": 4}
    plain = run(kind, folder, parts, **settings)
    encoded.clear()
    cached = {**settings, "image_cache": str(folder / "features")}
    cached_run = run(kind, folder, parts, **cached)
    num_encoded = len(encoded)  # in the first epoch: the second one reads the cache
    assert cached_run.losses == plain.losses
    assert [record.get("val_loss") for record in cached_run.records] == [
        record.get("val_loss") for record in plain.records
    ]
    assert all(torch.equal(value, cached_run.trained[name]) for name, value in plain.trained.items())
    files = sorted((folder / "features").rglob("*.safetensors"))
    assert len(files) == 12
    files[0].write_bytes(files[0].read_bytes()[:-1] + b"!")  # damaged: computed anew
    again = run(kind, folder, parts, **cached, resume_from_checkpoint=True, output_dir=resumed(cached_run, folder))
    # A product for the damaged image alone may round in another way than one for its whole batch.
    assert again.losses == pytest.approx({step: plain.losses[step] for step in range(4, 9)}, rel=1e-5)
    num_encoded_again = len(encoded) - num_encoded  # a single image
    assert num_encoded / 4 <= num_encoded_again < num_encoded
    encoded.clear()
    run(kind, folder, parts, **cached, seed=5)
    assert not encoded


def resumed(run, folder):
    """An output folder with the state after three steps."""
    output = folder / "resumed"
    shutil.copytree(run.output_dir / "step_3", output / "step_3")
    (output / "logs").mkdir()
    return output


WRONG = {
    "a trained tower": ({"model__vision_tower": "full", "image_cache": "f"}, "image_cache: the vision tower is train"),
    "a row too long": ({"tokenizer__max_seq_len": 12}, "row 0: max_seq_len=12 would cut"),
    "no place for images": (
        {"collate_fn": "torchtune.data.padded_collate_sft"},
        "padded_collate_sft does not take the images of the tokenizer",
    ),
    "adapters of a part": (
        {"model__vision_tower": "lora"},
        "vision_tower is 'lora': choose 'full' or 'frozen'",
    ),
    "nothing": ({"model__projector": "frozen", "model__language_model": "frozen"}, "nothing would be trained"),
}


@pytest.mark.parametrize("name", WRONG)
def test_settings_that_do_not_fit_images_are_refused_before_training(name, folder):
    settings, message = WRONG[name]
    with pytest.raises(torchtune.utils.UserError, match=message):
        run("full", folder, {}, **settings)


def num_letters(rows, texts):
    return [float(len(text)) for text in texts]


def test_answers_to_pictures_are_scored_in_validation(folder):
    """The questions of validation, as rows of a file, have the same score."""
    settings = full_settings("full", folder, {}, run_val_every_n_steps=2, save_every_n_steps=2)
    score = f"{__name__}.num_letters"
    settings |= {"dataset_val": settings["dataset"], "scores": [score], "scores_rows": 5, "scores_max_new_tokens": 12}
    run = start("full_finetune_single_device", folder, **settings)

    rows = []
    for row in read_lines(folder / "pictures.jsonl")[:5]:
        rows.append({"prompt": "<image>?", "image": str(folder / row["image"]), "answer": "r"})
    file = write_lines(folder / "questions.jsonl", rows)
    model, transform = torchtune.load(run.output_dir / "step_4", device="cpu", dtype="fp32", images=True)
    report = torchtune.evaluation.evaluate_answers(
        model,
        transform,
        torchtune.evaluation.read_eval_rows(file),
        torchtune.evaluation.make_scores([score]),
        source=file,
        folder=folder / "eval",
        max_new_tokens=12,
    )
    assert run.figure("val_num_letters")[-1] == report.mean("num_letters")[0]


@every_family
@pytest.mark.parametrize("use_cache", [True, False])
def test_a_question_about_a_picture_is_answered_as_by_transformers(use_cache, base, tmp_path):
    model, transform = torchtune.load(base / "checkpoint", device="cpu", images=True)
    Image.new("RGB", (30, 40), "red").save(tmp_path / "red.png")
    content = [{"type": "image", "content": str(tmp_path / "red.png")}, {"type": "text", "content": "What?"}]
    row = transform({"messages": [Message("user", content)]}, inference=True)
    reference = AutoModelForImageTextToText.from_pretrained(base / "checkpoint").eval()
    cache = "static" if reference.config.model_type == "gemma4_unified" else None  # see masks_of
    options = {"max_generated_tokens": 6, "temperature": 0.0, "use_cache": use_cache}
    with torch.no_grad():
        tokens = list(stream(model, torch.tensor(row["tokens"]), **options, **images_of_row(row, torch.device("cpu"))))
    assert tokens == answer_of_transformers(reference, row, cache_implementation=cache)


def test_every_way_of_asking_sees_the_picture(base, tmp_path, monkeypatch, tune):
    checkpoint = base / "checkpoint"
    common = "--device cpu --dtype fp32 --temperature 0 --max-new-tokens 6".split()
    reference = AutoModelForImageTextToText.from_pretrained(checkpoint).eval()
    model, transform = torchtune.load(checkpoint, device="cpu")
    assert isinstance(transform, torchtune.models.ImageTextTransform)
    expected = []
    questions = []
    rows = []
    for seed in range(2):
        file = str(tmp_path / f"{seed}.png")
        Image.frombytes("RGB", (30, 40), random.Random(seed).randbytes(3600)).save(file)
        content = [{"type": "image", "content": file}, {"type": "text", "content": "What?"}]
        questions.append([Message("user", content)])
        row = transform({"messages": questions[-1]}, inference=True)
        expected.append(transform.decode(answer_of_transformers(reference, row)))
        rows.append({"prompt": "What?", "image": file, "answer": expected[-1]})
    assert expected[0] != expected[1]

    assert torchtune.generate(model, transform, questions, max_new_tokens=6, temperature=0) == expected

    prompt = {"user": "What?", "image": rows[0]["image"]}
    recipe, cfg = recipe_of(base, prompt=prompt, temperature=0, max_new_tokens=6)
    assert recipe.generate(cfg) == expected[0]

    monkeypatch.setattr("sys.stdin", io.StringIO(f"What?\n/reset\n/image {rows[1]['image']}\nWhat?\n"))
    answers = tune("chat", "--model", checkpoint, "--image", rows[0]["image"], *common).out
    assert answers == "\n".join([*expected, ""])

    data = write_lines(tmp_path / "rows.jsonl", [*rows, {**rows[0], "answer": expected[1]}])
    evaluate = ("eval", checkpoint, "--data", data, "--output", tmp_path / "eval", *common)
    assert "0.667" in tune(*evaluate, "--score", "exact").out

    # Perplexity of the right answers.
    log_probs = []
    for row in rows:
        content = [{"type": "image", "content": row["image"]}, {"type": "text", "content": "What?"}]
        scored_row = transform({"messages": [Message("user", content), Message("assistant", row["answer"])]})
        with torch.no_grad():
            logits = reference(**inputs_of_transformers(reference, scored_row)).logits
        next_tokens = torch.tensor(scored_row["tokens"])[1:]
        is_answer = ~torch.tensor(scored_row["mask"], dtype=torch.bool)[1:]
        row_log_probs = logits[0, :-1].log_softmax(-1).gather(1, next_tokens[:, None])[:, 0]
        log_probs.append(row_log_probs[is_answer])
    write_lines(data, [{**row, "question": row["prompt"]} for row in rows])
    perplexity = (-torch.cat(log_probs).mean()).exp()
    assert f"  {perplexity:.4g}\n" in tune(*evaluate, "--perplexity").out


def test_data_are_shown_with_sizes_and_tokens_of_images(folder, tune):
    settings = write_pictures(folder, count=2)
    config = write_config("full_finetune_single_device", folder, folder / "output", **settings)
    num_tokens = instantiate(settings["tokenizer"]).processor.plan((20, 50)).tokens
    rows = [folder / "pictures.jsonl", "--tokenizer", folder / "checkpoint", f"image_dir={folder}"]
    for arguments in ([config], rows):
        out = tune("data", "show", *arguments, "--examples", 1).out
        assert f"images: 20x50 ({num_tokens} tokens)" in out
        assert out.count("<|image_pad|>") == 1


def test_compiled_and_recomputed_layers_of_text_and_tower_train_alike(folder, monkeypatch):
    from torch._dynamo.utils import counters

    monkeypatch.setenv("TORCH_COMPILE_BACKEND", "eager")
    counters.clear()
    # Every step has all rows: batches of other lengths would be compiled anew.
    parts = {"vision_tower": "full"}
    settings = {"batch_size": 12, "epochs": 2, "shuffle": False}
    plain = run("full", folder, parts, **settings)
    compiled = run("full", folder, parts, **settings, compile=True, enable_activation_checkpointing=True)
    assert compiled.losses == pytest.approx(plain.losses, rel=1e-5)
    assert counters["stats"]["unique_graphs"] >= 2  # layers of the text, and of the tower
