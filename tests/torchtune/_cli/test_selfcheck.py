"""``tune selfcheck`` passes a sound run, and every check of it fails for the fault that it is for."""

import pytest

from tests.recipes.runs import RECIPES, write_config
from tests.tiny_images import CONFIGS, image_text_model, write_image_checkpoint, write_pictures
from torchtune._cli._selfchecks import NotChecked, _Checks, selfcheck
from torchtune._recipe_registry import RecipeTarget
from torchtune.data import collate_documents
from torchtune.modules.loss import LinearCrossEntropyLoss
from torchtune.tokenizers import HuggingFaceModelTokenizer
from torchtune.utils import UserError

pytestmark = pytest.mark.usefixtures("imported_aside")
LORA = "lora_finetune_single_device"
DIVISION = "loss = self.compute_loss(batch) / (step.num_terms or 1)"
SAVE = "        self.checkpointer.save(\n"
BATCHES = "                for batch in step.batches:\n"
STATE = "            self.checkpointer.resume(self.resume_point, self.model, state)\n"
OPEN = "        self.resume_point = self.checkpointer.open_output_dir(cfg, resume=resume)\n"
# Faults of copied recipes: old text -> new text.
FAULTS = {
    "gradients summed over micro-batches": {"scale(loss).backward()": "scale(loss * len(step.batches)).backward()"},
    "mean of the means of micro-batches": {
        DIVISION: "loss = self.compute_loss(batch) / batch.num_labels / len(step.batches)"
    },
    "optimizer without its state": {STATE: f"{STATE}            self.optimizer.state.clear()\n"},
    "resume that begins anew": {OPEN: f"{OPEN}        self.resume_point = None\n"},
    "a term beside the loss": {
        "            return total\n": "            return total + 0.01 * hidden.square().mean() * batch.num_labels\n"
    },
    "another model saved than trained": {
        SAVE: f"        self.model.norm.scale.data.mul_(1.5)\n{SAVE}",
        BATCHES: f"                self.model.norm.scale.data.div_(1.5 if self.global_step else 1)\n{BATCHES}",
    },
}


def leaky_collate(batch):
    """Collate packs as if each were one document."""
    for pack in batch:
        if isinstance(pack, list):
            first, *later_documents = pack
            for key in first:
                values = first[key].tolist()
                for document in later_documents:
                    values += document[key].tolist()
                first[key] = first[key].new_tensor(values)
            pack[:] = [first]
    return collate_documents(batch)


class _Masked(HuggingFaceModelTokenizer):
    """Tokenizer that changes the mask of a conversation."""

    def tokenize_messages(self, *args, **kwargs):
        tokens, mask = super().tokenize_messages(*args, **kwargs)
        return tokens, self.changed(mask)


class TrainsQuestions(_Masked):
    """The questions are trained, too."""

    changed = staticmethod(lambda mask: [False] * len(mask))


class TrainsLastHeaderToken(_Masked):
    """The token before each answer is trained, too."""

    changed = staticmethod(lambda mask: [now and after for now, after in zip(mask, [*mask[1:], True], strict=True)])


class MasksEnds(_Masked):
    """The last token of each answer, which ends the turn, is masked."""

    changed = staticmethod(lambda mask: [now or after for now, after in zip(mask, [*mask[1:], True], strict=True)])


class OtherPrompt(HuggingFaceModelTokenizer):
    """The prompt of generation is not that of training."""

    def tokenize_messages(self, messages, add_end_tokens=True, **kwargs):
        tokens, mask = super().tokenize_messages(messages, add_end_tokens, **kwargs)
        return (tokens, mask) if add_end_tokens else ([*tokens, tokens[0]], [*mask, True])


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """Folder with the checkpoint and the data of all runs."""
    folder = tmp_path_factory.mktemp("selfcheck")
    write_config(LORA, folder, folder / "output")
    return folder


def checks(shared, folder, fault=None, name=LORA, **settings):
    text = (RECIPES / f"{name}.py").read_text()
    for old, new in FAULTS.get(fault, {}).items():
        assert text.count(old) == 1
        text = text.replace(old, new)
    (folder / "mine.py").write_text(text)
    config = write_config(name, shared, folder / "output", **settings)
    (folder / "runs").mkdir()
    return _Checks(RecipeTarget("mine", path=folder / "mine.py"), config, [], folder / "runs")


def tokenizer(shared, component):
    path = str(shared / "checkpoint" / "tokenizer.json")
    return {"_component_": f"{__name__}.{component}", "tokenizer_json_path": path, "max_seq_len": 128}


def test_correct_recipe_passes_all_checks(shared, tmp_path):
    config = write_config(LORA, shared, tmp_path / "output", clip_grad_norm=0.5)
    target = RecipeTarget(LORA, path=RECIPES / f"{LORA}.py")
    verdicts = list(selfcheck(target, config, ["epochs=7"], tmp_path))
    assert [(verdict.name, verdict.state) for verdict in verdicts] == [
        (check, "passed") for check in ("accumulation", "packing", "resume", "save and load", "labels", "end of turn")
    ], verdicts
    assert "read by transformers" in verdicts[3].reason
    assert verdicts[4].reason == "24 rows are prompt and answer"


@pytest.mark.parametrize(("fault", "metric"), [*zip(list(FAULTS)[:2], ("grad_norm", "loss"), strict=True)])
def test_wrong_division_under_accumulation_is_found(shared, tmp_path, fault, metric):
    faulty = checks(shared, tmp_path, fault)
    with pytest.raises(UserError, match=rf"{metric} .* with 4 micro-batches, in step 1"):
        faulty.accumulation()


def test_attention_between_packed_documents_is_found(shared, tmp_path):
    faulty = checks(shared, tmp_path, collate_fn=f"{__name__}.leaky_collate")
    with pytest.raises(UserError, match=r"loss .* for the same rows with packs, in step 1"):
        faulty.packing()
    faulty.accumulation()


def test_resume_that_loses_state_is_found(shared, tmp_path):
    with pytest.raises(UserError, match=r"the losses are \[.*\] instead of|has other bits"):
        checks(shared, tmp_path, "optimizer without its state").resume()


def test_resume_that_begins_anew_is_found(shared, tmp_path):
    """Its losses are those of the uninterrupted run, because it is trained from the same seed."""
    with pytest.raises(UserError, match="with resume_from_checkpoint=True, the run began at step 1 instead of 3"):
        checks(shared, tmp_path, "resume that begins anew").resume()


class HalfLoss(LinearCrossEntropyLoss):
    """A loss of the user's own."""

    def sum_and_count(self, *args, **kwargs):
        total, count = super().sum_and_count(*args, **kwargs)
        return total / 2, count


def test_a_checkpoint_is_measured_by_the_loss_of_the_config(shared, tmp_path):
    halved = checks(shared, tmp_path, loss={"_component_": f"{__name__}.HalfLoss"})
    assert "as the run continues" in halved.load()


def test_checkpoint_of_another_model_is_found(shared, tmp_path):
    with pytest.raises(UserError, match=r"the saved model's loss is .*, and the run continues with"):
        checks(shared, tmp_path, "another model saved than trained").load()


def test_additional_loss_term_is_given_as_the_reason(shared, tmp_path):
    verdict = checks(shared, tmp_path, "a term beside the loss").load()
    assert verdict.startswith("loss not compared, because the recipe does not train on the config's loss alone")
    assert "read by transformers" in verdict, "the files are still compared"


def test_a_model_of_images_is_loaded_with_its_images(tmp_path):
    write_image_checkpoint(image_text_model(CONFIGS["qwen3_vl"]()), tmp_path / "checkpoint")
    model = {"_component_": "torchtune.models.image_text_model", "checkpoint_dir": str(tmp_path / "checkpoint")}
    pictures = {"model": model, **write_pictures(tmp_path), "collate_fn": "torchtune.data.collate_documents"}
    image_checks = checks(tmp_path, tmp_path, name="full_finetune_single_device", lr_scheduler=None, **pictures)
    assert image_checks.load().startswith("loss ")


@pytest.mark.parametrize(
    ("component", "said"),
    [("TrainsQuestions", r"\(user\) is trained"), ("OtherPrompt", "does not begin with the prompt")],
)
def test_wrong_label_masks_are_found(shared, tmp_path, component, said):
    faulty = checks(shared, tmp_path, tokenizer=tokenizer(shared, component))
    with pytest.raises(UserError, match=rf"row 0 of .*: .*{said}"):
        faulty.labels()


def test_prompts_trained_by_the_config_are_accepted(shared, tmp_path):
    recipe_checks = checks(shared, tmp_path, dataset__masking_strategy="train_on_all")
    assert recipe_checks.labels() == "24 rows are prompt and answer"


def test_trained_tokens_of_the_header_are_counted(shared, tmp_path):
    recipe_checks = checks(shared, tmp_path, tokenizer=tokenizer(shared, "TrainsLastHeaderToken"))
    assert recipe_checks.labels() == "24 rows are prompt and answer; the layout trains 1 tokens of the header"


def test_masked_end_of_turn_is_found(shared, tmp_path):
    with pytest.raises(UserError, match="example 0: no stop token is trained"):
        checks(shared, tmp_path, tokenizer=tokenizer(shared, "MasksEnds")).end_of_turn()


def test_a_run_that_fails_is_a_failed_check(shared, tmp_path):
    faulty = checks(shared, tmp_path, checkpointer__checkpoint_dir=str(tmp_path / "none"))
    with pytest.raises(UserError, match=rf"the run 'uninterrupted' ends with exit code 2: .*{tmp_path / 'none'}"):
        faulty.resume()


def test_wrong_key_of_the_config_is_refused(tune, shared, tmp_path):
    config = write_config(LORA, shared, tmp_path / "output", epochz=1)
    result = tune("selfcheck", "--config", str(config))
    assert result.code == 2
    assert "did you mean 'epochs'" in result.err
    assert not result.out


def test_recipe_that_does_not_train_is_refused(tune):
    result = tune("selfcheck", "--config", "generation")
    assert result.code == 2
    assert "the config has no dataset: name a config of a recipe that trains" in result.err


@pytest.mark.parametrize("name", ["dpo", "grpo", "full_finetune_distributed"])
def test_checks_that_do_not_apply_are_not_failures(shared, tmp_path, name):
    recipe_checks = checks(shared, tmp_path, name=name)
    left_out = {
        "dpo": [recipe_checks.packing, recipe_checks.labels],
        "grpo": [recipe_checks.packing, recipe_checks.labels, recipe_checks.end_of_turn],
    }
    for check in left_out.get(name, []):
        with pytest.raises(NotChecked):
            check()
    assert recipe_checks.accumulation()
    assert "read by transformers" in recipe_checks.load()
    if name == "dpo":
        assert recipe_checks.end_of_turn() == "24 trained passages end with a stop token"


def test_command_exits_with_1_if_a_check_fails(tune, shared, tmp_path, monkeypatch):
    config = write_config(LORA, shared, tmp_path / "output", tokenizer=tokenizer(shared, "TrainsQuestions"))
    monkeypatch.setattr(
        _Checks, "_train", lambda *_, **__: {1: {"loss": 1.0}, 2: {"loss": 0.5}}
    )  # runs are tested above
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    result = tune("selfcheck", "--config", str(config), "batch_size=1")
    assert result.code == 1
    labels = next(line for line in result.out.splitlines() if line.startswith("labels"))
    assert labels.split()[1] == "failed"
    assert f"to see more: tune data show {config} batch_size=1 --examples 4" in result.out
    assert tune("selfcheck").out.startswith("usage: tune selfcheck")
