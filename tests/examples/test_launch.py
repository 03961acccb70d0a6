"""The scripts and manifests under examples/launch: their commands are right, and Slurm's is run on two nodes."""

import ast
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.recipes.runs import RECIPES, write_config
from tests.tiny import CHATS, write_conversations, write_tokenizer
from torchtune._cli.run import parse_command
from torchtune._cli.torchrun import torchrun_arguments
from torchtune._recipe_registry import recipe_named_by, resolve_config
from torchtune.config import load_and_check

LAUNCH = Path(__file__).parents[2] / "examples" / "launch"
SLURM = {
    "SLURM_JOB_ID": "41237",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_GPUS_ON_NODE": "1",
    "SLURM_JOB_NODELIST": "node[1-2]",
}
SKY = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NUM_GPUS_PER_NODE": "8"}
SKY |= {"SKYPILOT_TASK_ID": "sky-1", "SKYPILOT_SETUP_NODE_RANK": "0", "HF_TOKEN": "token"}
# What Kubeflow's controllers tell every pod of the manifests.
TRAINER = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "8", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "finetune-node-0-0"}
TRAINER |= {"PET_MASTER_PORT": "29400"}
OPERATOR = {"PET_NNODES": "2:4", "PET_NPROC_PER_NODE": "8", "PET_RDZV_BACKEND": "c10d", "PET_MAX_RESTARTS": "10"}
OPERATOR |= {"PET_RDZV_ENDPOINT": "finetune-worker-0:23456", "PET_RDZV_ID": "finetune"}


def program(path, text):
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def shell(script, folder, arguments, environment):
    """Run a shell script in which ``tune`` notes how it was called; returns the words of each call."""
    bin = folder / "bin"
    program(bin / "tune", f'#!/bin/bash\nprintf "%s\\0" "$@" >> {folder}/calls; echo >> {folder}/calls\n')
    program(bin / "srun", '#!/bin/bash\nshift; "$@"\n')
    program(bin / "scontrol", '#!/bin/bash\n[ "$*" = "show hostnames node[1-2]" ] && printf "node1\\nnode2\\n"\n')
    program(bin / "pip", "#!/bin/bash\n")
    path = {"PATH": f"{bin}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", script, "script", *arguments], env={**os.environ, **path, **environment}, capture_output=True
    )
    assert (done.returncode, done.stderr) == (0, b"")
    return [line.split("\0")[:-1] for line in (folder / "calls").read_text().splitlines()]


def manifest(name):
    return yaml.safe_load((LAUNCH / name).read_text())


def check(words, **expected):
    """A ``tune run`` command: its config and keys are right, and torchrun is told what is expected."""
    assert words[0] == "run"
    command = parse_command(words[1:])
    config = resolve_config(command.config, command.recipe)
    settings = load_and_check(config, command.overrides, recipe_named_by(config).load_main())
    assert settings.resume_from_checkpoint, "what is started again must go on"
    passed = torchrun_arguments(command.torchrun, ["recipe.py"])
    assert {name: getattr(passed, name) for name in expected} == expected


def test_slurm_script_starts_torchrun_on_every_node(tmp_path):
    script = (LAUNCH / "slurm.sh").read_text()
    (words,) = shell(script, tmp_path, ["llama3_3/70B_full", "epochs=2", "output_dir=/a b"], SLURM)
    assert words[-2:] == ["epochs=2", "output_dir=/a b"]
    check(words, nnodes="2", rdzv_id="41237", rdzv_endpoint="node1:21237", rdzv_backend="c10d", max_restarts=3)
    options = [line.split()[1] for line in script.splitlines() if line.startswith("#SBATCH ")]
    assert {"--requeue", "--signal=TERM@600", "--ntasks-per-node=1"} <= set(options)
    refused = subprocess.run(["bash", LAUNCH / "slurm.sh"], capture_output=True, text=True, env={**os.environ, **SLURM})
    assert "usage: sbatch slurm.sh CONFIG" in refused.stderr


def test_skypilot_task_downloads_and_starts_torchrun(tmp_path):
    task = manifest("skypilot.yaml")
    downloads, words = shell(task["setup"] + task["run"], tmp_path, [], SKY | task["envs"])
    assert downloads[0] == "download"
    check(words, nnodes="2", nproc_per_node="8", rdzv_endpoint="10.0.0.1:29500", rdzv_backend="c10d")


def test_kubeflow_trainer_sets_ranks_by_its_environment(monkeypatch):
    trainer = manifest("trainjob.yaml")["spec"]["trainer"]
    for name, value in TRAINER.items():
        monkeypatch.setenv(name, value)
    assert (str(trainer["numNodes"]), str(trainer["numProcPerNode"])) == ("2", "8")
    assert trainer["command"][0] == "tune"
    check(trainer["command"][1:], nnodes="2", node_rank=1, rdzv_backend="static", standalone=False, max_restarts=3)


def test_kubeflow_operator_job_is_elastic(monkeypatch):
    spec = manifest("pytorchjob.yaml")["spec"]
    worker = spec["pytorchReplicaSpecs"]["Worker"]
    policy = spec["elasticPolicy"]
    assert policy["minReplicas"] <= worker["replicas"] <= policy["maxReplicas"]
    (container,) = worker["template"]["spec"]["containers"]
    assert container["name"] == "pytorch", "the operator looks for a container of this name"
    for name, value in OPERATOR.items():
        monkeypatch.setenv(name, value)
    check(container["command"][1:], nnodes="2:4", rdzv_backend="c10d", max_restarts=10, standalone=False)


def test_ray_train_worker_trains_and_resumes(tmp_path):
    """Its worker's function runs without Ray; the rest is compiled."""
    source = (LAUNCH / "ray_train.py").read_text()
    tree = ast.parse(source)
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {"ray.train.torch", "torchtune.config"} <= imported
    names = {"__name__": "ray_train"}
    exec(compile(source, "ray_train.py", "exec"), names)
    name = "full_finetune_distributed"
    output_dir = tmp_path / "output"
    config = write_config(name, tmp_path, output_dir)
    overrides = ["resume_from_checkpoint=True", "max_steps_per_epoch=2"]
    names["train"]({"recipe": str(RECIPES / f"{name}.py"), "config": str(config), "overrides": overrides})
    assert (output_dir / "epoch_0" / ".complete").exists()


@pytest.mark.slow
def test_ray_train_runs_on_two_workers(tmp_path):
    pytest.importorskip("ray.train", reason="pip install 'torchtune[ray]'")
    name = "full_finetune_distributed"
    output_dir = tmp_path / "output"
    config = write_config(name, tmp_path, output_dir, max_steps_per_epoch=2)
    options = ["--cpu", "--workers", "2", "--storage", str(tmp_path / "storage")]
    command = [sys.executable, LAUNCH / "ray_train.py", *options, RECIPES / f"{name}.py", config, "device=cpu"]
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert (output_dir / "epoch_0" / ".complete").exists()
    assert "[rank=0, world_size=2]" in done.stdout + done.stderr


def test_ray_train_says_a_mistake_before_workers_start(tmp_path):
    """In a process of its own, without Ray, which is imported after the config was checked."""
    config = write_config("full_finetune_distributed", tmp_path, tmp_path / "output")
    command = [sys.executable, LAUNCH / "ray_train.py", "--workers", "2", "--storage", tmp_path]
    command += [RECIPES / "full_finetune_distributed.py", config, "epochz=2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 2, done.stderr
    assert done.stderr.endswith("command line: epochz: there is no such setting; did you mean 'epochs'?\n")
    assert "Traceback" not in done.stderr


def python_example(name):
    """Names of a Python example whose engine is not installed here: all but its function ``main`` can be used."""
    source = (LAUNCH / name).read_text()
    names = {"__name__": name}
    exec(compile(source, name, "exec"), names)
    return names, {node.module for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)}


def prepared_by_slurm(folder, config, output, index):
    script = (LAUNCH / "prepare_slurm.sh").read_text()
    task = {"SLURM_ARRAY_TASK_ID": str(index), "SLURM_CPUS_PER_TASK": "1"}
    return shell(script, folder, ["2", config, output, "dataset_val=null"], task)[-1]


def prepared_by_kubernetes(folder, config, output, index):
    spec = manifest("prepare_job.yaml")["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    (shards,) = container["env"]
    assert (spec["completionMode"], str(spec["completions"])) == ("Indexed", shards["value"])
    command = shlex.join(container["command"])
    for printed, used in (("llama3_3/70B_lora", config), ("/shared/prepared", output)):
        assert printed in command
        command = command.replace(printed, used)
    *words, data, tokenizer = shell(command, folder, [], {"JOB_COMPLETION_INDEX": str(index), "SHARDS": "2"})[-1]
    assert data.startswith("dataset.data_files=")
    assert tokenizer.startswith("tokenizer.path=")
    return words


def prepared_by_ray(folder, config, output, index):
    names, _ = python_example("prepare_ray.py")
    job = {"config": config, "overrides": [], "output": output, "shards": 2, "cpus": 1}
    return called(lambda: names["prepare"](job, index))


def prepared_by_datatrove(folder, config, output, index):
    names, imported = python_example("prepare_datatrove.py")
    assert "datatrove.executor" in imported
    job = {"config": config, "overrides": [], "output": output, "cpus": 1}
    return called(lambda: names["prepare"](None, index, 2, job=job))


def called(prepare):
    """Words of the command that a function starts, without its first, ``tune``."""
    commands = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(subprocess, "run", lambda words, check: commands.append(words))
        prepare()
    ((program_name, *words),) = commands
    assert program_name == "tune"
    return words


@pytest.mark.parametrize(
    "prepared_by", [prepared_by_slurm, prepared_by_kubernetes, prepared_by_ray, prepared_by_datatrove]
)
def test_engines_prepare_shards_that_can_be_joined(prepared_by, tmp_path, tune):
    """What each engine's task is told to do is done here; the engines are not installed."""
    write_tokenizer(tmp_path)
    tokenizer = {"_component_": "torchtune.tokenizers.hf_tokenizer", "path": str(tmp_path), "max_seq_len": 128}
    data = write_conversations(tmp_path / "chats.jsonl", 300)
    settings = yaml.safe_load(resolve_config("smol/135M_lora_single_device").read_text())
    config = tmp_path / "mine.yaml"
    config.write_text(yaml.safe_dump({**settings, "tokenizer": tokenizer, "dataset": {**CHATS, "source": str(data)}}))
    output = str(tmp_path / "prepared")
    for index in range(2):
        words = prepared_by(tmp_path, str(config), output, index)
        assert words[:2] == ["data", "prepare"]
        assert f"shard {index}/2: " in tune(*words).out
    assert "dataset: 2 shards, 300 rows" in tune("data", "merge", output).out


@pytest.fixture
def namespaces():
    """Two network namespaces that a cable connects; or why there are none."""
    names = [f"tune{os.getpid()}{node}" for node in "ab"]
    lines = [f"ip netns add {name}" for name in names]
    lines += [f"ip link add eth0 netns {names[0]} type veth peer name eth0 netns {names[1]}"]
    for number, name in enumerate(names, start=1):
        lines += [f"ip -n {name} addr add 10.77.0.{number}/24 dev eth0"]
        lines += [f"ip -n {name} link set {device} up" for device in ("lo", "eth0")]
    try:
        for line in lines:
            subprocess.run(shlex.split(line), check=True, capture_output=True, text=True)
        yield names
    except (subprocess.CalledProcessError, FileNotFoundError) as error:
        yield str(getattr(error, "stderr", "") or error).strip()
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def nodes(folder, namespaces):
    """``srun`` and ``scontrol`` for two nodes, each in a network of its own if there are any."""
    call = f'"$@" > {folder}/node_$node.log 2>&1 & pids="$pids $!"'
    head = "localhost"
    if isinstance(namespaces, list):
        head = "10.77.0.1"
        node_settings = (
            f"PET_LOCAL_ADDR=10.77.0.$node PET_RDZV_CONF=is_host=$((2 - node)) ip netns exec {namespaces[0][:-1]}"
        )
        call = f"GLOO_SOCKET_IFNAME=eth0 {node_settings}$(echo ab | cut -c$node) {call}"
    program(
        folder / "bin" / "srun",
        f"#!/bin/bash\nshift\nfor node in 1 2; do {call}; done\nworst=0\n"
        "for pid in $pids; do wait $pid; code=$?; (( code > worst )) && worst=$code; done; exit $worst\n",
    )
    program(folder / "bin" / "scontrol", f'#!/bin/bash\necho "$@" >> {folder}/scontrol.log; echo {head}; echo other\n')
    program(folder / "bin" / "tune", f'#!/bin/bash\nexec {sys.executable} -m torchtune._cli.tune "$@"\n')


# Every process tells itself and its launcher to stop, as Slurm does before the time is up, and ends like a recipe.
STOPPED = """
import os, signal, sys
from dataclasses import dataclass
from pathlib import Path

from torchtune import config, supervision, training


@dataclass
class Settings:
    # Folder.
    output_dir: str
    # Whether to go on.
    resume_from_checkpoint: bool = False


@config.parse
def recipe_main(cfg: Settings) -> int:
    import torch

    dims = training.ParallelDims.start(torch.device("cpu"), dp_shard=-1)
    with supervision.StopSignal() as stop:
        ranks = dims.sum(1)
        for pid in (os.getpid(), os.getppid()):
            os.kill(pid, signal.SIGTERM)
        said = f"rank {os.environ['RANK']} of {ranks}, {stop.requested=}, {cfg.resume_from_checkpoint=}"
        Path(cfg.output_dir, said).touch()
    return 75


if __name__ == "__main__":
    sys.exit(recipe_main())
"""


@pytest.mark.slow
def test_slurm_job_of_two_nodes_is_requeued_after_its_signal(tmp_path, namespaces):
    """Slurm tells every process to stop before the time is up; the job is queued again, and will resume."""
    (tmp_path / "mine.py").write_text(STOPPED)
    output_dir = tmp_path / "output"
    config = tmp_path / "mine.yaml"
    output_dir.mkdir()
    config.write_text(f"recipe: {tmp_path / 'mine.py'}\noutput_dir: {output_dir}\n")
    nodes(tmp_path, namespaces)
    environment = {**os.environ, **SLURM, "OMP_NUM_THREADS": "1"}
    environment["PATH"] = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run([LAUNCH / "slurm.sh", str(config)], env=environment, capture_output=True, timeout=600)
    log = (tmp_path / "node_1.log").read_text() + (tmp_path / "node_2.log").read_text()
    assert done.returncode == 75, log[-4000:]
    expected = {f"rank {rank} of [2], stop.requested=True, cfg.resume_from_checkpoint=True" for rank in range(2)}
    assert {path.name for path in output_dir.iterdir()} == expected, log[-4000:]
    calls = (tmp_path / "scontrol.log").read_text().splitlines()
    assert calls == ["show hostnames node[1-2]", "requeue 41237"]
    if isinstance(namespaces, str):
        pytest.skip(f"two nodes met on one network; two are not permitted here: {namespaces}")
