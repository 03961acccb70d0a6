"""A module, a tokenizer and a dataset of one's own in a copied recipe: trained, killed, resumed, saved."""

import json
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from torchtune._cli import tune as tune_command
from torchtune.checkpoints import CheckpointError, ModuleCheckpointer
from torchtune.datasets import instantiate_dataset

PIECES = '''
import os

import torch
from torch import nn


class Letters:
    """A tokenizer with what its dataset calls, and files for checkpoints."""

    vocab_size = 128

    def save_files(self, folder):
        (folder / "letters.txt").write_text("ascii")

    def encode(self, text):
        return [ord(letter) for letter in text]


class Sums(torch.utils.data.Dataset):
    def __init__(self, tokenizer):
        self.rows = []
        for number in range(24):
            prompt, answer = tokenizer.encode(f"{number}+1="), tokenizer.encode(f"{number + 1}.")
            labels = [-100] * (len(prompt) - 1) + answer + [-100]
            self.rows.append({"tokens": prompt + answer, "labels": labels})

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


class Recurrent(nn.Module):
    def __init__(self, vocab_size=128, dim=16):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, dim)
        self.recurrent = nn.GRU(dim, dim, batch_first=True)
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(dim, vocab_size)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens):
        if self.training:
            self.calls += 1
            if str(int(self.calls)) == os.environ.get("DIES_AT"):
                os._exit(9)
        return self.head(self.dropout(self.recurrent(self.embedding(tokens))[0]))
'''

# What a copy of the recipe needs for a module that this library did not build, as docs/your_own.rst says.
EDITS = {
    'torch.device("meta"):\n            model': "self.device:\n            model",
    'hidden = self.model(**batch.model_inputs(), output="hidden")': "logits = self.model(batch.tokens)",
    "                hidden,\n                batch.labels,\n                self.model.output,\n": (
        "                logits,\n                batch.labels,\n                torch.nn.Identity(),\n"
    ),
}


@pytest.fixture
def folder(tmp_path, monkeypatch, tune):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "letters_and_sums.py").write_text(PIECES)
    assert tune("cp", "full_finetune_single_device", "mine.py").code == 0
    text = (tmp_path / "mine.py").read_text()
    for before, after in EDITS.items():
        assert text.count(before) == 1
        text = text.replace(before, after)
    (tmp_path / "mine.py").write_text(text)
    settings = {
        "recipe": "mine.py",
        "output_dir": "out",
        "model": {"_component_": "letters_and_sums.Recurrent"},
        "tokenizer": {"_component_": "letters_and_sums.Letters"},
        "dataset": {"_component_": "letters_and_sums.Sums"},
        "checkpointer": {"_component_": "torchtune.training.ModuleCheckpointer", "output_dir": "${output_dir}"},
        "collate_fn": "torchtune.data.padded_collate_sft",
        "loss": {"_component_": "torch.nn.CrossEntropyLoss"},
        "optimizer": {"_component_": "torch.optim.AdamW", "lr": 0.01},
        "metric_logger": {
            "_component_": "torchtune.training.metric_logging.DiskLogger",
            "log_dir": "${output_dir}/logs",
        },
        "batch_size": 4,
        "epochs": 2,
        "seed": 1,
        "save_every_n_steps": 4,
        "device": "cpu",
        "dtype": "fp32",
    }
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(settings))
    yield tmp_path
    sys.modules.pop("letters_and_sums", None)


def losses(folder):
    lines = (folder / "logs" / "log.txt").read_text().splitlines()
    return [line.partition("loss:")[2].split()[0] for line in lines if "loss:" in line]


def test_users_module_trains_is_killed_resumes_and_is_saved(folder, forker, tune, caplog):
    done = tune("run", "mine.py", "--config", "mine.yaml")
    assert done.code == 0, done.err
    assert "result      out/step_12, the state dict of a Recurrent" in caplog.text
    expected_losses = losses(folder / "out")
    assert len(expected_losses) == 12
    assert float(expected_losses[-1]) < float(expected_losses[0])

    # Killed in the seventh step, after step_4 was saved; what came after it is computed again.
    words = ["run", "mine.py", "--config", "mine.yaml", "output_dir=again"]
    forker.start_script(Path(tune_command.__file__), words, folder / "screen", 1, DIES_AT="7")
    assert forker.wait() == [9], (folder / "screen").read_text()
    done = tune("run", "mine.py", "--config", "mine.yaml", "output_dir=again", "resume_from_checkpoint=True")
    assert done.code == 0, done.err
    assert losses(folder / "again")[-8:] == expected_losses[-8:]
    before, after = (load_file(folder / name / "step_12" / "model.safetensors") for name in ("out", "again"))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]), name

    assert (folder / "out" / "step_12" / "letters.txt").read_text() == "ascii"

    from letters_and_sums import Recurrent

    model = Recurrent()
    model.load_state_dict(before)  # the names are the module's
    assert int(model.calls) == 12, "buffers are saved"

    # Another run begins with the saved module.
    source = ["checkpointer.checkpoint_dir=out/step_12", "output_dir=next", "epochs=1", "max_steps_per_epoch=1"]
    done = tune("run", "mine.py", "--config", "mine.yaml", *source)
    assert done.code == 0, done.err
    assert float(losses(folder / "next")[0]) < float(expected_losses[0])
    done = tune("run", "mine.py", "--config", "mine.yaml")
    assert done.code == 2
    assert "out already holds a run" in done.err


class Noted(torch.nn.Linear):
    def get_extra_state(self):
        return {"note": "text"}


class Hidden(torch.nn.Linear):
    def state_dict(self, *args, **options):
        return {}


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (lambda: torch.nn.Linear(4, 3), r"'weight' has the shape \[2, 4\], and \[3, 4\] in the model"),
        (lambda: torch.nn.Linear(4, 2, bias=False), "it has 'bias', which is not in the model"),
        (lambda: torch.nn.Sequential(torch.nn.Linear(4, 2)), "it lacks '0.weight' of the model"),
        (lambda: torch.nn.Linear(4, 2, device="meta"), r"'weight' has no values.*remove torch.device\(\"meta\"\)"),
    ],
)
def test_weights_of_another_module_are_refused(module, message, tmp_path):
    first = ModuleCheckpointer(output_dir=tmp_path / "run")
    path = first.save("epoch_0", torch.nn.Linear(4, 2))
    first.close()
    with pytest.raises(CheckpointError, match=message):
        ModuleCheckpointer(path).load_model(module())


def test_state_that_safetensors_cannot_hold_is_refused_before_training(tmp_path):
    checkpointer = ModuleCheckpointer(output_dir=tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"state_dict\(\) has '_extra_state', a dict"):
        checkpointer.check_contents(Noted(4, 2))
    with pytest.raises(CheckpointError, match="'weight' is trained, but is not in state_dict"):
        checkpointer.check_contents(Hidden(4, 2))
    with pytest.raises(CheckpointError, match=r"is torch\.complex64, which safetensors cannot hold"):
        checkpointer.check_contents(torch.nn.Linear(4, 2, dtype=torch.complex64))
    with pytest.raises(CheckpointError, match="is not saved quantized"):
        checkpointer.save_quantized("epoch_0", torch.nn.Linear(4, 2), None)


class Nothing:
    pass


class Words:
    vocab_size = 10


@pytest.mark.parametrize(
    ("tokenizer", "dataset", "message"),
    [
        (Nothing(), "torchtune.datasets.chat_dataset", "a Nothing has no vocab_size, which a recipe needs"),
        (Words(), "torchtune.datasets.chat_dataset", "a Words has no __call__, which a dataset of conversations needs"),
        (Words(), "torchtune.datasets.preference_dataset", "a Words has no __call__"),
        (Words(), "torchtune.datasets.prompt_dataset", "a Words has no __call__"),
        (
            Words(),
            "torchtune.datasets.text_completion_dataset",
            "a Words has no encode, which a dataset of texts",
        ),
    ],
)
def test_attributes_that_a_users_tokenizer_lacks_are_named_at_the_start(tokenizer, dataset, message, tmp_path):
    question = {"role": "user", "content": "a"}
    answers = [[question, {"role": "assistant", "content": answer}] for answer in "bc"]
    row = {"text": "a", "prompt": "b", "messages": answers[0], "chosen": answers[0], "rejected": answers[1]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    node = {"_component_": dataset, "source": str(tmp_path / "rows.jsonl")}
    if dataset.endswith("chat_dataset"):
        node |= {"conversation_column": "messages", "conversation_style": "openai"}
    with pytest.raises(ValueError, match=message):
        instantiate_dataset(node, tokenizer)
