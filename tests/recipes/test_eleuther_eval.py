"""The recipe of the evaluation harness: numbers of its own model of transformers, and what is refused."""

import json

import pytest
import torch
import yaml

from tests import tiny_vision
from tests.recipes.runs import set_up_on
from tests.tiny import write_checkpoint, write_lines
from torchtune.config import instantiate
from torchtune.data import Message, padded_collate_tiled_images_and_mask
from torchtune.evaluation import EvaluationError, find_tasks
from torchtune.utils import UserError

pytest.importorskip("lm_eval", reason="the extra eval is not installed")
pytestmark = pytest.mark.filterwarnings("default")  # of the harness and what it imports
TASKS = ["tune_facts", "tune_arithmetic", "tune_texts"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("eleuther") / "checkpoint")


def run(checkpoint, folder, **settings):
    settings = {"tasks": TASKS, "limit": 8, "batch_size": 5, "max_seq_length": 96, **settings}
    recipe, cfg = set_up_on(checkpoint, "eleuther_eval", folder, **settings)
    return recipe.evaluate(cfg)


def reference(checkpoint, **settings):
    """The harness's own model."""
    import lm_eval
    from lm_eval.models.huggingface import HFLM

    model = HFLM(pretrained=str(checkpoint), device="cpu", dtype="float32", batch_size=1, max_length=96)
    return lm_eval.simple_evaluate(
        model, tasks=TASKS, task_manager=find_tasks(TASKS).manager, limit=8, bootstrap_iters=0, **settings
    )


@pytest.mark.parametrize("chat", [False, True])
def test_numbers_are_those_of_the_harness(checkpoint, tmp_path, chat):
    results = run(checkpoint, tmp_path, chat_template=chat, output_dir=str(tmp_path / "out"))
    wanted = reference(checkpoint, apply_chat_template=chat, log_samples=True)
    for task in TASKS:
        for name, value in wanted["results"][task].items():
            if isinstance(value, float) and "stderr" not in name:
                assert results[task][name] == pytest.approx(value, rel=1e-4), (task, name)
    saved = json.loads((tmp_path / "out" / "results.json").read_text())["results"]
    assert saved["tune_facts"]["acc,none"] == results["tune_facts"]["acc,none"]


def test_the_command_gives_the_numbers_of_the_recipe_and_keeps_answers(checkpoint, tmp_path, tune):
    options = "--tasks tune_facts --limit 8 --device cpu --dtype fp32 --output".split()
    out = tune("eval", checkpoint, *options, tmp_path).out
    (path,) = tmp_path.glob("*/results.json")
    results = json.loads(path.read_text())["results"]["tune_facts"]
    wanted = run(checkpoint, tmp_path, tasks=["tune_facts"])["tune_facts"]
    assert results["acc_norm,none"] == wanted["acc_norm,none"]
    assert f"tune_facts  8     acc_norm  {wanted['acc_norm,none']:.4g}" in out
    assert list(path.parent.glob("answers_*.db"))


def test_every_request_has_the_answer_of_the_harness(checkpoint):
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    import torchtune
    from torchtune.evaluation._harness_model import HarnessModel

    model = HarnessModel(*torchtune.load(checkpoint, device="cpu", dtype="fp32"), batch_size=3, max_length=24)
    reference = HFLM(pretrained=str(checkpoint), device="cpu", dtype="float32", batch_size=1, max_length=24)

    def requests(kind, *arguments):
        return [Instance(request_type=kind, doc={}, arguments=argument, idx=0) for argument in arguments]

    pairs = [("the cat", " sees"), ("the cat", " finds a dog"), ("", "red"), ("a ", "b"), ("big " * 30, "dog")]
    asked = requests("loglikelihood", *pairs)
    for score, reference_score in zip(model.loglikelihood(asked), reference.loglikelihood(asked), strict=True):
        assert score[0] == pytest.approx(reference_score[0], abs=1e-3)
        assert score[1] == reference_score[1]
    texts = requests("loglikelihood_rolling", ("why not the dog",), ("the cat sees a small bird " * 9,))
    assert model.loglikelihood_rolling(texts) == pytest.approx(reference.loglikelihood_rolling(texts), abs=1e-2)
    first = reference.generate_until(requests("generate_until", ("the cat", {"until": [], "max_gen_toks": 8})))[0]
    stop = first[len(first) // 2 :][:2]
    kinds = [
        {"until": [stop], "max_gen_toks": 8},
        {"until": ["e"], "max_gen_toks": 12},
        {"until": [], "max_gen_toks": 4},
    ]
    asked = requests("generate_until", *(("the cat", kind) for kind in kinds), ("red " * 30, kinds[1]))
    answers = model.generate_until(asked)
    assert answers == reference.generate_until(asked)
    assert stop not in answers[0]


def test_missing_tasks_and_folders_are_refused_by_name(checkpoint, tmp_path):
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


def write_tasks_with_images(folder, rows):
    """Tasks of these rows: seen (answers), seen_choice, which have images, and read_choice."""
    source = str(write_lines(folder / "rows.jsonl", rows))
    shared = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": source}}}
    shared |= {"test_split": "test", "doc_to_text": "<image>?", "doc_to_image": ["image"]}
    choices = {"output_type": "multiple_choice", "doc_to_choice": ["cat", "a dog"], "doc_to_target": "best"}
    answers = {"output_type": "generate_until", "doc_to_target": "answer", "metric_list": [{"metric": "exact_match"}]}
    answers["generation_kwargs"] = {"until": [], "max_gen_toks": 4}
    read = {**shared, **choices, "doc_to_text": "?"}
    del read["doc_to_image"]
    tasks = {"seen": {**shared, **answers}, "seen_choice": {**shared, **choices}, "read_choice": read}
    for name, task in tasks.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({"task": name, **task}))


def test_questions_with_images_have_the_answers_of_transformers(tmp_path):
    from lm_eval.api.instance import Instance
    from transformers import MllamaForConditionalGeneration

    from torchtune.evaluation._harness_model import HarnessModel

    checkpoint = tiny_vision.write_vision_checkpoint(tmp_path / "checkpoint")
    settings = tiny_vision.write_pictures(tmp_path, count=2)["tokenizer"]
    tokenizer = instantiate(settings)
    reference = MllamaForConditionalGeneration.from_pretrained(checkpoint).eval()
    reference.lm_head.weight.data[256:] = 0  # ids without a text are not answers
    reference.save_pretrained(checkpoint)

    def log_probs(image, answer):
        """Of the tokens after the question, and after each of the answer."""
        question = [Message("user", [{"type": "image", "content": image}, {"type": "text", "content": "?"}])]
        row = tokenizer({"messages": [*question, Message("assistant", "")]}, inference=True)
        batch = padded_collate_tiled_images_and_mask([row], pad_direction="left", pad_max_tiles=tiny_vision.TILES)
        batch["encoder_input"]["images"] = batch["encoder_input"]["images"].float()
        tokens = torch.cat([batch["tokens"], torch.tensor([answer], dtype=torch.int64)], dim=1)
        mask = batch["encoder_mask"]
        mask = torch.cat([mask, mask[:, -1:].expand(-1, len(answer), -1)], dim=1)
        with torch.no_grad():
            logits = tiny_vision.logits_of_transformers(reference, tokens, batch["encoder_input"], mask)
        return logits[0, -len(answer) - 1 :].log_softmax(-1)

    rows = []
    scores = {}
    for image in (str(tmp_path / "0.png"), str(tmp_path / "1.png")):
        answer = []
        for _ in range(4):
            answer.append(int(log_probs(image, answer)[-1].argmax()))
        for choice in ("cat", "a dog"):
            ids = tokenizer.encode(choice, add_bos=False, add_eos=False)
            scores[image, choice] = float(log_probs(image, ids)[range(len(ids)), ids].sum())
        best = int(scores[image, "cat"] < scores[image, "a dog"])
        rows.append({"image": image, "answer": tokenizer.decode(answer), "best": best})
    assert rows[0]["answer"] != rows[1]["answer"]
    write_tasks_with_images(tmp_path, rows)
    shared = {"include_path": str(tmp_path), "tasks": ["seen", "seen_choice", "read_choice"], "limit": None}
    results = run(checkpoint, tmp_path, tokenizer=settings, output_dir=str(tmp_path / "out"), **shared)
    assert results["seen"]["exact_match,none"] == results["seen_choice"]["acc,none"] == 1.0

    import torchtune

    model = HarnessModel(torchtune.load(checkpoint, device="cpu", dtype="fp32")[0], tokenizer)
    asked = [("?", " cat"), *((("<image>?", f" {choice}", {"visual": [image]})) for image, choice in scores)]
    requests = [Instance(request_type="loglikelihood", doc={}, arguments=arguments, idx=0) for arguments in asked]
    ids = tokenizer.encode("? cat", add_bos=True, add_eos=False)
    with torch.no_grad():
        text_log_probs = reference(input_ids=torch.tensor([ids])).logits[0, 1:-1].log_softmax(-1)
    wanted = [float(text_log_probs[range(4), ids[2:]].sum()), *scores.values()]
    assert [score for score, _ in model.loglikelihood(requests)] == pytest.approx(wanted, abs=1e-3)

    with pytest.raises(UserError, match="tiles of 42 pixels"):
        run(checkpoint, tmp_path, tokenizer={**settings, "tile_size": 42}, **shared)
    with pytest.raises(EvaluationError, match=r"tasks: seen has images, but the tokenizer, a .* reads text only: take"):
        run(checkpoint, tmp_path, **shared)
    with pytest.raises(EvaluationError, match="of which none can be cut, and there is room for 6"):
        run(checkpoint, tmp_path, tokenizer=settings, **{**shared, "max_seq_length": 10})
    (tmp_path / "seen.yaml").write_text((tmp_path / "seen.yaml").read_text().replace("<image>", "x"))
    with pytest.raises(
        EvaluationError, match=r"a turn has 0 '<image>' but 1 image\(s\): doc_to_text has <image> once for"
    ):
        run(checkpoint, tmp_path, tokenizer=settings, **{**shared, "tasks": ["seen"]})
    with pytest.raises(EvaluationError, match=r"chat_template: is for text alone"):
        run(checkpoint, tmp_path, tokenizer=settings, chat_template=True, **shared)


def test_a_model_of_text_is_not_asked_about_images(checkpoint, tmp_path):
    write_tasks_with_images(tmp_path, [{"image": "a.png", "answer": "a", "best": 0}])
    with pytest.raises(EvaluationError, match="tasks: seen has images, but a TransformerDecoder reads text only: name"):
        run(checkpoint, tmp_path, include_path=str(tmp_path), tasks=["read_choice", "seen"])
