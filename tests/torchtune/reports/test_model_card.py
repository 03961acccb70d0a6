"""The model card: what the Hub reads, what people read, and what neither may."""

import json

import yaml
from huggingface_hub import ModelCard

from tests.torchtune.reports.folders import ROWS, START, ended, measured, write_run
from torchtune.reports import model_card

DATA = {"dataset": {"rows": 640, "examples": 640, "tokens": 12345, "digest": "0123456789abcdef", "samples": []}}
FACTS = {
    "processes": 2,
    "device": "NVIDIA H200",
    "config": "smol/135M_lora",
    "code": {"torchtune": "0.8.0"},
    "data": DATA,
}


def make(folder, base=None, **settings):
    changed = {"optimizer.lr": [0.0003, 0.002]}
    parameters = {"trained": 4096, "all": 32800}
    after = {name: value - 1 for name, value in ROWS.items()}
    events = [START | FACTS | {"changed": changed, "parameters": parameters}, measured("before", ROWS)]
    counts = {"processed_tokens": 5000, "trained_tokens": 1234, "elapsed_seconds": 60.0}
    settings = {"checkpointer": {"checkpoint_dir": str(base or "/models/base")}, **settings}
    return write_run(
        folder, [*events, measured("after", after), ended()], [{"step": 20, "loss": 1.0, **counts}], **settings
    )


def test_front_matter_is_what_the_hub_expects(tmp_path):
    base = tmp_path / "base"
    base.mkdir()
    (base / "README.md").write_text("---\nlicense: other\nlicense_name: mine\nlanguage: en\n---\n# Base\n")
    (base / "original_repo_id.json").write_text(json.dumps({"repo_id": "HuggingFaceTB/SmolLM2-135M"}))
    parts = {"a": {"source": "owner/chats"}, "b": {"source": "json", "data_files": "mine.jsonl"}}
    mixture = {"_component_": "torchtune.datasets.mixed_dataset", "datasets": parts}
    card = ModelCard(model_card(make(tmp_path / "run", base, dataset=mixture), library="peft"))
    assert card.data.to_dict() == {
        "license": "other",
        "license_name": "mine",
        "base_model": "HuggingFaceTB/SmolLM2-135M",
        "datasets": ["owner/chats"],
        "library_name": "peft",
        "pipeline_tag": "text-generation",
        "tags": ["torchtune", "lora_finetune_single_device"],
    }


def test_card_describes_data_settings_and_result(tmp_path):
    card = model_card(make(tmp_path / "run"), check="equal to 1e-5 in transformers")
    for text in (
        "**Learned**: loss of 8 rows of dataset\\_val 2.35 → 1.35, -1 (95 % interval -1 to -1).",
        "Licence: not known",
        "Exported files: equal to 1e-5 in transformers.",
        "dataset: 640 rows, 12,345 tokens, SHA-256 of tokens and labels `0123456789abcdef`.",
        "| dataset | `owner/chats` | the default of `torchtune.datasets.chat_dataset` |",
        "20 steps in 1 min 30 s on 2 x NVIDIA H200; 4,096 of 32,800 parameters; 1,234 tokens trained, 5,000 processed.",
        "| `optimizer.lr` | `0.0003` | `0.002` |",
        "tune run --nproc-per-node 2 lora_finetune_single_device --config torchtune_config.yaml\n",
    ):
        assert text in card
    assert "Exported files: not checked." in model_card(tmp_path / "run")


def test_card_names_the_masking_strategy_and_scores(tmp_path):
    run = make(
        tmp_path / "run", dataset={"source": "json", "masking_strategy": "train_on_last", "data_files": "a|b`.jsonl"}
    )
    (run / "eval").mkdir()
    (run / "eval" / "a.jsonl").write_text(
        "".join(json.dumps({"line": i, "scores": {"exact": i % 2}}) + "\n" for i in range(4))
    )
    (run / "eval" / "held.results.json").write_text(json.dumps({"models": [{"answers": "a.jsonl"}]}))
    card = model_card(run)
    assert "| dataset | `a\\|b'.jsonl` | `train_on_last` |" in card
    assert "| exact on held | 4 | 0.5 |" in card


def test_secrets_and_markup_are_not_in_the_card(tmp_path):
    token = "hf_" + "a1B2" * 8
    run = make(tmp_path / "<script>x</script>\n---\nlicense: mit", dataset={"source": token})
    card = model_card(run)
    assert token not in card
    assert "<script" not in card
    assert yaml.safe_load(card.split("---\n")[1]).keys() == {"library_name", "pipeline_tag", "tags"}


def test_a_run_of_an_earlier_release_has_a_card(tmp_path):
    card = ModelCard(model_card(write_run(tmp_path / "run", [])))
    assert "**Unfinished**" in card.text
