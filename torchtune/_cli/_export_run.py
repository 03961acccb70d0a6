"""``tune export``: write the files to a temporary folder, check them, and move them to the output folder."""

import argparse
import shlex
import shutil
from pathlib import Path

from torchtune._cli._export_check import Check, FailedCheck, check_files, say
from torchtune._cli._export_files import Trained, find_trained, write_files
from torchtune._cli._find_recipe import is_classifier
from torchtune.checkpoints import ADAPTER_CONFIG_FILE
from torchtune.evaluation import EvaluationError
from torchtune.reports import model_card
from torchtune.utils import FolderLock, UserError, atomic_directory, clear_leftovers, read_json, write_json

# Record of an export and its check, in its folder.
RECORD = "torchtune_export.json"


def export(args: argparse.Namespace) -> None:
    """Export a checkpoint as the arguments of ``tune export`` define.

    Raises:
        UserError: the checkpoint does not fit the format, the check fails, the output folder is not empty and not an
            earlier export, or the disk is full. The output folder then stays unchanged.
    """
    trained = find_trained(args.model)
    _check_format(trained, args.to)
    label = args.to if args.quant is None else f"{args.to}-{args.quant}"
    output = args.output or trained.checkpoint.resolve().with_name(f"{trained.checkpoint.resolve().name}-{label}")
    output = output.expanduser()
    if output.exists() and not (output / RECORD).is_file() and (not output.is_dir() or any(output.iterdir())):
        raise UserError(f"--output: {output} is there already and is no export: name a new folder.")
    with FolderLock(output.parent, name=f".{output.name}.lock", key="--output").held():
        clear_leftovers(output)
        check = _write(trained, args, output)
    print("\n".join([*check.lines(), f"wrote       {output} ({_size(output)})", *_commands(args.to, output)]))
    if args.push:
        _push(output, args.push, upload=args.yes)


def _write(trained: Trained, args: argparse.Namespace, output: Path) -> Check:
    """Write the files to a temporary folder, check them, and move them to the output folder."""
    with atomic_directory(output) as temporary:
        files = temporary / "files"
        say("writing", f"the files of {output}")
        write_files(trained, args.to, args.quant, files, temporary / "merged")
        check = _check(trained, args, files, temporary / "base")
        shutil.rmtree(temporary / "base", ignore_errors=True)
        record = {"checkpoint": str(trained.checkpoint), "to": args.to, "quant": args.quant, "check": check.numbers()}
        write_json(files / RECORD, record)
        if trained.run is not None:  # otherwise, keep the README of the checkpoint
            library = "peft" if args.to == "adapter" else "transformers"
            card = model_card(trained.run, check=check.verdict(), library=library)
            (files / "README.md").write_text(card, encoding="utf-8")
        for path in list(files.iterdir()):
            path.rename(temporary / path.name)
        files.rmdir()
    return check


def _check(trained: Trained, args: argparse.Namespace, files: Path, aside: Path) -> Check:
    """Check the files, unless ``--no-check`` is set; ``--check`` requires it."""
    if args.check is False:
        return Check(reason="of --no-check")
    try:
        check = check_files(trained, args.to, args.quant, files, aside, args.device)
    except EvaluationError as error:
        raise FailedCheck(str(error)) from error
    if args.check and check.measured is None:
        raise UserError(f"--check: the files cannot be checked, because {check.reason}.")
    return check


def _check_format(trained: Trained, to: str) -> None:
    if to in ("adapter", "merged") and trained.adapter is None:
        raise UserError(f"{trained.checkpoint} holds no adapter, all weights were trained: choose --to hf.")
    if to == "hf" and trained.adapter is not None:
        raise UserError(f"{trained.checkpoint} was trained as an adapter: choose --to merged, or --to adapter.")
    if to in ("gguf", "ollama") and is_classifier(trained.checkpoint):
        raise UserError(
            f"{trained.checkpoint} is a classifier or a reward model, and GGUF files are written of language models: "
            "choose --to hf."
        )


def _size(folder: Path) -> str:
    sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
    return f"{len(sizes):,} files, {sum(sizes):,} bytes"


def _commands(to: str, output: Path) -> list[str]:
    """Return the commands that serve an export."""
    folder = shlex.quote(str(output.resolve()))
    name = shlex.quote(output.resolve().name)
    if to == "adapter":
        settings = read_json(output / ADAPTER_CONFIG_FILE)
        largest_rank = max([settings["r"], *settings.get("rank_pattern", {}).values()])
        max_lora_rank = max(8, 2 ** (largest_rank - 1).bit_length())  # vLLM requires powers of two
        base = shlex.quote(str(settings["base_model_name_or_path"]))
        options = f"--enable-lora --max-lora-rank {max_lora_rank} --lora-modules {name}={folder}"
        return [f"serve       vllm serve {base} {options}"]
    if to == "ollama":
        return [f"serve       ollama create {name} -f {folder}/Modelfile && ollama run {name}"]
    if to == "gguf":
        return [f"serve       llama-server -m {folder}/{next(output.glob('*.gguf')).name}"]
    return [f"serve       vllm serve {folder}", f"            transformers serve {folder}"]


def _push(folder: Path, repo_id: str, *, upload: bool) -> None:
    from torchtune import _hub

    files = sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("."))
    for path in files:
        print(f"{'push':<12}{path.relative_to(folder)} ({path.stat().st_size:,} bytes)")
    if not upload:
        print(f"{'':<12}nothing is uploaded: add --yes to upload {len(files)} files to {repo_id}")
        return
    print(f"{'':<12}{_hub.upload(folder, repo_id)}")
