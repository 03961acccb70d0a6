"""The recipe of the evaluation harness: numbers of its own model of transformers, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.recipes.runs import class_of, load_recipe
from tests.tiny import write_checkpoint
from torchtune.config import load_and_check
from torchtune.evaluation import EvaluationError, find_tasks

pytest.importorskip("lm_eval", reason="the extra eval is not installed")
pytestmark = pytest.mark.filterwarnings("default")  # of the harness and what it imports
TASKS = ["tune_facts", "tune_arithmetic", "tune_texts"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("eleuther") / "checkpoint")


def run(checkpoint: Path, folder: Path, **settings: Any) -> dict[str, Any]:
    cfg = {
        "checkpointer": {
            "_component_": "torchtune.training.FullModelHFCheckpointer",
            "checkpoint_dir": str(checkpoint),
        },
        "tasks": TASKS,
        "limit": 8,
        "batch_size": 5,
        "max_seq_length": 96,
        "device": "cpu",
        "dtype": "fp32",
        "log_level": "ERROR",
        **settings,
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(cfg))
    module = load_recipe("eleuther_eval", folder)
    cfg = load_and_check(path, [], module.recipe_main)
    recipe = class_of(module)(cfg)
    recipe.setup(cfg)
    return recipe.evaluate(cfg)


def reference(checkpoint: Path, **settings: Any) -> dict[str, Any]:
    """The harness's own model."""
    import lm_eval
    from lm_eval.models.huggingface import HFLM

    model = HFLM(pretrained=str(checkpoint), device="cpu", dtype="float32", batch_size=1, max_length=96)
    return lm_eval.simple_evaluate(
        model, tasks=TASKS, task_manager=find_tasks(TASKS).manager, limit=8, bootstrap_iters=0, **settings
    )


@pytest.mark.parametrize("chat", [False, True])
def test_numbers_are_those_of_the_harness(checkpoint: Path, tmp_path: Path, chat: bool) -> None:
    found = run(checkpoint, tmp_path, chat_template=chat, output_dir=str(tmp_path / "out"))
    wanted = reference(checkpoint, apply_chat_template=chat, log_samples=True)
    for task in TASKS:
        for name, value in wanted["results"][task].items():
            if isinstance(value, float) and "stderr" not in name:
                assert found[task][name] == pytest.approx(value, rel=1e-4), (task, name)
    kept = json.loads((tmp_path / "out" / "results.json").read_text())["results"]
    assert kept["tune_facts"]["acc,none"] == found["tune_facts"]["acc,none"]


def test_the_command_gives_the_numbers_of_the_recipe_and_keeps_answers(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from torchtune._cli.tune import main

    command = ["tune", "eval", str(checkpoint), "--tasks", "tune_facts", "--limit", "8", "--device", "cpu"]
    monkeypatch.setattr("sys.argv", [*command, "--dtype", "fp32", "--output", str(tmp_path)])
    main()
    (path,) = tmp_path.glob("*/results.json")
    found = json.loads(path.read_text())["results"]["tune_facts"]
    wanted = run(checkpoint, tmp_path, tasks=["tune_facts"])["tune_facts"]
    assert found["acc_norm,none"] == wanted["acc_norm,none"]
    assert f"tune_facts  8     acc_norm  {wanted['acc_norm,none']:.4g}" in capsys.readouterr().out
    assert list(path.parent.glob("answers_*.db"))


def test_every_request_has_the_answer_of_the_harness(checkpoint: Path) -> None:
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    import torchtune
    from torchtune.evaluation._harness_model import HarnessModel

    ours = HarnessModel(*torchtune.load(checkpoint, device="cpu", dtype="fp32"), batch_size=3, max_length=24)
    theirs = HFLM(pretrained=str(checkpoint), device="cpu", dtype="float32", batch_size=1, max_length=24)

    def requests(kind: str, *arguments: tuple[Any, ...]) -> list[Instance]:
        return [Instance(request_type=kind, doc={}, arguments=each, idx=0) for each in arguments]

    pairs = [("the cat", " sees"), ("the cat", " finds a dog"), ("", "red"), ("a ", "b"), ("big " * 30, "dog")]
    asked = requests("loglikelihood", *pairs)
    for one, other in zip(ours.loglikelihood(asked), theirs.loglikelihood(asked), strict=True):
        assert one[0] == pytest.approx(other[0], abs=1e-3)
        assert one[1] == other[1]
    texts = requests("loglikelihood_rolling", ("why not the dog",), ("the cat sees a small bird " * 9,))
    assert ours.loglikelihood_rolling(texts) == pytest.approx(theirs.loglikelihood_rolling(texts), abs=1e-2)
    first = theirs.generate_until(requests("generate_until", ("the cat", {"until": [], "max_gen_toks": 8})))[0]
    stop = first[len(first) // 2 :][:2]
    kinds = [
        {"until": [stop], "max_gen_toks": 8},
        {"until": ["e"], "max_gen_toks": 12},
        {"until": [], "max_gen_toks": 4},
    ]
    asked = requests("generate_until", *(("the cat", kind) for kind in kinds), ("red " * 30, kinds[1]))
    found = ours.generate_until(asked)
    assert found == theirs.generate_until(asked)
    assert stop not in found[0]


def test_what_is_asked_for_and_not_there(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(EvaluationError, match="there is no task 'tune_fact'; did you mean 'tune_facts'"):
        run(checkpoint, tmp_path, tasks=["tune_fact"])
    with pytest.raises(EvaluationError, match="include_path: there is no folder"):
        run(checkpoint, tmp_path, include_path=str(tmp_path / "none"))
    with pytest.raises(EvaluationError, match="max_seq_length is 9999 and the model's context 4096"):
        run(checkpoint, tmp_path, max_seq_length=9999)
    with pytest.raises(EvaluationError, match="no task is named"):
        find_tasks([])
    settings = {"task": "mine", "dataset_path": "json", "dataset_kwargs": {"data_files": str(tmp_path / "none.jsonl")}}
    settings |= {"test_split": "test", "output_type": "multiple_choice", "doc_to_text": "a", "doc_to_target": 0}
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "mine.yaml").write_text(yaml.safe_dump({**settings, "doc_to_choice": ["a", "b"]}))
    with pytest.raises(EvaluationError, match=r"mine: the data cannot be loaded \(Unable to find '.*none.jsonl'\)"):
        run(checkpoint, tmp_path, tasks=["mine"], include_path=str(tmp_path / "tasks"))
