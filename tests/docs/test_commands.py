"""Everything that README and the pages show is run, on a tiny model, or listed here with the reason why not."""

import contextlib
import doctest
import io
import logging
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

import torchtune.models._spec
from tests.docs import tiny_models
from tests.docs.pages import LANGUAGES, PAGES, ROOT, Block, Command, blocks_of, commands_of, edited
from tests.recipes.killing import Forker, shared_forker
from tests.torchtune.checkpoints.gguf_files import write_gguf
from torchtune._cli import tune
from torchtune._cli.run import parse_command
from torchtune._cli.torchrun import torchrun_arguments
from torchtune._recipe_registry import find_config, recipe_named_by, resolve_config, resolve_recipe
from torchtune.config import load_and_check
from torchtune.estimate import parse_cluster, parse_memory

# Commands that are shown and not run, each with the reason.
NOT_RUN = {
    "tune run --nproc-per-node 8 --config llama3_1/8B_full": "eight GPUs",
    "tune run --nnodes 2 --nproc-per-node 8 --rdzv-endpoint host:29500 --config llama3_3/70B_full_multinode": "2 hosts",
    "sbatch --nodes 2 examples/launch/slurm.sh llama3_3/70B_full output_dir=/shared/run": "needs Slurm",
    "docker build -f examples/launch/kubeflow/Dockerfile -t registry.example.com/torchtune:latest .": "needs Docker",
    "kubectl apply --server-side -f examples/launch/kubeflow/qwen2.5-1.5b.yaml": "needs a cluster",
    "pip install 'torchtune[ray]'": "changes the environment",
    "python examples/launch/ray_train.py --workers 16 --storage /shared/ray my_recipe.py llama3_1/8B_full": "16 GPUs",
    "pip install .": "changes the environment; tests/test_repository.py installs a wheel",
    "tune download HuggingFaceTB/SmolLM2-135M-Instruct": "needs the hub",
    "tune download meta-llama/Llama-3.2-1B-Instruct --hf-token $HF_TOKEN": "needs the hub",
    "make quickstart": "makes an environment of its own and downloads a model",
    "make dpo": "the same; tests/examples runs it with a tiny model",
    "make grpo": "the same",
    "make embed": "the same",
    "tune chat --model /tmp/SmolLM2-135M-Instruct": "reads the terminal",
    'tune chat --model /tmp/SmolLM2-135M-Instruct --adapter /tmp/run/epoch_2 --system "Answer in one sentence."': "",
    "tune serve /tmp/SmolLM2-135M-Instruct": "serves until it is stopped; tests/torchtune/_cli/test_serve.py runs it",
    "tune serve /tmp/SmolLM2-135M-Instruct --adapter orders=/tmp/run/epoch_0 --adapter other=/tmp/other/epoch_2": "",
    "tune run --nproc-per-node 8 generate --config generation prompts=questions.jsonl output=answers.jsonl": "the same",
    "tune chat --model /tmp/Llama-3.3-70B-Instruct --nproc-per-node 8": "eight GPUs",
    "tune serve /tmp/Llama-3.3-70B-Instruct --nproc-per-node 8": "eight GPUs",
    "curl localhost:8000/v1/chat/completions -d "
    """'{"model": "orders", "messages": [{"role": "user", "content": "Two teas"}], "temperature": 0}'""": "a server",
    "curl localhost:8000/v1/sessions/episode-7": "needs a server",
    "tune run --config qwen3/0.6B_lora_grpo_single_device dataset.source=my_shop.jsonl dataset.name=null "
    "environment._component_=my_shop.Shop max_turns=6 rewards=[]": "tests/recipes/test_environments.py trains so",
    "tune eval /tmp/SmolLM2-135M-Instruct --tasks tune_facts,tune_arithmetic,tune_texts": "needs the extra eval",
    "tune eval /tmp/SmolLM2-135M-Instruct --tasks hellaswag,arc_easy --limit 100 --chat-template": "needs the hub",
    "tune run eleuther_eval --config eleuther_evaluation tasks=[truthfulqa_mc2] limit=100": "needs the hub",
    "tune run eleuther_eval --config llama3_2_vision/11B_evaluation tasks=[mmmu_val_science] limit=10": "needs the hub",
    "tune eval /tmp/run": "needs a run; tests/recipes/test_best_validation.py has one",
    'tune run generate --config llama3_2_vision/11B_generation_v2 prompt.image=cat.png prompt.user="Who is it?"': "",
    "tune chat --model /tmp/Qwen3-VL-2B-Instruct --image cat.png": "needs a vision model, as the next two",
    "tune run generate --config generation checkpointer.checkpoint_dir=/tmp/Qwen3-VL-2B-Instruct "
    'prompt.user="Who is this?" prompt.image=cat.png': "tests/recipes/test_image_text.py has a small one",
    "tune eval /tmp/Qwen3-VL-2B-Instruct --data asked.jsonl --score exact": "",
    "make test": "runs this test",
    "make gpu": "needs a GPU; tests/benchmarks tries it on a CPU",
    "python benchmarks/bench_gpu.py llama-8b-lora ours --steps 20": "the same",
    "python benchmarks/count_cuda.py --compile > counts.jsonl": "the same",
    "python benchmarks/count_cuda.py --table counts.jsonl": "the same",
    "tune estimate --config llama3_1/8B_full --simulate 8xH100 --fit 24GiB": "simulates for minutes",
    "tune estimate --config llama3_1/8B_full --simulate 8xH100 tokenizer.max_seq_len=1048576 "
    "model._component_=torchtune.models.llama3_1.llama3_1 model.vocab_size=128256 model.num_layers=32 "
    "model.num_heads=32 model.num_kv_heads=8 model.embed_dim=4096 model.intermediate_dim=14336 "
    "model.max_seq_len=1048576 context_parallel_dim=8 data_parallel_shard_dim=-1 batch_size=1 "
    "gradient_accumulation_steps=1 enable_activation_checkpointing=True enable_activation_offloading=True "
    '"model_converters=[{_component_: torchtune.modules.TiledMLP, tile_size: 16384}]"': "simulates for half a minute",
    "python benchmarks/bf16_that_learns.py --checkpoint /tmp/SmolLM2-135M-Instruct": "takes minutes",
    "make bench": "makes an environment of its own and takes an hour",
    "tune run --config smol/135M_lora_single_device dataset.data_files=mine.jsonl device=cpu": "first_finetune",
    "tune estimate --config llama3_1/8B_full_single_device --simulate RTX4090 tokenizer.max_seq_len=2048": "seconds",
    "tune estimate --config llama3_1/8B_qlora_single_device --simulate RTX4090 tokenizer.max_seq_len=2048 "
    "batch_size=4": "the same",
    "tune estimate --config llama3_1/8B_lora_single_device --simulate RTX4090 --fit 22GiB "
    "tokenizer.max_seq_len=2048": "minutes",
    "tune download meta-llama/Meta-Llama-3.1-8B-Instruct --output-dir /tmp/Meta-Llama-3.1-8B-Instruct": "needs the hub",
    "tune run --config llama3_1/8B_qlora_single_device dataset.data_files=mine.jsonl dataset.packed=True "
    "tokenizer.max_seq_len=2048 compile=True": "needs a GPU",
    "tune run --nproc-per-node 8 --config qwen3/8B_lora dataset.data_files=mine.jsonl": "eight GPUs",
    "tune run --nproc-per-node 2 --config smol/135M_lora device=cpu dataset.data_files=mine.jsonl": "two processes",
    "tune estimate --config llama3_3/70B_lora --simulate 16xH100 tokenizer.max_seq_len=4096": "seconds",
    "tune estimate --config llama3_3/70B_full_multinode --simulate 64xH100 tokenizer.max_seq_len=4096": "seconds",
    "tune estimate --config llama3_3/70B_full_multinode --simulate 64xH100 tokenizer.max_seq_len=4096 "
    "tensor_parallel_dim=1 data_parallel_shard_dim=-1": "the same",
    "tune estimate --config llama3_3/70B_full_multinode --simulate 64xH100 tokenizer.max_seq_len=4096 "
    "tensor_parallel_dim=1 data_parallel_shard_dim=8 data_parallel_replicate_dim=8": "the same",
    "tune data prepare llama3_3/70B_lora dataset.data_files=mine.jsonl --output /shared/prepared": "needs a tokenizer",
    "sbatch --array=0-15 examples/launch/prepare_slurm.sh 16 my_config.yaml /shared/corpus": "needs Slurm; "
    "tests/examples/test_launch.py runs what its tasks, and those of the next, are told to do",
    "kubectl apply -f examples/launch/prepare_job.yaml": "needs Kubernetes",
    "tune run --nproc-per-node 8 --config llama3_3/70B_lora --grace 30 save_every_n_minutes=30 "
    "resume_from_checkpoint=True": "eight GPUs",
    "python examples/launch/prepare_ray.py my_config.yaml --output /shared/corpus --shards 16": "needs Ray",
    "python examples/launch/prepare_datatrove.py my_config.yaml --output /shared/corpus --shards 16": "needs datatrove",
    "tune data merge /shared/corpus": "needs a cluster; docs/data.rst shows it on one machine",
    "tune eval /tmp/kd --against /tmp/SmolLM2-135M-Instruct --data held_out.jsonl --score exact": "tutorial_serve.rst",
    "tune chat --model /tmp/orders": "reads the terminal",
    "tune chat --model /tmp/run": "reads the terminal",
    "tune serve /tmp/run": "serves until it is stopped",
    "vllm serve /tmp/orders_merged": "needs vLLM",
    "transformers serve": "serves until it is stopped; tests/torchtune/rlhf/test_samplers.py has a server",
}
# The pages' /tmp holds a tiny checkpoint and a tiny GGUF file under the names of those that one would download.
# What stands in commands that train or generate, and in the configs that they name -> what takes its place.
SUBSTITUTIONS = {
    "torchtune.models.smol.lora_smollm2_135m": "tests.docs.tiny_models.lora_smollm2_135m",
    "torchtune.models.smol.qlora_smollm2_135m": "tests.docs.tiny_models.qlora_smollm2_135m",
    "torchtune.models.smol.smollm2_135m": "tests.docs.tiny_models.smollm2_135m",
    "device: cuda": "device: cpu",
    "max_new_tokens: 300": "max_new_tokens: 8",
    "dtype: bf16": "dtype: fp32",
}
CHECKER = doctest.OutputChecker()
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("docs")
    tiny_models.make_outline(tmp_path_factory.mktemp("outline") / "SmolLM2-135M-Instruct")
    write_gguf(folder / "SmolLM2-135M-Instruct.gguf", "llama_tied", "Q8_0")
    return tiny_models.make(folder / "SmolLM2-135M-Instruct")


class Page:
    """The folder of a page, and what is done in it. ``/tmp`` of the page is a folder of the test."""

    def __init__(self, folder: Path, forker: Forker) -> None:
        self.forker = forker
        self.tmp = folder / "tmp"
        self.cwd = folder / "cwd"
        self.names: dict = {"__name__": "page"}

    def placed(self, text: str, *, tiny: bool = False) -> str:
        for old, new in SUBSTITUTIONS.items() if tiny else ():
            text = text.replace(old, new)
        # What a command has written, such as a config, may name the folder of the test already.
        return text.replace(f"{self.tmp}/", "/tmp/").replace("/tmp/", f"{self.tmp}/")

    def shown(self, text: str) -> str:
        for old, new in SUBSTITUTIONS.items():
            text = text.replace(new, old) if "." in new else text
        return text.replace(str(self.tmp), "/tmp")

    def run(self, command: Command) -> None:
        words = shlex.split(command.text)
        if words[0] == "torchrun":
            code, output = self._on_ranks([self.placed(word) for word in words[1:]])
        elif words[0] not in ("tune", "python"):
            done = subprocess.run(
                self.placed(command.text), shell=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
            code, output = done.returncode, done.stdout
        else:
            shows_sizes = "--dry-run" in words and re.search("parameters|gradients", command.output)
            code, output = self._in_process(words, tiny=not shows_sizes)
        output = self.shown(output)
        expected = command.output
        if not expected:
            assert code == 0, f"$ {command.text}\nexit code {code}\n{output}"
        else:
            fits = CHECKER.check_output(expected + "\n", output.strip("\n") + "\n", FLAGS)
            fits &= code == (2 if "error: " in expected else 0)
            assert fits, f"$ {command.text}\nshown:\n{expected}\nprinted (exit code {code}):\n{output}"

    def _on_ranks(self, words: list[str]) -> tuple[int, str]:
        args = torchrun_arguments([], words)
        output = self.tmp / "torchrun.out"
        self.forker.start_script(
            Path(args.training_script), args.training_script_args, output, int(args.nproc_per_node)
        )
        return max(map(abs, self.forker.wait())), output.read_text()

    def _in_process(self, words: list[str], *, tiny: bool) -> tuple[int, str]:
        tiny &= words[1] in ("run", "selfcheck") and "--help" not in words
        arguments = [self._argument(word, before, tiny) for before, word in pairwise(words)]
        output = io.StringIO()
        code = 0
        argv = sys.argv
        handler = logging.StreamHandler(output)
        handler.setFormatter(logging.Formatter("%(levelname)s:%(name)s:%(message)s"))
        logger = logging.getLogger("torchtune")
        logger.addHandler(handler)
        logger.setLevel(logging.NOTSET)  # as in a new process
        try:
            with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
                if words[0] == "tune":
                    sys.argv = ["tune", *arguments]
                    tune.main()
                else:
                    sys.argv = arguments
                    runpy.run_path(arguments[0], run_name="__main__")
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        finally:
            sys.argv = argv
            logger.removeHandler(handler)
        return code, output.getvalue()

    def _argument(self, word: str, before: str, tiny: bool) -> str:
        if before != "--config" or (find_config(word) is None and not Path(word).is_file()):
            return self.placed(word, tiny=tiny)
        text = (find_config(word) or Path(word)).read_text()
        text = self.placed(text, tiny=tiny)
        if not tiny:  # sizes are those of the real model: so must be those of its checkpoint
            text = text.replace(f"{self.tmp}/SmolLM2-135M-Instruct", str(tiny_models.OUTLINE[0]))
        path = self.tmp / "configs" / f"{word.removesuffix('.yaml').replace('/', '_')}.yaml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return str(path)

    def do(self, block: Block) -> None:
        if block.language == "console":
            for command in commands_of(block):
                if command.text not in NOT_RUN:
                    self.run(command)
        elif block.language == "diff":
            path = Path(block.caption)
            path.write_text(edited(path.read_text(), block.text))
        elif block.caption:
            Path(block.caption).parent.mkdir(parents=True, exist_ok=True)
            Path(block.caption).write_text(block.text)
        elif block.language == "python":
            code = compile(self.placed(block.text), f"{block.page.name}:{block.line}", "exec")
            with contextlib.redirect_stdout(io.StringIO()):
                exec(code, self.names)
        elif block.language == "yaml":
            yaml.safe_load(block.text)


@pytest.fixture
def page_folder(
    imported_aside,
    checkpoint,
    tmp_path,
    tmp_path_factory,
    monkeypatch,
):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path_factory.getbasetemp() / "datasets_cache"))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    page = Page(tmp_path, shared_forker())
    page.cwd.mkdir()
    shutil.copytree(checkpoint.parent, page.tmp)
    monkeypatch.chdir(page.cwd)
    monkeypatch.setattr(sys, "path", [str(page.cwd), *sys.path])
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(torchtune.models._spec, "_registered", {})
    modules = set(sys.modules)
    yield page
    for name in set(sys.modules) - modules:
        file = getattr(sys.modules[name], "__file__", None)
        if file and str(tmp_path) in file:
            del sys.modules[name]


@pytest.mark.slow
@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_code_and_commands_of_a_page_run(path, page_folder):
    for block in blocks_of(path):
        page_folder.do(block)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_every_block_is_of_a_kind_that_is_checked(path):
    for block in blocks_of(path):
        location = f"{path.name}:{block.line}"
        assert block.language in LANGUAGES, f"{location}: say which language the block is in, one of {LANGUAGES}"
        assert block.language != "diff" or block.caption, f"{location}: an edit needs the name of its file as caption"
        lines = block.text.splitlines()
        hidden = block.language == "text" and any(line.startswith(("$ ", "tune ", "pip ", "make ")) for line in lines)
        assert not hidden, f"{location}: commands belong into a console block"


def test_commands_that_are_not_run_are_still_shown():
    commands_of_pages = set()
    for page in PAGES:
        for block in blocks_of(page):
            if block.language == "console":
                commands_of_pages.update(command.text for command in commands_of(block))
    assert not NOT_RUN.keys() - commands_of_pages


def test_commands_that_are_not_run_are_valid(tmp_path, monkeypatch):
    """Options are known, configs and files exist, and settings fit their recipes."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    (tmp_path / "my_shop.py").write_text("class Shop: pass\n")  # a module that a page lets its reader write
    parser = tune.TuneCLIParser()
    verbs = re.findall(r"^([a-z]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for text in NOT_RUN:
        words = shlex.split(text)
        if words[0] == "make":
            assert set(words[1:]) <= {*verbs}, text
        elif words[0] in ("python", "sbatch", "kubectl", "docker"):
            assert any((ROOT / word).is_file() for word in words), text
        elif words[0] == "tune":
            check_tune(parser.parse_args(words[1:]), text)


def check_tune(args, text):
    """Check the settings of a command of ``tune`` that its parser accepts."""
    if not hasattr(args, "tokens"):
        if hasattr(args, "config"):
            load_and_check(
                resolve_config(args.config), args.overrides, recipe_named_by(find_config(args.config)).load_main()
            )
        return
    command = parse_command(args.tokens)
    config = resolve_config(command.config, command.recipe)
    recipe = recipe_named_by(config) if command.recipe is None else resolve_recipe(command.recipe)
    load_and_check(config, command.overrides, recipe.load_main())
    if command.simulate:
        assert parse_cluster(command.simulate)[0] >= 1, text
    if command.fit:
        assert parse_memory(command.fit) > 0, text
