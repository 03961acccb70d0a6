"""What the recipes of distillation have of their own: a teacher, two losses, two vocabularies."""

import pytest
import torch
from torch.nn import functional as F

from tests.recipes import checks
from tests.recipes.runs import load_recipe, start, write_config
from tests.tiny import write_checkpoint
from torchtune import rlhf
from torchtune.data import CROSS_ENTROPY_IGNORE_IDX
from torchtune.reports import RunFolder, judge
from torchtune.utils import UserError

ONE = "knowledge_distillation_single_device"
MANY = "knowledge_distillation_distributed"
LOSSES = "torchtune.modules.loss."


def plain_model(folder):
    """A model of ``transformers``."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def labeled_logits(model, row):
    """The logits of the labels of a row, and the labels: ``[labels, vocabulary]`` and ``[labels]``."""
    tokens = torch.as_tensor(row["tokens"])
    labels = torch.as_tensor(row["labels"])
    is_labeled = labels != CROSS_ENTROPY_IGNORE_IDX
    with torch.no_grad():
        logits = model(tokens[None]).logits[0]
    return logits[is_labeled], labels[is_labeled]


def plain_losses(run, folder, rows):
    """Cross entropy, and KL(teacher‖student) without the teacher's entropy, of two plain models."""
    student = plain_model(folder / "checkpoint")
    teacher = plain_model(folder / "teacher")
    entropies = []
    divergences = []
    for index in range(rows):
        row = run.recipe.loader.dataset[index]
        student_logits, labels = labeled_logits(student, row)
        teacher_logits, _ = labeled_logits(teacher, row)
        teacher_logits = teacher_logits[:, : student_logits.shape[1]]  # the teacher's embedding is padded
        entropies.append(F.cross_entropy(student_logits, labels, reduction="none"))
        divergences.append(-(teacher_logits.softmax(-1) * student_logits.log_softmax(-1)).sum(-1))
    return torch.cat(entropies).mean().item(), torch.cat(divergences).mean().item()


def plain_predictions(run, folder, rows):
    """Share of labels that are the likeliest token, and mean entropy of the predictions, of the plain student."""
    student = plain_model(folder / "checkpoint")
    are_likeliest = []
    entropies = []
    for index in range(rows):
        logits, labels = labeled_logits(student, run.recipe.loader.dataset[index])
        are_likeliest.append(logits.argmax(-1) == labels)
        entropies.append(torch.distributions.Categorical(logits=logits).entropy())
    accuracy = torch.cat(are_likeliest).float().mean().item()
    return {"token_accuracy": accuracy, "entropy": torch.cat(entropies).mean().item()}


def test_the_losses_are_those_of_two_plain_models(tmp_path):
    settings = {"batch_size": 3, "gradient_accumulation_steps": 2, "kd_ratio": 0.3, "shuffle": False}
    run = start(ONE, tmp_path, **settings, max_steps_per_epoch=1)
    entropy, divergence = plain_losses(run, tmp_path, rows=6)
    expected = {"class_loss": entropy, "kd_loss": divergence, "loss": 0.7 * entropy + 0.3 * divergence}
    expected |= plain_predictions(run, tmp_path, rows=6)
    assert {name: run.figure(name)[0] for name in expected} == pytest.approx(expected, abs=1e-5)


def test_the_teacher_stays_as_it_is(tmp_path):
    run = start(ONE, tmp_path, batch_size=6, checkpointer__keep_last_n_checkpoints=1)
    teacher = run.recipe.teacher.model
    assert not any(p.requires_grad for p in teacher.parameters()), "no parameter of the teacher takes a gradient"
    assert not any(module.training for module in teacher.modules()), "the teacher is in evaluation mode"
    assert run.losses[4] < run.losses[1] - 0.1, "the student learns"


def test_accumulation_and_packing_change_nothing(tmp_path):
    checks.accumulation_changes_nothing(ONE, tmp_path)
    checks.packing_changes_nothing(ONE, tmp_path)
    many = {"kd_loss__num_output_chunks": 64, "enable_activation_checkpointing": True}
    checks.split_changes_nothing(ONE, tmp_path, {"batch_size": 4}, {"batch_size": 4, **many})


KD = {"_component_": f"{LOSSES}ForwardKLWithChunkedOutputLoss", "top_k": 8, "with_entropy": True}


def test_a_cache_of_the_teacher_changes_nothing_and_needs_no_teacher(tmp_path, monkeypatch):
    """Bit for bit, of rows and of packs; a second run reads it. The vocabularies differ: the teacher's is padded."""
    settings = {"kd_loss": KD, "shuffle": False, "batch_size": 6, "max_steps_per_epoch": 3, "dataset_val": "${dataset}"}
    settings |= {"run_val_every_n_steps": 3, "epochs": 2}
    live = start(ONE, tmp_path, **settings)
    assert live.figure("kd_loss")[0] > 0.1
    for collate in ("collate_documents", "padded_collate_sft"):
        cache_settings = {"teacher_cache": str(tmp_path / "kept"), "collate_fn": f"torchtune.data.{collate}"}
        once = start(ONE, tmp_path, **settings, **cache_settings)
        if collate == "collate_documents":
            assert once.losses == live.losses
            assert once.figure("val_kd_loss") == live.figure("val_kd_loss")
            assert all(torch.equal(value, once.trained[key]) for key, value in live.trained.items())
            # The second run reads the cache alone.
            monkeypatch.setattr(rlhf, "load_teacher", lambda *_, **__: pytest.fail("the teacher is loaded"))
        else:
            assert once.losses == pytest.approx(live.losses, abs=1e-5)


def test_a_stale_cache_is_refused_by_what_changed(tmp_path):
    settings = {"kd_loss": KD, "teacher_cache": str(tmp_path / "kept"), "max_steps_per_epoch": 1, "train": False}
    start(ONE, tmp_path, **settings)
    cached_files = {path.name: path.stat().st_size for path in (tmp_path / "kept" / "train").iterdir()}
    assert sorted(cached_files) == ["log_probs.float32", "rows.npz", "teacher.json", "tokens.int32"]
    for change, words in (
        ({"kd_loss": {**KD, "top_k": 4}}, r"differs in kd_loss.top_k \(was 8, is 4\)"),
        ({"kd_loss": {**KD, "temperature": 2.0}}, r"differs in kd_loss.temperature \(was 1.0, is 2.0\)"),
        ({"dataset__masking_strategy": "train_on_all"}, "differs in data"),
        ({"kd_loss": {**KD, "top_k": None}}, "set kd_loss.top_k"),
        ({"kd_loss": {**KD, "top_k": 5000}}, "top_k is 5000: it must be below"),
        ({"kd_loss": {**KD, "top_k": 5000}, "teacher_cache": None}, "top_k is 5000: it must be below"),
    ):
        with pytest.raises(UserError, match=words):
            start(ONE, tmp_path, **{**settings, **change})

    def flip_bits(content):
        return bytes(byte ^ 1 for byte in content)

    def cut(content):
        return content[: len(content) // 2]

    for name, damage, words in (
        ("log_probs.float32", flip_bits, r"what is kept of row \d+ is damaged"),
        ("tokens.int32", cut, "its files are too short"),
        ("rows.npz", cut, "rows.npz: it cannot be read"),
    ):
        path = tmp_path / "kept" / "train" / name
        before = path.read_bytes()
        path.write_bytes(damage(before))
        with pytest.raises(UserError, match=words):
            start(ONE, tmp_path, **{**settings, "train": True})
        path.write_bytes(before)
    write_checkpoint(tmp_path / "teacher", seed=2, width=48, vocab_size=384, tied=False)
    with pytest.raises(UserError, match="differs in teacher: set it to a new folder"):
        start(ONE, tmp_path, **settings)


def test_resume_equals_uninterrupted(tmp_path):
    checks.resume_equals_uninterrupted(ONE, tmp_path, dtype="fp32")


def test_a_resume_with_another_teacher_is_refused(tmp_path):
    settings = {"batch_size": 12, "epochs": 2, "save_every_n_steps": 2, "max_steps_per_epoch": 2}
    run = start(ONE, tmp_path, **settings)
    (run.output_dir / "step_4" / ".complete").unlink()
    write_checkpoint(tmp_path / "teacher", seed=2, width=48, vocab_size=384, tied=False)
    with pytest.raises(UserError, match=r"whose 'teacher' model was .* and the weights in .* differ from it"):
        start(ONE, tmp_path, **settings, output_dir=run.output_dir, resume_from_checkpoint=True)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"teacher_cache": "/dev/null/x", "kd_loss": KD}, "teacher_cache: /dev/null/x/train cannot be written to"),
        (
            {"kd_loss": {"_component_": f"{LOSSES}LinearCrossEntropyLoss"}},
            "LinearCrossEntropyLoss does not compare two",
        ),
        ({"kd_loss__ignore_index": -1}, "kd_loss: it ignores the label -1"),
        ("another tokenizer", r"token \d+ is .*teacher/tokenizer.json.* models are compared by token ids"),
        ("a reward model", r"a teacher predicts tokens, and this one ends in 1 output"),
        ("fewer tokens", r"teacher_model: it knows 300 tokens and the tokenizer has"),
    ],
)
def test_unsuitable_teachers_are_refused_in_one_sentence(change, words, tmp_path):
    settings = {}
    if isinstance(change, dict):
        settings = change
    elif change == "fewer tokens":
        write_checkpoint(tmp_path / "teacher", vocab_size=300)
    elif change == "a reward model":
        write_checkpoint(tmp_path / "teacher", is_reward=True)
    elif change == "another tokenizer":
        tokenizer = write_checkpoint(tmp_path / "teacher") / "tokenizer.json"
        text = tokenizer.read_text()
        assert text.count('"cat":') == 1
        tokenizer.write_text(text.replace('"cat":', '"tac":'))
    with pytest.raises(UserError, match=words):
        start(ONE, tmp_path, train=False, **settings)


def test_a_dry_run_counts_the_teacher_and_looks_for_its_weights(tmp_path):
    from torchtune.config import load_and_check
    from torchtune.estimate import estimate_run, plan_run
    from torchtune.estimate._check_run import find_problems

    run = start(ONE, tmp_path, train=False)
    main = load_recipe(ONE, tmp_path).recipe_main
    cfg = load_and_check(write_config(ONE, tmp_path, tmp_path / "new"), [], main)
    assert "\nteacher     torchtune.models." in plan_run(cfg)
    num_parameters = 0
    for model in (run.recipe.model, run.recipe.teacher.model):
        num_parameters += sum(parameter.numel() for parameter in model.parameters())
    assert estimate_run(main, cfg).peaks["set-up"].components["parameters"] >= 4 * num_parameters
    assert run.recipe.teacher.model.tok_embeddings.weight.shape[0] == 384
    assert not find_problems(cfg, 1, thorough=True)
    for file in (tmp_path / "teacher").glob("*.safetensors"):
        file.unlink()
    (problem,) = find_problems(cfg, 1, thorough=True)
    assert str(tmp_path / "teacher") in problem


def test_all_weights_of_a_student_learn_and_are_saved(tmp_path):
    run = start("knowledge_distillation", tmp_path, max_steps_per_epoch=6)
    assert run.figure("kd_loss")[-1] < run.figure("kd_loss")[0]
    assert not list(run.output_dir.glob("epoch_0/adapter*"))
    before = start("knowledge_distillation", tmp_path, train=False).trained
    assert all(not torch.equal(value, before[name]) for name, value in run.trained.items())


def test_two_processes_train_as_one_however_they_share_the_work(forker, tmp_path):
    settings = {"clip_grad_norm": 1.0, "shuffle": False, "max_steps_per_epoch": 2, "kd_loss": KD}
    full_batch = start(ONE, tmp_path, **settings, batch_size=6)
    for split in ("data_parallel_shard_dim", "tensor_parallel_dim", "context_parallel_dim"):
        batch_size = 6  # of a process: only data parallelism divides the batch of a step
        if split == "data_parallel_shard_dim":
            batch_size = 3
        if split != "tensor_parallel_dim":
            settings["teacher_cache"] = str(tmp_path / f"kept_{split}")
        run = forker.run_on_two(MANY, tmp_path, **settings, **{split: 2, "batch_size": batch_size})
        assert run.losses == pytest.approx(full_batch.losses, rel=1e-5), split
        for figure in ("class_loss", "kd_loss", "grad_norm"):
            assert run.figure(figure) == pytest.approx(full_batch.figure(figure), rel=1e-4), (split, figure)
        assert judge(RunFolder(run.output_dir)).interval.pairs == 2, split  # rows that a forked run measures
