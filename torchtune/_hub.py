"""Downloads from the Hugging Face hub, for ``tune download`` and :func:`torchtune.load`."""

import errno
import os
import re
from pathlib import Path

from torchtune.utils import UserError, explain_os_error, first_line, refuse_path_of_other_user, write_json

REPO_ID_FILE = "original_repo_id.json"
# Duplicates of the safetensors weights in other formats.
_OTHER_WEIGHTS = ("original/*", "onnx/*", "*.bin", "*.pth", "*.pt", "*.gguf", "*.h5", "*.msgpack", "*.onnx", "*.ot")


def download(
    repo_id: str, output_dir: Path | None = None, *, token: str | None = None, ignore_patterns: list[str] | None = None
) -> Path:
    """Download the files of ``repo_id`` that ``output_dir`` lacks.

    Without ``output_dir``, the files go into the hub's cache (``HF_HOME``), only the safetensors weights if there are
    any; without a network, the cached files are used.

    Returns:
        The folder.

    Raises:
        UserError: the repository does not exist or access is denied, there is no network or no disk space, or another
            user owns ``output_dir``.
    """
    from huggingface_hub import HfApi, errors, snapshot_download

    # The token becomes an HTTP header, which must be ASCII: the client's own error would not name the option.
    if token is not None and not re.fullmatch(r"[!-~]*", token):
        raise UserError("--hf-token: a token is of letters, digits and signs, without spaces: copy it again.")
    if output_dir is not None:
        refuse_path_of_other_user(output_dir, "--output-dir")
    try:
        # Checked first: without a network, snapshot_download accepts a partial folder.
        info = HfApi(token=token).model_info(repo_id)
        if output_dir is not None:
            _make_own(output_dir)  # only now: a repository that does not exist leaves no folder behind
        else:
            names = [file.rfilename for file in info.siblings or ()]
            if any(name.endswith(".safetensors") for name in names):
                ignore_patterns = [*(ignore_patterns or ()), *_OTHER_WEIGHTS]
            elif any(name.endswith(".gguf") for name in names) and "config.json" not in names:
                raise UserError(
                    f"Repository '{repo_id}' holds GGUF files alone: download one of them, for example with "
                    f"`tune download {repo_id}`, and give the path of the file."
                )
        folder = Path(snapshot_download(repo_id, local_dir=output_dir, ignore_patterns=ignore_patterns, token=token))
    except (errors.HFValidationError, errors.HTTPError, OSError) as error:
        # An answer of the hub is final. Without one, files that were downloaded earlier are used.
        has_answer = isinstance(error, errors.HFValidationError | errors.HfHubHTTPError)
        cached_folder = None
        if not has_answer and output_dir is None:
            cached_folder = _cached(repo_id)
        if cached_folder is None:
            raise _explain(error, repo_id, output_dir, token) from error
        return cached_folder
    if output_dir is not None:
        # Adapters and model cards name their base by this file.
        write_json(folder / REPO_ID_FILE, {"repo_id": repo_id})
    return folder


def _explain(error: Exception, repo_id: str, output_dir: Path | None, token: str | None) -> UserError:
    """Return the error of a failed download, with what to do about it."""
    from huggingface_hub import constants, errors

    if isinstance(error, errors.HFValidationError):
        return UserError(f"'{repo_id}' is not the name of a repository: it has the form owner/name.")
    if isinstance(error, errors.GatedRepoError):  # a subclass of RepositoryNotFoundError, so that it comes first
        reason = "a token of an account that has access is needed: give --hf-token, or set HF_TOKEN"
        if token:
            reason = "the account of your token has no access: ask for it on the repository's page"
        return UserError(f"Repository '{repo_id}' is gated, and {reason}.")
    if isinstance(error, errors.RepositoryNotFoundError):
        return UserError(
            f"Repository '{repo_id}' not found on the Hugging Face Hub: check its spelling, or, if it is private, "
            "give --hf-token with a token that may read it."
        )
    if isinstance(error, errors.HfHubHTTPError):
        status = error.response.status_code
        remedy = "run the same command again later, it fetches only what is missing"
        if status in (401, 403):
            remedy = "give --hf-token, or set HF_TOKEN to a token that may read it"
        elif status == 429:
            remedy = (
                "it limits the number of requests, those without a token (HF_TOKEN) more strictly: run the same "
                "command again in some minutes, it fetches only what is missing"
            )
        return UserError(
            f"Failed to download '{repo_id}': {constants.ENDPOINT} answered with status {status}: {remedy}."
        )
    # Errors of the network are also OSErrors, but have no file, and another number than that of a full disk.
    is_of_disk = isinstance(error, OSError) and (error.filename is not None or error.errno == errno.ENOSPC)
    if is_of_disk:
        return UserError(f"Failed to write '{repo_id}' to {output_dir or constants.HF_HUB_CACHE}: {error.strerror}.")
    return UserError(
        f"Failed to download '{repo_id}': no connection to {constants.ENDPOINT} ({_first_line(error, token)}): "
        "check the network and run the same command again, it fetches only what is missing."
    )


def find_folder(path: str | Path) -> tuple[Path, str | None]:
    """Return the folder of a checkpoint, and its repository if it comes from the hub, from where it is downloaded.

    Raises:
        UserError: there is no such folder or repository, or the hub does not give it.
    """
    # os.path answers where pathlib raises: for a path that is too long, or a home of nobody.
    folder = Path(os.path.expanduser(path))
    if os.path.isdir(folder):
        return folder, None
    if os.path.exists(folder):
        raise UserError(f"{path} is a file: give the folder of the checkpoint.")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", str(path)) or str(path).startswith("."):
        raise UserError(f"{path!s:.200}: there is no such folder, and a repository of the hub is called owner/name.")
    try:
        return download(str(path)), str(path)
    except UserError as error:
        raise UserError(f"There is no folder {path!s:.200}, and the hub does not give it: {error}") from error


def hub_cache() -> Path:
    """Return the folder of the hub's cache."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def describe_access(timeout: float = 5.0) -> str:
    """Ask the hub for the name of this account, and describe the answer; ``timeout`` in seconds."""
    from huggingface_hub import constants, errors
    from huggingface_hub.utils import build_hf_headers, get_session, get_token

    if constants.HF_HUB_OFFLINE:
        return "offline: HF_HUB_OFFLINE is set, so only cached files are used"
    token = get_token()
    try:
        answer = get_session().get(f"{constants.ENDPOINT}/api/whoami-v2", headers=build_hf_headers(), timeout=timeout)
        account = answer.json()["name"] if answer.status_code == 200 else None
    except (errors.HTTPError, OSError, ValueError, LookupError, TypeError) as error:
        # The last three: something else answers, such as the login page of a network, without JSON or a name.
        return f"offline: {constants.ENDPOINT} gives no answer of a hub ({_first_line(error, token)})"
    if account is not None:
        return f"{constants.ENDPOINT} answers, signed in as {account}"
    if answer.status_code != 401:
        return f"{constants.ENDPOINT} answers with status {answer.status_code}: try again later"
    # The hub answers with 401 to an invalid token, and also to a request without one.
    if token:
        return f"{constants.ENDPOINT} refuses the token: make another"
    return f"{constants.ENDPOINT} answers, without a token: gated models need HF_TOKEN"


def upload(folder: Path, repo_id: str) -> str:
    """Upload a folder, without hidden files, to a model repository; a new one is private.

    Returns:
        The address of the commit.

    Raises:
        UserError: the name is wrong, the hub refuses, or there is no network.
    """
    from huggingface_hub import HfApi, constants, errors

    api = HfApi()
    try:
        api.create_repo(repo_id, private=True, exist_ok=True)
        commit = api.upload_folder(repo_id=repo_id, folder_path=folder, ignore_patterns=[".*"])
        return str(commit.commit_url)
    except (errors.HFValidationError, errors.HTTPError, OSError) as error:
        raise UserError(
            f"--push {repo_id}: {constants.ENDPOINT} does not take the files ({first_line(error)}): give "
            f"owner/name, set HF_TOKEN to a token that may write there, and check the network; they are in {folder}."
        ) from error


def _cached(repo_id: str) -> Path | None:
    """Return the repository's folder in the hub's cache, if any."""
    from huggingface_hub import errors, snapshot_download

    try:
        return Path(snapshot_download(repo_id, local_files_only=True))
    except errors.LocalEntryNotFoundError:
        return None


def _make_own(folder: Path) -> None:
    """Create ``folder``, then check its owner: another user may have created it first."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise explain_os_error(error, folder) from error
    refuse_path_of_other_user(folder, "--output-dir")


def _first_line(error: Exception, token: str | None) -> str:
    """Return the first line of an error's message, without the token."""
    text = first_line(error)
    return text.replace(token, "<redacted>") if token else text
