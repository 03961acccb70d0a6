"""``tune download``."""

import argparse
import os
from pathlib import Path

from torchtune._cli.subcommand import Subcommand
from torchtune._hub import download
from torchtune.utils import UserError


class Download(Subcommand):
    """Subcommand that downloads a model from the Hugging Face hub."""

    name = "download"
    usage = "tune download <repo-id> [OPTIONS]"
    help = "Download a model from the Hugging Face hub"
    description = "Download a model from the Hugging Face hub. Run again, it fetches only what is missing."
    epilog = """
        examples:
          $ tune download HuggingFaceTB/SmolLM2-135M-Instruct
          Successfully downloaded model repo and wrote to the following locations:
          /tmp/SmolLM2-135M-Instruct/config.json
          ...
          $ tune download meta-llama/Llama-3.2-1B-Instruct --ignore-patterns "original/*" --hf-token <TOKEN>
        A gated repository needs a token (huggingface.co/settings/tokens) of an account with access to it.
    """

    def _add_arguments(self) -> None:
        add = self._parser.add_argument
        add("repo_id", help="name of the repository on the hub, as owner/name")
        add("--output-dir", type=Path, help="directory for the files (default: /tmp/<name>)")
        add("--hf-token", default=os.environ.get("HF_TOKEN"), help="token for gated repositories (default: $HF_TOKEN)")
        add("--ignore-patterns", action="append", help="glob of files to skip; repeatable")
        add("--source", choices=("huggingface", "kaggle"), default="huggingface", help="hub to download from")
        add("--kaggle-username", help=argparse.SUPPRESS)
        add("--kaggle-api-key", help=argparse.SUPPRESS)

    def _run(self, args: argparse.Namespace) -> None:
        if args.source == "kaggle" or args.kaggle_username or args.kaggle_api_key:
            raise UserError(
                "--source kaggle: Kaggle is not supported: download the model with the kagglehub package and set "
                "checkpointer.checkpoint_dir to its folder."
            )
        output_dir = args.output_dir or Path("/tmp") / args.repo_id.rstrip("/").rpartition("/")[2]
        if args.ignore_patterns:
            print(f"Ignoring files matching the following patterns: {', '.join(args.ignore_patterns)}")
        folder = download(args.repo_id, output_dir, token=args.hf_token, ignore_patterns=args.ignore_patterns)
        print("Successfully downloaded model repo and wrote to the following locations:")
        for path in sorted(folder.iterdir()):
            print(path)
