"""Parquet reader without the ``datasets`` package."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from torchtune.utils import UserError


def parquet_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows, read in batches; raise :class:`UserError` if the file is broken."""
    try:
        for batch in pyarrow.parquet.ParquetFile(path).iter_batches(1024):
            yield from batch.to_pylist()
    except pyarrow.ArrowException as error:
        raise UserError(f"{path}: it is not a Parquet file, or not the whole of it: download it again.") from error
