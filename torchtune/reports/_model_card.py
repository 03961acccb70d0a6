"""The model card of an export: README.md with the front matter that the Hub reads."""

import re
import shlex
from pathlib import Path
from typing import Any

import yaml

from torchtune._hub import REPO_ID_FILE
from torchtune.config import redact_secrets
from torchtune.datasets import dataset_nodes
from torchtune.reports._page import environment
from torchtune.reports._run_folder import SETTINGS, RunFolder
from torchtune.reports._verdict import judge
from torchtune.utils import UserError, read_json

_LICENCE = ("license", "license_name", "license_link")


def model_card(run: RunFolder | str | Path, *, check: str | None = None, library: str = "transformers") -> str:
    """Return the README.md of an export: base, licence, data, results, changed settings, and how to reproduce it.

    The licence comes from the base's own README.md; without one, the field is missing, with a note in the card. Secrets
    are redacted.

    Args:
        run: the run, or its folder.
        check: verdict of the check of the exported files; None if there was none.
        library: ``library_name`` of the export, ``transformers`` or ``peft``.

    Raises:
        UserError: the folder is not the output folder of a run.

    Example:
        >>> card = torchtune.reports.model_card("/tmp/run", check="equal in transformers")  # doctest: +SKIP
    """
    if not isinstance(run, RunFolder):
        run = RunFolder(run)
    base = _repository_of(run.base)
    licence = _licence_of(run.base)
    datasets = {}  # setting -> nodes of its datasets
    sources = set()
    for name in ("dataset", "dataset_val"):
        if run.settings.get(name):
            datasets[name] = dataset_nodes(run.settings[name])
            for node in datasets[name]:
                sources.add(str(node.get("source")))
    front = {
        **licence,
        "base_model": base,
        "datasets": sorted(filter(_is_repository, sources)),  # paths of this machine are left out
        "library_name": library,
        "pipeline_tag": "text-generation",
        "tags": ["torchtune", run.recipe],
    }
    front = {key: value for key, value in front.items() if value}  # the Hub rejects empty fields
    command = ["tune", "run"]
    processes = run.start.get("processes") or 1
    if processes > 1:
        command += ["--nproc-per-node", str(processes)]
    command += [run.recipe, "--config", SETTINGS]
    page = environment(autoescape=False).get_template("card.md")  # Markdown, in which HTML escapes would be shown
    text = page.render(
        front=yaml.safe_dump(front, sort_keys=False).strip(),
        name=run.path.resolve().name,
        base=base or run.base,
        licence=licence.get("license"),
        run=run,
        verdict=judge(run),
        nodes=datasets,
        check=check,
        command=shlex.join(command),
    )
    return redact_secrets(text)


def _is_repository(name: Any) -> bool:
    """Return whether a name is OWNER/NAME, and no path of this machine."""
    is_repository_name = re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", str(name)) is not None
    return is_repository_name and not Path(str(name)).exists()


def _repository_of(folder: Path) -> str | None:
    """Return the repository of a base that ``tune download`` has fetched."""
    try:
        return str(read_json(folder / REPO_ID_FILE)["repo_id"])
    except (UserError, KeyError):  # the base is not a folder of `tune download`
        if _is_repository(folder):
            return str(folder)
        return None


def _licence_of(folder: Path) -> dict[str, Any]:
    """Return the licence fields in the README.md of a base."""
    try:
        _, front, _ = (folder / "README.md").read_text("utf-8", "replace").split("---\n", 2)
        fields = yaml.safe_load(front)
        return {key: fields[key] for key in _LICENCE if key in fields}
    except (OSError, ValueError, TypeError, yaml.YAMLError):
        return {}
