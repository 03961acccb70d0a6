"""Datasets of earlier releases: helpers of custom datasets, and torchdata nodes for multi-dataset recipes.

The recipes of this library do not need torchdata: a list under ``dataset`` concatenates datasets, and
:class:`torchtune.data.BatchLoader` loads batches.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from torchtune.data import DataError
from torchtune.utils import UserError, get_world_size_and_rank

# A row of packed documents: tokens, labels, positions and lengths.
PACK_TYPE = dict[str, Tensor | list[int]]


def chain(*funcs: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return the function that applies ``funcs`` in order."""

    def chained(value: Any) -> Any:
        for function in funcs:
            value = function(value)
        return value

    return chained


def _nodes() -> Any:
    try:
        import torchdata.nodes
    except ModuleNotFoundError as error:
        raise UserError(
            "load_hf_dataset, get_multi_dataset and get_dataloader need the package 'torchdata', which is not "
            "installed: pip install torchdata."
        ) from error
    return torchdata.nodes


def load_hf_dataset(
    source: str,
    transform: Callable[[Mapping[str, Any]], Mapping[str, Any]],
    filter_fn: Callable[[Any], bool] | None = None,
    shuffle: bool = True,
    seed: int = 0,
    num_workers: int = 0,
    parallel_method: Literal["process", "thread"] = "thread",
    streaming: bool = False,
    **load_dataset_kwargs: Any,
) -> Any:
    """Load rows with the ``datasets`` package; return a node of this rank's examples.

    Args:
        source: path for ``datasets.load_dataset``.
        transform: row -> example.
        filter_fn: keeps a row if it returns True.
        shuffle: shuffle with ``seed``.
        seed: seed of the order.
        num_workers: number of workers that transform rows; 0 transforms in the calling process.
        parallel_method: kind of workers.
        streaming: stream rows instead of downloading them first.
        **load_dataset_kwargs: passed to ``datasets.load_dataset``, for example ``split`` or ``data_files``.

    Raises:
        UserError: torchdata is not installed.
    """
    nodes = _nodes()
    from datasets import load_dataset
    from datasets.distributed import split_dataset_by_node

    rows = load_dataset(source, streaming=streaming, **load_dataset_kwargs)
    # filter_fn receives rows as they are loaded, and the ranks divide the rows that are left.
    if filter_fn is not None:
        rows = rows.filter(filter_fn)
    size, rank = get_world_size_and_rank()
    if streaming:
        # A stream has no indices for a sampler: all ranks shuffle it alike, in a buffer, and each takes its rows.
        if shuffle:
            rows = rows.shuffle(seed=seed)
        node = nodes.IterableWrapper(split_dataset_by_node(rows, rank=rank, world_size=size))
    else:
        from torch.utils.data import DistributedSampler

        sampler = DistributedSampler(rows, num_replicas=size, rank=rank, shuffle=shuffle, seed=seed)
        node = nodes.MapStyleWrapper(map_dataset=rows, sampler=sampler)
    return nodes.ParallelMapper(node, map_fn=transform, num_workers=num_workers, method=parallel_method)


def get_multi_dataset(
    datasets: dict[str, Any],
    weights: dict[str, float],
    stop_criteria: str = "CYCLE_UNTIL_ALL_DATASETS_EXHASTED",
    seed: int = 0,
) -> Any:
    """Return a weighted mixture of nodes.

    Args:
        datasets: name -> node.
        weights: name -> weight.
        stop_criteria: a value of ``torchdata.nodes.StopCriteria``; its old spelling is accepted, too.
        seed: seed of the order.

    Raises:
        DataError: the names of nodes and weights differ, or the criterion is unknown.
        UserError: torchdata is not installed.
    """
    nodes = _nodes()
    if datasets.keys() != weights.keys():
        raise DataError(f"weights: {sorted(weights)} are not the names of the datasets, {sorted(datasets)}")
    criterion = stop_criteria.replace("EXHASTED", "EXHAUSTED")
    constants = {}  # criteria are the constants in capitals
    for name, value in vars(nodes.StopCriteria).items():
        if name.isupper() and isinstance(value, str):
            constants[str(value)] = value
    if criterion not in constants:
        raise DataError(f"stop_criteria: '{stop_criteria}' is not known: use one of {', '.join(sorted(constants))}")
    world_size, rank = get_world_size_and_rank()
    return nodes.MultiNodeWeightedSampler(
        source_nodes=datasets,
        weights=weights,
        stop_criteria=constants[criterion],
        seed=seed,
        rank=rank,  # torchdata seeds each rank differently
        world_size=world_size,
    )


def get_dataloader(
    dataset: Any,
    model_transform: Callable[[Mapping[str, Any]], Mapping[str, Any]],
    batch_size: int,
    collate_fn: Callable[[Any], Any] | None = None,
    drop_last: bool = True,
    num_workers: int = 0,
    parallel_method: Literal["process", "thread"] = "thread",
    prefetch_factor: int | None = 4,
    pin_memory: bool = False,
) -> Any:
    """Return a loader of tokenized and collated batches of a node.

    Args:
        dataset: a node.
        model_transform: example -> tokens and labels.
        batch_size: number of examples per batch.
        collate_fn: examples -> batch; by default a batch is a list.
        drop_last: drop an incomplete last batch.
        num_workers: number of workers that transform and collate.
        parallel_method: kind of workers.
        prefetch_factor: number of batches to prefetch; ``None`` disables prefetching.
        pin_memory: copy batches into pinned memory if there is an accelerator.

    Raises:
        UserError: torchdata is not installed.
    """
    nodes = _nodes()
    node = nodes.ParallelMapper(dataset, map_fn=model_transform, num_workers=num_workers, method=parallel_method)
    node = nodes.Batcher(node, batch_size, drop_last=drop_last)
    if collate_fn is not None:
        node = nodes.ParallelMapper(node, map_fn=collate_fn, num_workers=num_workers, method=parallel_method)
    if pin_memory and torch.cuda.is_available():
        node = nodes.PinMemory(node)
    if prefetch_factor is not None:
        node = nodes.Prefetcher(node, prefetch_factor)
    return nodes.Loader(node)
