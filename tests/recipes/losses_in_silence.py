"""Promises that nothing is lost in silence, as functions that raise ``Broken`` when something is.

An error that the user reads is no silent loss: a run that is refused keeps the promise.
"""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from tests.recipes.checks import promise
from tests.recipes.runs import NotInjected, Run, start
from torchtune._cli import tune
from torchtune.generation import generate
from torchtune.modules.transforms.tokenizers import hf_tokenizer
from torchtune.training import FullModelHFCheckpointer
from torchtune.utils import UserError

FULL, LORA = "full_finetune_single_device", "lora_finetune_single_device"
ADAPTER = {"_component_": "torchtune.modules.peft.LoRA", "rank": 4, "alpha": 8}
SHORT = {"max_steps_per_epoch": 3}


def differs_from(folder: Path, saved: Path) -> bool:
    """Whether the weights that a run saved are others than those that it began with."""
    one, other = (
        {name: t for path in sorted(at.glob("*.safetensors")) for name, t in tensors(path).items()}
        for at in (folder / "checkpoint", saved)
    )
    return one.keys() != other.keys() or any(not torch.equal(one[name], other[name]) for name in one)


def tensors(path: Path) -> dict[str, torch.Tensor]:
    """Tensors of a safetensors file."""
    from safetensors.torch import load_file

    return load_file(path)


def what_was_trained_is_saved(folder: Path) -> None:
    """A full recipe whose model has an adapter saves what it trained, or refuses to start."""
    try:
        run = start(FULL, folder, model_converters=[ADAPTER], **SHORT)
    except UserError:
        return
    (saved,) = run.output_dir.glob("epoch_*")
    promise(differs_from(folder, saved), "what was trained is saved")


def the_first_step_trains(folder: Path) -> None:
    """A run of one step with a warmup changes the weights."""
    run = start(FULL, folder, max_steps_per_epoch=1)
    (saved,) = run.output_dir.glob("epoch_*")
    promise(differs_from(folder, saved), "the first step of a warmup trains")


def generation_gets_logits(folder: Path) -> None:
    """A flag that an older recipe set on a model does not change what is generated."""
    model = start(FULL, folder, **SHORT).recipe.model
    prompt = torch.arange(3, 9)
    before, _ = generate(model, prompt, max_generated_tokens=6, temperature=0.0)
    model.skip_output_layer = True
    after, _ = generate(model, prompt, max_generated_tokens=6, temperature=0.0)
    promise(torch.equal(before, after), "a flag on a model does not change what it generates")


def a_cut_row_teaches_its_end(folder: Path) -> None:
    """A conversation that is cut on its left ends with the end of its last turn, labelled."""
    start(FULL, folder, train=False)
    tokenizer = hf_tokenizer(str(folder / "checkpoint"), max_seq_len=8, truncation_type="left")
    messages = [{"role": "user", "content": "red green"}, {"role": "assistant", "content": "blue one two three cat"}]
    row = tokenizer({"messages": messages})
    promise(len(row["tokens"]) == 8, "the row is cut")
    stop = row["tokens"].index(tokenizer.stop_tokens[0]) if tokenizer.stop_tokens[0] in row["tokens"] else None
    promise(stop is not None and not row["mask"][stop], "the end of a turn of a cut row is trained on")


_LOCK = """
import sys
from pathlib import Path
from torchtune.utils import FolderLock
FolderLock(Path(sys.argv[1])).acquire()
print("locked", flush=True)
sys.stdin.read()
"""


def two_runs_do_not_share_a_folder(folder: Path) -> None:
    """A run whose folder another process is writing to is refused."""
    shared = folder / "shared"
    command = [sys.executable, "-c", _LOCK, str(shared)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        if other.stdout.readline() != "locked\n":
            raise NotInjected("the other process has no lock")
        try:
            start(FULL, folder, train=False, output_dir=shared)
        except UserError as error:
            promise("in use by another run" in str(error), "an output folder has one run at a time")
            return
        finally:
            other.stdin.close()
    promise(False, "an output folder has one run at a time")


def stopped_at(folder: Path, step: int, **settings: Any) -> tuple[Run, Path]:
    """A run, and a folder that holds its checkpoint after ``step`` as if it had been killed then."""
    keep = {"checkpointer__keep_last_n_checkpoints": 20}
    whole = start(FULL, folder, save_every_n_steps=1, max_steps_per_epoch=4, **keep, **settings)
    output_dir = folder / f"stopped_{whole.output_dir.name}"
    for number in (step - 1, step):
        shutil.copytree(whole.output_dir / f"step_{number}", output_dir / f"step_{number}")
    return whole, output_dir


def a_resumed_run_has_the_learning_rate_that_it_was_given(folder: Path) -> None:
    """Another learning rate on a resume takes effect, or is refused."""
    _, output_dir = stopped_at(folder, 2, lr_scheduler=None)
    optimizer = {"_component_": "torch.optim.AdamW", "lr": 5e-4}
    settings = {"save_every_n_steps": 1, "max_steps_per_epoch": 4, "lr_scheduler": None, "optimizer": optimizer}
    try:
        run = start(FULL, folder, **settings, output_dir=output_dir, resume_from_checkpoint=True)
    except UserError as error:
        promise("optimizer.lr" in str(error), "a resume says which setting it refuses")
        return
    promise(set(run.lrs.values()) == {5e-4}, "a setting that a resume is given takes effect, or is refused")


def a_flipped_bit_is_not_resumed(folder: Path) -> None:
    """Of a damaged checkpoint nothing is resumed; the one before takes its place."""
    whole, output_dir = stopped_at(folder, 3)
    (weights,) = (output_dir / "step_3").glob("model*.safetensors")
    content = bytearray(weights.read_bytes())
    content[-5] ^= 0x10
    weights.write_bytes(content)
    settings = {"save_every_n_steps": 1, "max_steps_per_epoch": 4}
    run = start(FULL, folder, **settings, output_dir=output_dir, resume_from_checkpoint=True)
    promise(
        run.losses == {step: whole.losses[step] for step in (3, 4)}, "a flipped bit does not get into a resumed run"
    )


def copying_keeps_what_was_there(folder: Path, monkeypatch: Any) -> None:
    """`tune cp` onto a file that was changed keeps it."""
    path = folder / "mine.yaml"
    path.write_text("mine: 1\n")
    monkeypatch.setattr("sys.argv", ["tune", "cp", "llama3_2/1B_lora_single_device", str(path)])
    tune.main()
    promise(any("mine: 1" in file.read_text() for file in folder.glob("mine*")), "tune cp loses no file")


def a_save_of_a_model_with_an_adapter_has_it(folder: Path) -> None:
    """``checkpointer.save`` of a trained adapter model writes the adapter, or refuses."""
    run = start(LORA, folder, **SHORT)
    checkpointer = FullModelHFCheckpointer(str(folder / "checkpoint"), output_dir=str(folder / "own"))
    try:
        saved = checkpointer.save("epoch_0", run.recipe.model)
    except UserError:
        return
    finally:
        checkpointer.close()
    promise(differs_from(folder, saved), "a save has what was trained")
