"""``tune export``: what it writes is what was trained, a fault in writing is found, and mistakes are one sentence."""

import itertools
import json
import os
import shutil
import signal
import sys
from fnmatch import fnmatch
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import yaml
from filelock import FileLock
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer

import torchtune
from tests.tiny import write_checkpoint
from tests.torchtune.checkpoints.small import randomize_adapter, write_folder
from tests.work import largest_file
from torchtune.checkpoints import _export, _small_files
from torchtune.checkpoints._export import SaveView, WeightGroup
from torchtune.checkpoints._save import TensorGroup, TensorSlice
from torchtune.modules.moe import LoRAGroupedExperts
from torchtune.modules.peft import LoRA
from torchtune.rlhf.loss import InfoNCELoss, RerankBCELoss
from torchtune.tokenizers import hf_tokenizer
from torchtune.training import fit_vocabulary

pytestmark = [
    pytest.mark.usefixtures("imported_aside"),
    pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys did not match:RuntimeWarning"),
]


def train(base, folder, **options):
    """A checkpoint of a model with an adapter that was not trained, but changed."""
    model, _ = torchtune.load(base, adapter=LoRA(rank=2, alpha=6, apply_to_mlp=True, **options), device="cpu")
    randomize_adapter(model)
    return torchtune.save(model, folder, contents="adapter")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Runs that train all weights (``full``) and an adapter (``lora``), and a mixture with adapted experts."""
    folder = tmp_path_factory.mktemp("runs")
    base = write_checkpoint(folder / "base")
    model, _ = torchtune.load(base, device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    settings = yaml.safe_dump({"recipe": "full_finetune_single_device", "checkpointer": {"checkpoint_dir": str(base)}})
    saved = torchtune.save(model, folder / "full" / "epoch_0")
    for checkpoint_or_run in (saved, saved.parent):
        (checkpoint_or_run / "torchtune_config.yaml").write_text(settings)
    train(base, folder / "lora" / "epoch_0")
    train(write_folder(folder / "experts_base", "qwen3_moe"), folder / "experts" / "epoch_0")
    return folder


def numbers(folder):
    return json.loads((folder / "torchtune_export.json").read_text())["check"]


def test_the_model_card_has_the_verdict_of_the_check(runs, tmp_path, tune):
    assert tune("export", str(runs / "full"), "--to", "hf", "--output", str(tmp_path / "out")).code == 0
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert "torchtune" in card.data.tags
    assert "Exported files: read by transformers " in card.text
    assert "greedy tokens equal" in card.text


@pytest.mark.parametrize(
    ("run", "to"),
    [("full", "hf"), *itertools.product(("lora", "experts"), ("adapter", "merged"))],
)
def test_exported_files_compute_the_logits_of_the_trained_model(runs, tmp_path, tune, run, to):
    model = runs / run / ("" if run == "full" else "epoch_0")
    done = tune("export", str(model), "--to", to, "--output", str(tmp_path / "out"))
    assert done.code == 0, done.err
    assert f"writing     the files of {tmp_path / 'out'}" in done.err, "it takes minutes for a large model"
    measured = numbers(tmp_path / "out")["trained"]
    assert measured["equal_tokens"] == measured["tokens"] > 100
    assert measured["max_difference"] < 1e-3
    assert measured["kl"] < 1e-8
    assert f"checked     in {'peft' if to == 'adapter' else 'transformers'} " in done.out
    assert f"wrote       {tmp_path / 'out'} (" in done.out
    assert ("vllm serve" in done.out, "--lora-modules out=" in done.out) == (True, to == "adapter")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]  # nothing is left beside it


def save_run(base, folder, tokenizer, *, adapter=None):
    """A finished run whose tokenizer has the settings ``tokenizer``."""
    trained = hf_tokenizer(**{name: value for name, value in tokenizer.items() if name != "_component_"})
    model, _ = torchtune.load(base, adapter=adapter, device="cpu")
    fit_vocabulary(model, trained, resize=True)
    if adapter is not None:
        randomize_adapter(model)
        torch.nn.init.normal_(model.tok_embeddings.new_rows)
    saved = torchtune.save(model, folder / "epoch_0", tokenizer=trained)
    settings = {"recipe": "x", "checkpointer": {"checkpoint_dir": str(base)}, "tokenizer": tokenizer}
    for path in (saved, folder):
        (path / "torchtune_config.yaml").write_text(yaml.safe_dump(settings))
    return saved


@pytest.mark.parametrize("to", ["adapter", "merged"])
def test_adapter_with_new_tokens_is_exported_with_its_tokenizer(runs, tmp_path, tune, to):
    tokenizer_folder = shutil.copytree(
        runs / "base", tmp_path / "other", ignore=shutil.ignore_patterns("*.safetensors")
    )
    backend = Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    backend.add_special_tokens([AddedToken("<|tool|>", special=True)])
    backend.save(str(tokenizer_folder / "tokenizer.json"))
    settings = {"_component_": "torchtune.tokenizers.hf_tokenizer", "path": str(tokenizer_folder), "max_seq_len": 8}
    save_run(runs / "base", tmp_path / "run", settings, adapter=LoRA(rank=2, alpha=6))
    done = tune("export", str(tmp_path / "run"), "--to", to, "--output", str(tmp_path / "out"))
    assert done.code == 0, done.err
    assert "8 texts and 8 conversations have the ids of the tokenizer that trained" in done.out
    assert hf_tokenizer(str(tmp_path / "out")).special_tokens["<|tool|>"] == backend.token_to_id("<|tool|>")


def test_export_with_another_tokenizer_than_the_one_that_trained_fails_its_check(runs, tmp_path, tune):
    settings = {"_component_": "torchtune.tokenizers.hf_tokenizer", "path": str(runs / "base")}
    settings["chat_template"] = "{% for turn in messages %}{{ turn['role'] }}: {{ turn['content'] }}\n{% endfor %}"
    saved = save_run(runs / "base", tmp_path / "run", settings)
    done = tune("export", str(tmp_path / "run"), "--to", "hf", "--output", str(tmp_path / "out"))
    assert done.code == 0, done.err
    assert "conversations have the ids of the tokenizer that trained" in done.out
    shutil.copyfile(runs / "base" / "tokenizer_config.json", saved / "tokenizer_config.json")  # as earlier releases did
    done = tune("export", str(tmp_path / "run"), "--to", "hf", "--output", str(tmp_path / "again"))
    assert done.code == 3
    assert "give other ids than the tokenizer that trained, for example for 'What is 17 + 25?'" in done.err
    assert not (tmp_path / "again").exists()


QUANTIZED = [("gguf", "q8_0"), ("gguf", "q4_0"), ("compressed-tensors", "int4"), ("compressed-tensors", "int8")]


@pytest.mark.parametrize(("to", "quant"), QUANTIZED)
def test_quantized_files_differ_as_the_quantized_base_does(runs, tmp_path, tune, to, quant):
    run = "full" if quant == "q8_0" else "lora"
    done = tune("export", str(runs / run / "epoch_0"), "--to", to, "--quant", quant, "--output", str(tmp_path / "out"))
    assert done.code == 0, done.err
    measured = numbers(tmp_path / "out")
    assert 0 < measured["base"]["kl"] < (0.01 if "8" in quant else 0.5)
    assert 0 < measured["trained"]["kl"] < 3 * measured["base"]["kl"] + 0.02
    assert "base        quantized alike: " in done.out


def test_ollama_gets_a_modelfile_and_a_push_without_yes_uploads_nothing(runs, tmp_path, tune):
    output = tmp_path / "out"
    done = tune("export", str(runs / "full"), "--to", "ollama", "--output", str(output), "--push", "me/cats")
    assert done.code == 0, done.err
    first, *lines = (output / "Modelfile").read_text().splitlines()
    assert first == "FROM ./model-Q8_0.gguf"
    assert lines[-2:] == ['PARAMETER stop "<|im_end|>"', "PARAMETER num_ctx 4096"]
    assert "\n".join(lines[:-2]).startswith('TEMPLATE """')
    assert "\n".join(lines[:-2]).endswith('{{ end }}"""')
    assert f"ollama create out -f {output}/Modelfile && ollama run out" in done.out
    files = [path.name for path in output.iterdir() if not path.name.startswith(".")]
    for name in files:
        assert f"{name} ({(output / name).stat().st_size:,} bytes)\n" in done.out
    assert f"nothing is uploaded: add --yes to upload {len(files)} files to me/cats" in done.out


def written(change):
    """``WeightGroup.compute_slices`` with changed tensors."""
    real = WeightGroup.compute_slices

    def compute_slices(self):
        tensors = {name: torch.zeros(spec.shape, dtype=spec.dtype) for name, spec in self.specs.items()}
        for part in real(self):
            region = tuple(slice(a, a + n) for a, n in zip(part.start, part.shape, strict=True))
            tensors[part.name][region] = part.data
        return [TensorSlice.of(name, change(name, tensor)) for name, tensor in tensors.items()]

    return compute_slices


def with_the_next_experts_b(patch):
    """Every expert has the B of another one."""
    previous = {}

    def change(name, tensor):
        if ".experts." not in name or "lora_B" not in name:
            return tensor
        matrix = name.rpartition(".lora_B")[0].rpartition(".")[2]
        wrong_tensor = previous.get(matrix, tensor.flip(1))
        previous[matrix] = tensor
        return wrong_tensor

    patch.setattr(WeightGroup, "compute_slices", written(change))
    return "experts."


def with_half_of_the_deltas(patch):
    real = LoRAGroupedExperts.merged_weight

    def merged(self, name, weight):
        half = len(weight) // 2
        return torch.cat([real(self, name, weight)[:half], weight[half:]])

    patch.setattr(LoRAGroupedExperts, "merged_weight", merged)
    return "model.layers.0.mlp.experts."


def with_names_without_prefix(patch):
    real = _export.adapter_tensors

    def bare(name):
        return name.removeprefix("base_model.model.")

    class Renamed(TensorGroup):
        def __init__(self, group):
            self.specs = {bare(name): spec for name, spec in group.specs.items()}
            self.itemsize = group.itemsize
            self.group = group

        def compute_slices(self):
            parts = self.group.compute_slices()
            return [TensorSlice(bare(part.name), part.start, part.shape, part.data) for part in parts]

    def tensors(*arguments, **options):
        groups, settings = real(*arguments, **options)

        return [Renamed(group) for group in groups], settings

    patch.setattr(_export, "adapter_tensors", tensors)
    return "model.layers.0.self_attn.q_proj.lora_A.weight"


def with_the_untrained_base(patch):
    patch.setattr(SaveView, "_merge_inputs", lambda self, name: set())
    return "model.layers.0.mlp."


FAULTS = [
    ("experts", "adapter", with_the_next_experts_b),
    ("experts", "merged", with_half_of_the_deltas),
    ("lora", "adapter", with_names_without_prefix),
    ("lora", "merged", with_the_untrained_base),
]


@pytest.mark.parametrize(("run", "to", "fault"), FAULTS, ids=[fault.__name__ for *_, fault in FAULTS])
def test_fault_in_written_files_fails_the_check(runs, tmp_path, tune, monkeypatch, run, to, fault):
    command = ["export", str(runs / run / "epoch_0"), "--to", to, "--output", str(tmp_path / "out")]
    assert tune(*command, "--no-check").code == 0
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    named = fault(monkeypatch)
    done = tune(*command)
    assert done.code == 3
    assert "has other logits than the trained model" in done.err
    assert named in done.err
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_fault_of_a_quantized_model_fails_the_check(runs, tmp_path, tune, monkeypatch):
    with_the_untrained_base(monkeypatch)
    done = tune("export", str(runs / "lora" / "epoch_0"), "--to", "gguf", "--output", str(tmp_path / "out"))
    assert done.code == 3
    assert "the quantized base: " in done.err
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(find_spec("llama_cpp") is not None, reason="llama.cpp reads the file")
def test_sizes_that_transformers_does_not_take_from_a_gguf_file_are_named(tmp_path, tune):
    write_folder(tmp_path / "model", "qwen3", head_dim=16, intermediate_size=64)
    command = ["export", str(tmp_path / "model"), "--to", "gguf", "--quant", "q8_0", "--output", str(tmp_path / "out")]
    done = tune(*command)
    assert done.code == 3
    assert "cannot read the written files: it expects the shape [" in done.err
    assert "self_attn.k_norm.weight', which has [16], and so for " in done.err
    assert "--no-check writes them without this check" in done.err
    assert not (tmp_path / "out").exists()
    assert tune(*command, "--no-check").code == 0


def fill_with_nan(file):
    save_file({name: torch.full_like(tensor, torch.nan) for name, tensor in load_file(file).items()}, file)


def test_nan_logits_fail_the_check(runs, tmp_path, tune):
    base = shutil.copytree(runs / "base", tmp_path / "base")
    train(base, tmp_path / "run")
    fill_with_nan(base / "model.safetensors")
    assert tune("export", str(tmp_path / "run"), "--to", "adapter").code == 3


def test_adapter_that_is_nan_is_not_exported(runs, tmp_path, tune):
    train(runs / "base", tmp_path / "run")
    fill_with_nan(tmp_path / "run" / "adapter_model.safetensors")
    done = tune("export", str(tmp_path / "run"), "--to", "adapter", "--output", str(tmp_path / "out"))
    assert done.code == 2
    assert "trained parameters have values that are NaN or infinite, such as 'layers.0." in done.err
    assert not (tmp_path / "out").exists()


def test_unchecked_export_says_why(runs, tmp_path, tune, monkeypatch):
    command = ["export", str(runs / "lora" / "epoch_0"), "--to", "adapter", "--output", str(tmp_path / "out")]
    assert "not checked because of --no-check" in tune(*command, "--no-check").out
    from torchtune._cli import _reference_logits

    monkeypatch.setattr(_reference_logits, "find_spec", lambda name: None if name == "peft" else object())
    assert "not checked because peft is not installed: pip install 'torchtune[check]'" in tune(*command).out
    assert numbers(tmp_path / "out")["trained"] is None
    done = tune(*command, "--check")
    assert (done.code, "cannot be checked, because peft is not installed" in done.err) == (2, True)


@pytest.mark.parametrize(
    ("code", "said"), [("import os\n\nos.abort()\n", "its process crashed"), ("1 / 0\n", "ZeroDivisionError: division")]
)
def test_crash_of_the_reading_library_is_reported(runs, tmp_path, tune, monkeypatch, code, said):
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "peft.py").write_text(code)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "broken"), *sys.path])
    monkeypatch.delitem(sys.modules, "peft", raising=False)
    command = ["export", str(runs / "lora" / "epoch_0"), "--to", "adapter", "--output", str(tmp_path / "out")]
    done = tune(*command)
    assert (done.code, done.out.count(f"not checked because peft cannot be asked: {said}")) == (0, 1)
    done = tune(*command, "--check")
    assert (done.code, "cannot be checked, because peft cannot be asked" in done.err) == (2, True)


def test_killed_run_exports_its_newest_complete_checkpoint(runs, tmp_path, tune):
    run = tmp_path / "run"
    train(runs / "base", run / "epoch_0")
    train(runs / "base", run / "epoch_1")
    for at in (0, 1):
        (run / f"epoch_{at}" / "state").mkdir()
    (run / "epoch_1" / ".complete").unlink()
    (run / "torchtune_config.yaml").write_text("recipe: lora_finetune_single_device\n")
    done = tune("export", str(run), "--to", "adapter", "--no-check")
    assert f"{run / 'epoch_0'}, the last checkpoint of the run, which has not finished" in done.err
    assert (run / "epoch_0-adapter" / "adapter_model.safetensors").is_file()


def test_invalid_exports_are_refused_in_one_sentence(runs, tmp_path, tune):
    full = str(runs / "full" / "epoch_0")
    adapter = str(runs / "lora" / "epoch_0")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    orphan = train(write_checkpoint(tmp_path / "base"), tmp_path / "orphan")
    (tmp_path / "base").rename(tmp_path / "moved")
    for command, message in {
        (str(tmp_path / "nowhere"), "--to", "hf"): "there is no such folder: give that of a",
        (str(tmp_path / "mine"), "--to", "hf"): "config.json",
        (full, "--to", "adapter"): "holds no adapter, all weights were trained: choose --to hf",
        (full, "--to", "merged"): "holds no adapter, all weights were trained: choose --to hf",
        (adapter, "--to", "hf"): "was trained as an adapter: choose --to merged, or --to adapter",
        (adapter, "--to", "merged", "--quant=int4"): "--quant int4: merged has no such quantization: it goes with gguf",
        (full, "--to", "gguf", "--quant=q3"): "--quant q3: gguf has no such quantization: choose out of q8_0,",
        (full, "--to", "hf", f"--output={tmp_path / 'mine'}"): "is there already and is no export: name a new folder",
        (full, "--to", "hf", "--yes"): "--yes uploads, and there is nowhere to: add --push OWNER/NAME",
        (str(orphan), "--to", "merged"): "names a base that is not there: correct its base_model_name_or_path",
    }.items():
        done = tune("export", *command)
        assert (done.code, done.out) == (2, ""), command
        *progress_lines, last = done.err.splitlines()
        assert message in last
        progress = ("Writing model", "writing ")  # of transformers, before, and of the export itself
    assert not [line for line in progress_lines if line and not line.startswith(progress)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "moved", "orphan"]


def test_running_run_is_not_exported(runs, tmp_path, tune):
    run = tmp_path / "run"
    train(runs / "base", run / "epoch_0")
    (run / "torchtune_config.yaml").write_text("recipe: lora_finetune_single_device\n")
    with FileLock(run / ".run.lock"):
        done = tune("export", str(run), "--to", "adapter")
    assert done.code == 2
    assert "is in use by another run" in done.err


@pytest.mark.parametrize("moment", ["config.json", ".out.*.old.tmp", "out", ".out.????????.tmp"])
def test_killed_export_leaves_the_former_one(runs, tmp_path, tune, monkeypatch, moment):
    """Killed after renaming a file to this name; the next export has no space, and the one before is there."""
    command = ["export", str(runs / "full" / "epoch_0"), "--to", "hf", "--output", str(tmp_path / "out"), "--no-check"]
    assert tune(*command).code == 0
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    real = os.rename

    def rename(source, target):
        real(source, target)
        if fnmatch(Path(target).name, moment):
            os.kill(os.getpid(), signal.SIGKILL)

    if (child := os.fork()) == 0:
        monkeypatch.setattr(os, "rename", rename)
        tune(*command)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    assert len(list(tmp_path.iterdir())) > 1
    with largest_file(40_000):
        assert "nothing that was saved before is lost" in tune(*command).err
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def save_embedding_model(runs, folder, **settings):
    """A checkpoint of an adapter with the files of an embedding model."""
    saved = shutil.copytree(runs / "lora" / "epoch_0", folder / "epoch_0")
    base = json.loads((saved / "adapter_config.json").read_text())["base_model_name_or_path"]
    model, tokenizer = torchtune.load(base, device="cpu")
    data = torchtune.datasets.embedding_dataset(
        tokenizer, source=[{"query": "who", "positive": "cat"}], query_instruction="query: "
    )
    files = InfoNCELoss(pooling="mean").extra_files(model, data, tokenizer)
    files["config_sentence_transformers.json"] |= settings
    _small_files.write_extra_files(saved, files)
    return saved


def test_embeddings_of_exported_files_are_compared(runs, tmp_path, tune):
    saved = save_embedding_model(runs, tmp_path)
    done = tune("export", str(saved), "--to", "merged", "--output", str(tmp_path / "out"))
    assert done.code == 0, done.err
    assert (tmp_path / "out" / "1_Pooling" / "config.json").is_file()  # the base has none
    line = next(line for line in done.out.splitlines() if line.startswith("compared"))
    assert "compared    embeddings in " in line
    if find_spec("sentence_transformers") is None:
        assert "in transformers " in line
        assert "pip install 'torchtune[embeddings]'" in line


def test_an_export_that_computes_other_embeddings_fails_its_check(runs, tmp_path, tune):
    """The model was trained with an end of texts that no other library knows."""
    saved = save_embedding_model(runs, tmp_path, add_eos=True)
    done = tune("export", str(saved), "--to", "merged", "--output", str(tmp_path / "out"))
    assert done.code == 3
    assert "computes other embeddings than the trained model" in done.err
    assert not (tmp_path / "out").exists()


def test_reranker_keeps_its_template(tmp_path, tune):
    saved = write_checkpoint(tmp_path / "reranker", is_reward=True)
    model, tokenizer = torchtune.load(saved, device="cpu")
    rows = [{"query": "who", "positive": "cat", "negatives": ["dog"]}]
    data = torchtune.datasets.reranking_dataset(tokenizer, source=rows, template="{query} {document}")
    _small_files.write_extra_files(saved, RerankBCELoss().extra_files(model, data, tokenizer))
    done = tune("export", str(saved), "--to", "hf", "--output", str(tmp_path / "out"))
    assert done.code == 0, done.err
    assert json.loads((tmp_path / "out" / "reranker_config.json").read_text())["template"] == "{query} {document}"
    assert "scores of pairs" in done.out
