"""Shards of prepared rows: each is written by a process of its own, and all of them are joined afterwards.

A shard is a contiguous range of the source's rows, in the folder ``<output>/shards/<index>-of-<count>``. Its rows are
stored as those of a whole preparation are, and its manifest, which is written last, says that it is complete. Ranges
begin at a multiple of the rows of a batch, so that the joined files have the batches of a whole preparation, bit by
bit. Packs are made of the joined rows, as a run makes them of any prepared rows.
"""

import re
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torchtune.data import DataError
from torchtune.datasets._command_modes import SHARDS, Shard, preparing
from torchtune.datasets._fingerprint import Fingerprint, differences_of
from torchtune.datasets._row_cache import cache_entry, describe_differences
from torchtune.datasets._token_store import PreparedRows, RowWriter, fingerprint_of, read_batches
from torchtune.utils import read_json, write_json

_MANIFEST = "manifest.json"
_FOLDER_NAME = re.compile(r"(\d+)-of-(\d+)")


def record_of(source: str, fingerprint: Fingerprint, rows: PreparedRows) -> dict[str, Any]:
    """Return the entry of a manifest for the rows of a source.

    Args:
        source: name of the source.
        fingerprint: fingerprint of all rows of the source.
        rows: rows of the shard.
    """
    return {
        "source": source,
        "fingerprint": fingerprint.text,
        "tokenizer": fingerprint.text_of("tokenizer"),
        "made_of": fingerprint.made_of,
        "rows": rows.total,
        "left_out": len(rows.bad),
        "tokens": rows.num_tokens,
        "checksum": rows.fingerprint,
        "files": {path.name: path.stat().st_size for path in rows.paths},
    }


def write_manifest(output: Path, shard: Shard, records: Sequence[Mapping[str, Any]], command: Sequence[str]) -> None:
    """Write the manifest of a shard whose rows are complete.

    Args:
        output: output folder of the preparation.
        shard: the shard.
        records: name of the setting of each dataset, with its :func:`record_of`.
        command: command that prepares the shards, without its option ``--shard``.
    """
    manifest = {"shard": str(shard), "command": list(command), "datasets": list(records)}
    write_json(shard.folder(output) / _MANIFEST, manifest)


def merge_shards(output: Path) -> list[dict[str, Any]]:
    """Join the shards of an output folder into the folder that ``dataset.prepared`` reads, a batch at a time.

    Returns:
        name, number of shards, rows, rows left out and tokens of each dataset.

    Raises:
        DataError: shards are missing, damaged, in the wrong folder, of different numbers of parts, or made with
            different settings, tokenizers, data or versions. Nothing is joined then.
    """
    # Everything that can be known is checked before anything is written.
    shards = _shards_in(output)
    manifests = _read_manifests(output, shards)
    _check_agreement(output, manifests)
    _check_files(output, manifests)
    first_manifest = next(iter(manifests.values()))
    joined = []
    for number, record in enumerate(first_manifest["datasets"]):
        records = {shard: manifest["datasets"][number] for shard, manifest in manifests.items()}
        fingerprint = Fingerprint.from_made_of(record["made_of"])
        if fingerprint.text != record["fingerprint"]:  # only the digest of the code can differ
            raise DataError(
                f"The shards in {output} were prepared with another version of torchtune or of a package that "
                f"tokenizes than this one: join them with that version, or prepare all of them again, the first with "
                f"{_command(output, first_manifest, shards[0])}"
            )
        with preparing(output), cache_entry(fingerprint, record["source"]) as entry:
            if entry.writer is not None:  # an interrupted call may have joined this dataset
                _copy_batches(output, first_manifest, records, entry.writer)
        totals = {"rows": 0, "left_out": 0, "tokens": 0}
        for shard_record in records.values():
            for name in totals:
                totals[name] += shard_record[name]
        joined.append({"name": record["name"], "shards": len(shards), **totals})
    return joined


def _copy_batches(
    output: Path, manifest: Mapping[str, Any], records: Mapping[Shard, Mapping[str, Any]], writer: RowWriter
) -> None:
    """Copy the batches of all shards, in order, behind those that an interrupted call has copied.

    Args:
        output: output folder of the preparation.
        manifest: manifest of any shard, for the command in messages.
        records: the dataset's record of each shard, in order.
        writer: writes the joined rows.

    Raises:
        DataError: a shard is damaged.
    """
    copied_before = len(writer.before.sums)  # batches
    for shard, record in records.items():
        folder = shard.folder(output) / record["fingerprint"]
        sums = []
        for name in sorted(record["files"]):  # in the order in which they were written
            for batch, facts in read_batches(folder / name):
                sums.append([facts["rows"], facts["crc"]])
                if facts["rows"] == 0:  # the only batch of a shard without rows
                    continue
                if copied_before > 0:  # read all the same, because its sum is part of the checksum
                    copied_before -= 1
                    continue
                writer.write(batch, facts)
        # Only known now: a check in advance would read all shards twice.
        if fingerprint_of(sums) != record["checksum"]:
            raise _damaged(output, manifest, shard, "its checksum is another")


def _shards_in(output: Path) -> list[Shard]:
    """Return all shards of the division in an output folder, whether they are there or not.

    The names of the folders (``<index>-of-<count>``) say how many there must be.

    Raises:
        DataError: there is no shard, or there are shards of two divisions.
    """
    folder = output / SHARDS
    advice = f"prepare them with `{_command_with_placeholder(output)} --shard 0/<number>`."
    if not folder.is_dir():
        raise DataError(f"There are no shards in {output}: {advice}")
    folders_of_count: Counter[int] = Counter()
    for path in folder.iterdir():
        match = _FOLDER_NAME.fullmatch(path.name)
        if match is not None and path.is_dir():
            folders_of_count[int(match[2])] += 1
    if not folders_of_count:
        raise DataError(f"There are no shards in {output}: {advice}")
    if len(folders_of_count) > 1:
        counts = " and ".join(str(count) for count in sorted(folders_of_count))
        # The division with the fewest folders is most likely the one that was given up; in a tie, the larger number.
        given_up = min(folders_of_count, key=lambda count: (folders_of_count[count], -count))
        raise DataError(
            f"The rows in {folder} were prepared twice, as {counts} shards: remove those of one division, for example "
            f"with rm -r {shlex.quote(str(folder))}/*-of-{given_up}."
        )
    (count,) = folders_of_count
    return [Shard(index, count) for index in range(count)]


def _read_manifests(output: Path, shards: Sequence[Shard]) -> dict[Shard, dict[str, Any]]:
    """Return the manifests of all shards; raise :class:`DataError` if one is missing or of another shard."""
    manifests: dict[Shard, dict[str, Any]] = {}
    missing: list[Shard] = []
    unreadable: list[Shard] = []
    for shard in shards:
        path = shard.folder(output) / _MANIFEST  # written last: a shard without it is not complete
        if not path.is_file():
            missing.append(shard)
            continue
        try:
            manifests[shard] = read_json(path, DataError)
        except DataError:
            unreadable.append(shard)
    # Any of them has the command that prepares the others; without any, the message names a placeholder.
    some_manifest: Mapping[str, Any] = next(iter(manifests.values()), {})
    if unreadable:
        raise _damaged(output, some_manifest, unreadable[0], f"its {_MANIFEST} cannot be read")
    if missing:
        fact = "is missing"
        # A folder without a manifest: its preparation goes on, or was killed.
        if missing[0].folder(output).is_dir():
            fact = "is not finished"
        more_missing = ", ".join(str(shard) for shard in missing[1:6])
        if len(missing) > 6:
            more_missing += f" and {len(missing) - 6} more"
        if more_missing:
            more_missing = f" (as {more_missing})"
        raise DataError(
            f"Shard {missing[0]} in {output} {fact}{more_missing}: prepare it with "
            f"{_command(output, some_manifest, missing[0])}"
        )
    for shard, manifest in manifests.items():
        if manifest.get("shard") != str(shard):  # a folder that was renamed or copied
            raise DataError(
                f"{shard.folder(output)} holds shard {manifest.get('shard')}, which is there twice: remove this folder "
                f"and prepare its own shard with {_command(output, manifest, shard)}"
            )
    return manifests


def _check_agreement(output: Path, manifests: Mapping[Shard, Mapping[str, Any]]) -> None:
    """Raise :class:`DataError` for a shard that was made with other settings than most of the shards.

    The shards of the majority are taken for right, so that the fewest have to be prepared again.
    """
    fingerprints = {}  # of all datasets of a shard
    for shard, manifest in manifests.items():
        fingerprints[shard] = tuple(record["fingerprint"] for record in manifest["datasets"])
    ((most_frequent, _),) = Counter(fingerprints.values()).most_common(1)
    agreeing = next(shard for shard in manifests if fingerprints[shard] == most_frequent)
    for shard, manifest in manifests.items():
        if fingerprints[shard] == most_frequent:
            continue
        differences = []
        # Datasets that only one of both shards has are not compared: without another difference, their number is it.
        for record, agreed in zip(manifest["datasets"], manifests[agreeing]["datasets"], strict=False):
            differences += differences_of(record["made_of"], agreed["made_of"])
        described = "another number of datasets"
        if differences:
            described = describe_differences(list(dict.fromkeys(differences)))
        raise DataError(
            f"Shard {shard} in {output} does not go with shard {agreeing}, it was made with {described}: prepare it "
            f"again with {_command(output, manifests[agreeing], shard)}"
        )


def _check_files(output: Path, manifests: Mapping[Shard, Mapping[str, Any]]) -> None:
    """Raise :class:`DataError` for files that are missing or shorter than they were, before anything is copied."""
    for shard, manifest in manifests.items():
        for record in manifest["datasets"]:
            for name, size in record["files"].items():
                path = shard.folder(output) / record["fingerprint"] / name
                if not path.is_file():
                    raise _damaged(output, manifest, shard, f"{path.name} is missing")
                if path.stat().st_size != size:
                    fact = f"{path.name} has {path.stat().st_size:,} of {size:,} bytes"
                    raise _damaged(output, manifest, shard, fact)


def _damaged(output: Path, manifest: Mapping[str, Any], shard: Shard, fact: str) -> DataError:
    return DataError(
        f"Shard {shard} in {output} is damaged ({fact}): prepare it again with {_command(output, manifest, shard)}"
    )


def _command(output: Path, manifest: Mapping[str, Any], shard: Shard) -> str:
    """Return the command that prepares a shard, as the manifest of some shard says it was prepared."""
    if "command" in manifest:
        command = shlex.join(manifest["command"])
    else:
        command = _command_with_placeholder(output)
    return f"`{command} --shard {shard}`."


def _command_with_placeholder(output: Path) -> str:
    """Return the command that prepares a folder whose config is not known."""
    return f"tune data prepare <config> --output {shlex.quote(str(output))}"
