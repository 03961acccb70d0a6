"""``tune download``."""

import argparse
import errno
import os
import re
import textwrap
from pathlib import Path

from torchtune._cli.subcommand import Subcommand
from torchtune.utils import UserError, explain_os_error, refuse_foreign, write_json

REPO_ID_FILE = "original_repo_id.json"


class Download(Subcommand):
    """Downloads a model from the Hugging Face hub."""

    def __init__(self, subparsers: argparse._SubParsersAction) -> None:
        self._parser = subparsers.add_parser(
            "download",
            prog="tune download",
            usage="tune download <repo-id> [OPTIONS]",
            help="Download a model from the Hugging Face hub",
            description="Download a model from the Hugging Face hub. Run again, it fetches only what is missing.",
            formatter_class=argparse.RawTextHelpFormatter,
            epilog=textwrap.dedent("""\
                examples:
                  $ tune download HuggingFaceTB/SmolLM2-135M-Instruct
                  Successfully downloaded model repo and wrote to the following locations:
                  /tmp/SmolLM2-135M-Instruct/config.json
                  ...
                  $ tune download meta-llama/Llama-3.2-1B-Instruct --ignore-patterns "original/*" --hf-token <TOKEN>
                A gated repository needs a token (huggingface.co/settings/tokens) of an account that has its access.
                """),
        )
        self._add_arguments()
        self._parser.set_defaults(func=self._download_cmd)

    def _add_arguments(self) -> None:
        add = self._parser.add_argument
        add("repo_id", help="name of the repository on the hub, as owner/name")
        add("--output-dir", type=Path, help="directory for the files (default: /tmp/<name>)")
        add("--hf-token", default=os.environ.get("HF_TOKEN"), help="token for gated repositories (default: $HF_TOKEN)")
        add("--ignore-patterns", action="append", help="glob of files to leave out; may be given several times")
        add("--source", choices=("huggingface", "kaggle"), default="huggingface", help="hub to download from")
        add("--kaggle-username", help=argparse.SUPPRESS)
        add("--kaggle-api-key", help=argparse.SUPPRESS)

    def _download_cmd(self, args: argparse.Namespace) -> None:
        if args.source == "kaggle" or args.kaggle_username or args.kaggle_api_key:
            raise UserError(
                "--source kaggle: Kaggle is no longer a source: download the model with the kagglehub package and set "
                "checkpointer.checkpoint_dir to its folder."
            )
        output_dir = args.output_dir or Path("/tmp") / args.repo_id.rstrip("/").rpartition("/")[2]
        if args.ignore_patterns:
            print(f"Ignoring files matching the following patterns: {', '.join(args.ignore_patterns)}")
        folder = download(args.repo_id, output_dir, token=args.hf_token, ignore_patterns=args.ignore_patterns)
        print("Successfully downloaded model repo and wrote to the following locations:")
        for path in sorted(folder.iterdir()):
            print(path)


def download(repo_id: str, output_dir: Path, *, token: str | None, ignore_patterns: list[str] | None) -> Path:
    """Download ``repo_id`` into ``output_dir``; what is already there is not fetched again.

    Raises:
        UserError: the repository does not exist or access is denied, there is no network or no disk space, or another
            user owns ``output_dir``.
    """
    from huggingface_hub import HfApi, constants, errors, snapshot_download

    if token is not None and not re.fullmatch(r"[!-~]*", token):
        raise UserError("--hf-token: a token is of letters, digits and signs, without spaces: copy it again.")
    refuse_foreign(output_dir, "--output-dir")
    try:
        # Checked first: without a network, snapshot_download accepts a partial folder.
        HfApi(token=token).model_info(repo_id)
        _make_own(output_dir)
        folder = snapshot_download(repo_id, local_dir=output_dir, ignore_patterns=ignore_patterns, token=token)
    except errors.HFValidationError as error:
        raise UserError(f"'{repo_id}' is not the name of a repository: it has the form owner/name.") from error
    except errors.GatedRepoError as error:
        how = (
            "the account of your token has no access: ask for it on the repository's page"
            if token
            else "a token of an account that has access is needed: give --hf-token, or set HF_TOKEN"
        )
        raise UserError(f"Repository '{repo_id}' is gated, and {how}.") from error
    except errors.RepositoryNotFoundError as error:
        raise UserError(
            f"Repository '{repo_id}' not found on the Hugging Face Hub: check its spelling, or, if it is private, "
            "give --hf-token with a token that may read it."
        ) from error
    except errors.HfHubHTTPError as error:
        raise UserError(
            f"Failed to download '{repo_id}': {constants.ENDPOINT} answered with status "
            f"{error.response.status_code}: run the same command again later, it fetches only what is missing."
        ) from error
    except (errors.HTTPError, OSError) as error:
        if getattr(error, "filename", None) is not None or getattr(error, "errno", None) == errno.ENOSPC:
            raise UserError(f"Failed to write '{repo_id}' to {output_dir}: {error.strerror}.") from error
        raise UserError(
            f"Failed to download '{repo_id}': no connection to {constants.ENDPOINT} ({_first_line(error, token)}): "
            "check the network and run the same command again, it fetches only what is missing."
        ) from error
    write_json(Path(folder) / REPO_ID_FILE, {"repo_id": repo_id})
    return Path(folder)


def _make_own(folder: Path) -> None:
    """Make ``folder``, then check its owner: another user may have made it first."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise explain_os_error(error, folder) from error
    refuse_foreign(folder, "--output-dir")


def _first_line(error: Exception, token: str | None) -> str:
    text = str(error).partition("\n")[0]
    return text.replace(token, "<redacted>") if token else text
