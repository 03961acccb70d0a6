"""Kubeflow Trainer's command lines and the manifests of examples/launch/kubeflow, on tiny weights."""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tomllib
import torch
import yaml

from tests.recipes.killing import shared_forker
from tests.recipes.runs import RECIPES, read_log
from tests.torchtune.models.tokenizer_files import write_bpe, write_ranks
from torchtune._cli.run import parse_command
from torchtune._cli.torchrun import torchrun_arguments
from torchtune._recipe_registry import current_name, find_targets
from torchtune.config import load_and_check

LAUNCH = Path(__file__).parents[2] / "examples" / "launch"
KUBEFLOW = LAUNCH / "kubeflow"
MODELS = {
    "llama3.2-1b": "llama3_2/1B_full",
    "llama3.2-3b": "llama3_2/3B_full",
    "qwen2.5-1.5b": "qwen2_5/1.5B_full",
    "llama3.2-3b-lora-nodes": "llama3_2/3B_lora",
}
VOCABULARY = {"llama3": 128256, "qwen2": 151665}  # with the special tokens, whose ids are those of the large models
SIZES = {"num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "embed_dim": 64, "intermediate_dim": 128}
SIZES |= {"max_seq_len": 512}
# What the trainer's plugin for torchtune chooses by the LoRA flags, and the flags as kubeflow 0.5.0 writes them.
LORA_MODULES = "model.lora_attn_modules=[q_proj,v_proj,output_proj]"
PEFT = {
    "full": ("full_finetune_distributed", "_full", []),
    "lora": (
        "lora_finetune_distributed",
        "_lora",
        ["model.apply_lora_to_mlp=True", "model.lora_rank=4", "model.lora_alpha=8", "model.lora_dropout=0.1"],
    ),
    "qlora": (
        "lora_finetune_distributed",
        "_qlora",
        ["model.apply_lora_to_mlp=True", "model.lora_rank=4", "model.lora_alpha=8", "model.quantize_base=True"],
    ),
    "dora": ("lora_finetune_distributed", "_lora", ["model.lora_rank=4", "model.lora_alpha=8", "model.use_dora=True"]),
}
# kubeflow 0.5.0's arguments of TorchTuneConfig(dtype, batch_size, epochs, loss); those of a dataset's initializer come
# next, so data_dir stands in front of the dataset that takes it.
TRAINING = ["dtype=fp32", "batch_size=2", "epochs=1", "loss=torchtune.modules.loss.CEWithChunkedOutputLoss"]
# The same package's arguments of TorchTuneInstructDataset(source, split, train_on_input, …).
DATASET = [
    "dataset=torchtune.datasets.instruct_dataset",
    "dataset.source=parquet",
    "dataset.split=train[:50%]",
    "dataset.train_on_input=False",
    "dataset.new_system_prompt=Answer in one word.",
    "dataset.column_map={'input': 'question', 'output': 'answer'}",
]


def command_of(name):
    """The command of a runtime's node."""
    runtime = yaml.safe_load((KUBEFLOW / f"{name}.yaml").read_text())
    (node,) = [job for job in runtime["spec"]["template"]["spec"]["replicatedJobs"] if job["name"] == "node"]
    (container,) = node["template"]["spec"]["template"]["spec"]["containers"]
    return container["command"]


def family_of(config):
    return "qwen2" if config.startswith("qwen") else "llama3"


def write_workspace(folder, family):
    """What Kubeflow's initializers leave in /workspace: a model, and a dataset with its card."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

    model = folder / "model"
    data = folder / "dataset" / "data"
    (model / "original").mkdir(parents=True)
    data.mkdir(parents=True)
    rows = {"input": ["red", "green", "blue", "cat"] * 3, "output": ["one", "two", "three", "dog"] * 3}
    columns = {**rows, "question": rows["output"], "answer": rows["input"]}
    pq.write_table(pa.table(columns), data / "train-00000-of-00001.parquet")
    (folder / "dataset" / "README.md").write_text("# Colours\n")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "max_position_embeddings": 512, "tie_word_embeddings": True}
    sizes |= {"vocab_size": VOCABULARY[family]}
    torch.manual_seed(0)
    if family == "llama3":
        write_ranks(model / "original" / "tokenizer.model")
        rope = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0}
        rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
        LlamaForCausalLM(LlamaConfig(**sizes, rope_parameters=rope)).save_pretrained(model)
    else:
        write_bpe(model)
        Qwen2ForCausalLM(Qwen2Config(**sizes)).save_pretrained(model)


@pytest.fixture(scope="module")
def workspaces(tmp_path_factory):
    """The workspace of each family."""
    folders = {}
    for family in VOCABULARY:
        folders[family] = tmp_path_factory.mktemp(family)
        write_workspace(folders[family], family)
    return folders


def tiny(config, output_dir, *, adapters):
    """The settings that a test adds to a command line: two small layers, on a CPU."""
    family = family_of(config)
    builder = {"llama3": "llama3_2.{}llama3_2", "qwen2": "qwen2.{}qwen2"}[family].format("lora_" if adapters else "")
    settings = [f"model=torchtune.models.{builder}", f"model.vocab_size={VOCABULARY[family]}"]
    settings += [f"model.{name}={size}" for name, size in SIZES.items()]
    settings += ["model.tie_word_embeddings=True", "device=cpu", "dtype=fp32", "optimizer.fused=False"]
    settings += ["gradient_accumulation_steps=1", "max_steps_per_epoch=2", f"output_dir={output_dir}"]
    return [*settings, "metric_logger.output_fmt=jsonl", "metric_logger.filename=log.jsonl"]


def run(words, workspace, output_dir, *, adapters):
    """Run a command line ``tune run …`` with tiny weights on one rank; return the options of torchrun."""
    assert words[:2] == ["tune", "run"]
    command = parse_command([word.replace("/workspace", str(workspace)) for word in words[2:]])
    recipe, config = find_targets(command.recipe, command.config)
    # The command line as it is, with the large model, has no mistake.
    load_and_check(config, command.overrides, recipe.load_main())
    overrides = [*command.overrides, *tiny(command.config, output_dir, adapters=adapters)]
    argv = ["--config", str(config), *overrides]
    screen = output_dir.with_suffix(".out")
    forker = shared_forker()
    forker.start_script(RECIPES / f"{current_name(recipe.name)}.py", argv, screen, 1)
    assert forker.wait() == [0], screen.read_text()[-4000:]
    assert (output_dir / "epoch_0" / ".complete").exists()
    assert all(record["loss"] > 0 for record in read_log(output_dir) if "loss" in record)
    return torchrun_arguments(command.torchrun, ["recipe.py"])


@pytest.mark.parametrize("name", list(MODELS))
def test_command_of_the_runtime_runs(name, workspaces, tmp_path):
    words = command_of(name)
    config = words[words.index("--config") + 1]
    assert config == MODELS[name]
    adapters = config.endswith("_lora")
    options = run(words, workspaces[family_of(config)], tmp_path / "output", adapters=adapters)
    if not adapters:
        assert (options.rdzv_endpoint, options.rdzv_backend) == ("localhost:29500", "c10d")


@pytest.mark.parametrize(
    ("method", "config"),
    [("full", "qwen2_5/1.5B"), ("lora", "qwen2_5/1.5B"), ("qlora", "llama3_2/1B"), ("dora", "llama3_2/3B")],
)
def test_command_of_the_sdk_runs(method, config, workspaces, tmp_path, monkeypatch):
    """TrainerClient.train(BuiltinTrainer(TorchTuneConfig(…))): what the plugin and the SDK make of it together."""
    for variable, value in {"PET_NNODES": "1", "PET_NPROC_PER_NODE": "2", "PET_NODE_RANK": "0"}.items():
        monkeypatch.setenv(variable, value)
    recipe, suffix, flags = PEFT[method]
    words = ["tune", "run", "--rdzv_endpoint=job-node-0-0.job:29500", recipe, "--config", f"{config}{suffix}"]
    words += ["output_dir=/workspace/output", "checkpointer.checkpoint_dir=/workspace/model"]
    if family_of(config) == "qwen2":
        words += ["tokenizer.path=/workspace/model/vocab.json", "tokenizer.merges_file=/workspace/model/merges.txt"]
    else:
        words += ["tokenizer.path=/workspace/model/original/tokenizer.model"]
    words += [*TRAINING, "dataset.data_dir=/workspace/dataset/.", *flags]
    if flags:
        words += [LORA_MODULES]
    words += DATASET
    options = run(words, workspaces[family_of(config)], tmp_path / "output", adapters=bool(flags))
    assert (options.nproc_per_node, options.rdzv_backend) == ("2", "static")


def test_dataset_named_by_a_text_keeps_its_arguments_in_any_order():
    """data_dir may come before the dataset that takes it; what the config sets besides stays."""
    command = ["dataset.data_dir=/data", "dataset=torchtune.datasets.instruct_dataset", "dataset.source=parquet"]
    expected = {"_component_": "torchtune.datasets.instruct_dataset", "packed": False}
    expected |= {"data_dir": "/data", "source": "parquet"}
    recipe, config = find_targets("full_finetune_distributed", "qwen2_5/1.5B_full")
    for overrides in (command, command[1:] + command[:1]):
        assert load_and_check(config, overrides, recipe.load_main()).dataset == expected


@pytest.mark.parametrize("name", list(MODELS))
def test_runtime_is_valid_by_the_published_models(name):
    trainer = pytest.importorskip("kubeflow_trainer_api.models", reason="pip install kubeflow-trainer-api")
    manifest = yaml.safe_load((KUBEFLOW / f"{name}.yaml").read_text())
    # The models drop what they do not know, so a field of a wrong name is missing in what they return.
    assert trainer.TrainerV1alpha1ClusterTrainingRuntime.from_dict(manifest).to_dict() == manifest


def test_job_is_valid_by_the_published_models():
    trainer = pytest.importorskip("kubeflow_trainer_api.models", reason="pip install kubeflow-trainer-api")
    manifest = yaml.safe_load((LAUNCH / "trainjob.yaml").read_text())
    assert trainer.TrainerV1alpha1TrainJob.from_dict(manifest).to_dict() == manifest


def test_job_that_prepares_data_is_valid_by_the_published_models():
    trainer = pytest.importorskip("kubeflow_trainer_api.models", reason="pip install kubeflow-trainer-api")
    manifest = yaml.safe_load((LAUNCH / "prepare_job.yaml").read_text())
    assert trainer.IoK8sApiBatchV1Job.from_dict(manifest).to_dict() == manifest


def test_job_of_the_training_operator_is_valid_by_the_published_models():
    """Its package needs the whole client of Kubernetes, so the tests do not install it."""
    operator = pytest.importorskip("kubeflow.training.api_client", reason="pip install kubeflow-training")
    manifest = yaml.safe_load((LAUNCH / "pytorchjob.yaml").read_text())

    class Response:
        data = json.dumps(manifest)

    client = operator.ApiClient()
    job = client.deserialize(Response, "KubeflowOrgV1PyTorchJob")
    assert client.sanitize_for_serialization(job) == manifest


def test_image_is_built_from_files_of_the_repository_for_a_user_who_is_not_root():
    text = (KUBEFLOW / "Dockerfile").read_text().replace("\\\n", " ")
    instructions = [line.split(None, 1) for line in text.splitlines() if re.match(r"[A-Z]+ ", line)]
    bases = [argument for word, argument in instructions if word == "FROM"]
    assert bases[-1].startswith("nvidia/cuda:")
    (user,) = [argument for word, argument in instructions if word == "USER"]
    assert int(user) > 0
    assert f"useradd --uid {user} " in text
    for name in MODELS:
        assert f"runAsUser: {user}\n" in (KUBEFLOW / f"{name}.yaml").read_text()
    copies = [argument.split() for word, argument in instructions if word == "COPY"]
    root = LAUNCH.parents[1]
    copied = []
    for *sources, _ in copies:
        if not sources[0].startswith("--from"):
            copied += sources
    assert all((root / source).exists() for source in copied)
    # The first stage has what tests/test_repository.py builds the wheel from, and nothing else.
    assert sorted(copied) == ["LICENSE", "README.md", "constraints.txt", "pyproject.toml", "recipes", "torchtune"]
    # The stages hand over the wheel where it was put; the command in the head names this file.
    wheels = re.search(r"pip wheel .*--wheel-dir (\S+)", text)[1]
    assert f"COPY --from=wheel {wheels}/*.whl /wheels/" in text
    assert "FROM python:3.12-slim AS wheel" in text
    assert "pip install --no-cache-dir --constraint /wheels/constraints.txt /wheels/*.whl" in text
    file = re.search(r"docker build -f (\S+)", text)[1]
    assert root / file == KUBEFLOW / "Dockerfile"


def test_extras_that_examples_name_exist():
    root = LAUNCH.parents[1]
    extras = tomllib.loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = set()
    for path in [*LAUNCH.rglob("*.*"), KUBEFLOW / "Dockerfile", *(root / "docs").glob("*.rst")]:
        for names in re.findall(r"torchtune\[([\w,-]+)\]", path.read_text()):
            named.update(names.split(","))
    assert {"ray", "s3"} <= named <= extras.keys()


@pytest.mark.slow
def test_lora_runs_on_two_nodes(workspaces, tmp_path):
    """The runtime's own command in two pods of one GPU, with the environment of Kubeflow's plugin for torch."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    output_dir = tmp_path / "output"
    words = command_of("llama3.2-3b-lora-nodes")
    words = [word.replace("/workspace", str(workspaces["llama3"])) for word in words[1:]]
    command = [sys.executable, "-m", "torchtune._cli.tune", *words, *tiny("llama3_2", output_dir, adapters=True)]
    environment = {**os.environ, "PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_MASTER_ADDR": "127.0.0.1"}
    environment |= {"PET_MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    pods = []
    for number in range(2):
        with open(tmp_path / f"pod_{number}", "w") as screen:
            variables = {**environment, "PET_NODE_RANK": str(number)}
            pods.append(subprocess.Popen(command, env=variables, stdout=screen, stderr=subprocess.STDOUT))
    codes = [pod.wait(300) for pod in pods]
    assert codes == [0, 0], (tmp_path / "pod_0").read_text()[-3000:] + (tmp_path / "pod_1").read_text()[-3000:]
    assert "2 processes" in (tmp_path / "pod_0").read_text()
    assert (output_dir / "epoch_0" / "adapter" / "adapter_model.safetensors").exists()
