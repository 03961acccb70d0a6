"""Answers are scored in each validation, as tune eval scores them, and training does not notice it."""

import json
import math

import pytest
import torch

from tests.recipes.runs import run_main, start
from tests.tiny import write_lines
from torchtune.config import ConfigError
from torchtune.evaluation import EvaluationError, evaluate_answers, make_scores, read_eval_rows
from torchtune.reports import RunFolder
from torchtune.supervision import BestValidation

NAME = "full_finetune_single_device"
MINE = "tests.recipes.test_scores"
WORDS = ("red", "blue", "one", "two", "cat", "dog")


def num_letters(rows, texts):
    """The length of each answer: a number that is seldom the same for other weights."""
    torch.rand(3)  # a score may draw random numbers
    return [float(len(text)) for text in texts]


def divides(rows, texts):
    """A score that always fails."""
    return [1 / 0 for _ in texts]


@pytest.fixture
def questions(tmp_path):
    """A file of questions whose answers are JSON objects."""
    rows = []
    for number, word in enumerate(WORDS):
        answer = json.dumps({"count": number % 2, "what": word})
        user = {"role": "user", "content": f"{word} {word} as JSON"}
        rows.append({"messages": [user, {"role": "assistant", "content": answer}]})
    return write_lines(tmp_path / "questions.jsonl", rows)


def settings_of(file, **settings):
    dataset = {
        "_component_": "torchtune.datasets.chat_dataset",
        "conversation_column": "messages",
        "conversation_style": "openai",
        "source": "json",
        "data_files": str(file),
    }
    return {
        "dataset": dataset,
        "dataset_val": dataset,
        "run_val_every_n_steps": 1,
        "save_every_n_steps": 1,
        "checkpointer__keep_last_n_checkpoints": 20,
        "scores": ["json", f"{MINE}.num_letters"],
        "scores_rows": 4,
        "scores_max_new_tokens": 12,
        **settings,
    }


def score_checkpoint(folder, file, tmp_path, **columns):
    """The means of ``tune eval`` for a saved checkpoint."""
    import torchtune

    model, tokenizer = torchtune.load(folder, device="cpu", dtype="fp32")
    rows = read_eval_rows(file, **columns, limit=4)
    report = evaluate_answers(
        model,
        tokenizer,
        rows,
        make_scores(["json", f"{MINE}.num_letters"]),
        source=file,
        folder=tmp_path / "eval",
        max_new_tokens=12,
    )
    return {f"val_{name}": report.mean(name)[0] for name in report.scores}


def validations(run, *names):
    """Step -> metric -> value of each validation."""
    values_by_step = {}
    for record in run.records:
        if "val_loss" in record:
            values_by_step[record["step"]] = {name: record[name] for name in names}
    return values_by_step


def test_scores_are_those_of_the_saved_checkpoint(tmp_path, questions):
    run = start(NAME, tmp_path, **settings_of(questions, epochs=4, optimizer__lr=0.03))
    measured = validations(run, "val_json", "val_num_letters")
    assert len(measured) == 12
    assert len({values["val_num_letters"] for values in measured.values()}) > 1, "it changes while the model learns"
    for step in (4, 11):
        assert measured[step] == score_checkpoint(run.output_dir / f"step_{step}", questions, tmp_path)


def test_training_does_not_notice_scores(tmp_path, questions):
    """Dropout draws numbers in each step, so that another random state would show."""
    lora = {"_component_": "torchtune.modules.peft.LoRA", "rank": 4, "alpha": 8, "dropout": 0.5}
    settings = settings_of(questions, shuffle=True, optimizer__lr=0.01, model_converters=[lora])
    scored = start("lora_finetune_single_device", tmp_path, **settings)
    plain = start("lora_finetune_single_device", tmp_path, **{**settings, "scores": []})
    assert scored.losses == plain.losses
    assert validations(scored, "val_loss") == validations(plain, "val_loss")
    for name, parameter in scored.trained.items():
        assert torch.equal(parameter, plain.trained[name])
    logged = set().union(*plain.records)  # names of all values
    assert not any(name.startswith("val_json") for name in logged)


def test_best_checkpoint_and_curves_follow_a_score(tmp_path, questions):
    settings = settings_of(questions, keep_best="max:val_num_letters", early_stopping_patience=50)
    code, output_dir = run_main(NAME, tmp_path, **settings)
    assert code == 0
    run = RunFolder(output_dir)
    curve = dict(run.curve("val_num_letters"))
    assert run.best["value"] == max(curve.values())
    assert curve[run.best["step"]] == run.best["value"]
    assert "val_num_letters" in (output_dir / "report.html").read_text()


def test_failing_score_warns_once_and_the_others_go_on(tmp_path, questions, caplog):
    names = [f"{MINE}.divides", "json"]
    run = start(NAME, tmp_path, **settings_of(questions, scores=names, keep_best="max:val_divides", log_level="INFO"))
    measured = validations(run, "val_json")
    assert len(measured) == 3
    assert all(math.isfinite(values["val_json"]) for values in measured.values())
    assert caplog.text.count("scores: 'divides' failed (RolloutError: score: 'divides' fails for") == 1


def test_score_that_could_not_be_measured_is_no_validation_without_improvement(tmp_path):
    best = BestValidation(tmp_path, "max:val_json", patience=2)
    for step in range(4):
        assert not best.update(step, {"val_loss": 1.0, "val_json": math.nan})
    assert not best.should_stop
    assert best.update(4, {"val_loss": 1.0, "val_json": 0.5})
    assert not best.update(5, {"val_loss": 1.0, "val_json": math.nan})
    assert not best.should_stop


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"run_val_every_n_steps": None, "dataset_val": None}, "scores: are measured during validation: set run_val"),
        ({"keep_best": "val_json"}, "keep_best: would keep the lowest score: set max:val_json"),
        ({"keep_best": "val_num_letters"}, "keep_best: would keep the lowest score: set max:val_num_letters"),
        ({"keep_best": "max:val_jsn"}, "keep_best: validation has no val_jsn; did you mean 'val_json'?"),
        ({"keep_best": "max:val_number"}, r"keep_best: names val_number, .*: set scores=\[number\]"),
    ],
)
def test_settings_that_do_not_fit_are_refused(tmp_path, questions, settings, message):
    with pytest.raises(ConfigError, match=message):
        start(NAME, tmp_path, **settings_of(questions, **settings), train=False)


def test_unknown_score_is_refused_before_the_run_with_the_nearest_name(tmp_path, questions):
    from torchtune.estimate import find_problems

    (problem,) = find_problems({"scores": ["jsn"]})
    assert problem == "scores: there is no score 'jsn'; did you mean 'json'?"
    with pytest.raises(EvaluationError, match="scores: there is no score 'jsn'; did you mean 'json'"):
        start(NAME, tmp_path, **settings_of(questions, scores=["jsn"]), train=False)


def test_rows_without_a_readable_answer_are_refused_by_line(tmp_path, questions):
    texts = write_lines(
        tmp_path / "texts.jsonl",
        [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "no object"}]}],
    )
    settings = settings_of(questions)
    settings["dataset_val"] = {**settings["dataset"], "data_files": str(texts)}
    with pytest.raises(EvaluationError, match=r"dataset_val, line 1: score 'json': .*'answer' is not a JSON object"):
        start(NAME, tmp_path, **settings, train=False)
    plain = {"_component_": "torchtune.datasets.text_completion_dataset", "source": "json", "column": "text"}
    plain["data_files"] = str(write_lines(tmp_path / "plain.jsonl", [{"text": "the cat sees the dog"}]))
    settings["dataset_val"] = plain
    with pytest.raises(
        EvaluationError, match=r"the rows of dataset_val \(TextCompletionDataset\) are not conversations or questions"
    ):
        start(NAME, tmp_path, **settings, train=False)


def test_adapters_are_scored_as_the_merged_model(tmp_path, questions):
    run = start("lora_finetune_single_device", tmp_path, **settings_of(questions, epochs=2, optimizer__lr=0.03))
    last = validations(run, "val_json", "val_num_letters")[6]
    assert last == score_checkpoint(run.output_dir / "step_6", questions, tmp_path)


def test_adapters_of_a_quantized_base_are_scored_as_the_merged_model(tmp_path, questions):
    """Merged weights are those that the quantized base and the adapter compute with."""
    converters = [
        {"_component_": "torchtune.modules.low_precision.QuantizeBase", "block_size": 8},
        {"_component_": "torchtune.modules.peft.LoRA", "rank": 4, "alpha": 8},
    ]
    settings = settings_of(questions, model_converters=converters, optimizer__lr=0.03)
    run = start("lora_finetune_single_device", tmp_path, **settings)
    measured = validations(run, "val_json", "val_num_letters")[3]
    assert measured == score_checkpoint(run.output_dir / "step_3", questions, tmp_path)


def test_prompts_of_pairs_are_answered(tmp_path):
    """The chosen answer is the right one."""
    rows = []
    for word in WORDS:
        question = {"role": "user", "content": f"{word} as JSON"}
        answers = [json.dumps({"what": what}) for what in (word, "bird")]
        pair = [[question, {"role": "assistant", "content": answer}] for answer in answers]
        rows.append(dict(zip(("chosen", "rejected"), pair, strict=True)))
    file = write_lines(tmp_path / "pairs.jsonl", rows)
    dataset = {"_component_": "torchtune.datasets.preference_dataset", "source": "json", "data_files": str(file)}
    settings = settings_of(file, dataset=dataset, dataset_val=dataset, optimizer__lr=0.03)
    run = start("dpo", tmp_path, **settings)
    assert validations(run, "val_json", "val_num_letters")[3] == score_checkpoint(
        run.output_dir / "step_3", file, tmp_path, prompt="chosen"
    )


def test_student_is_scored_in_distillation(tmp_path, questions):
    run = start("knowledge_distillation", tmp_path, **settings_of(questions, optimizer__lr=0.03))
    last = validations(run, "val_json", "val_num_letters")[3]
    assert last == score_checkpoint(run.output_dir / "step_3", questions, tmp_path)


@pytest.mark.parametrize("name", ["full_finetune_distributed", "lora_finetune_distributed"])
def test_two_ranks_have_the_scores_of_one(name, tmp_path, questions, forker):
    """Both ranks answer all rows together, so that the answers depend on the weights alone."""
    settings = settings_of(questions, batch_size=1, optimizer__lr=0.03)
    run = forker.run_on_two(name, tmp_path, **settings)
    measured = validations(run, "val_json", "val_num_letters")
    assert measured[3] == score_checkpoint(run.output_dir / "step_3", questions, tmp_path)
    assert "failed" not in run.said
