"""Models with images whose sequences are sharded over ranks train as one process does."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.devices import DEVICE, own_device
from tests.tiny_images import CONFIGS, image_text_model, write_image_checkpoint
from tests.torchtune.checkpoints import ranks
from torchtune.checkpoints import FullModelHFCheckpointer
from torchtune.data import Batch, DataError, Images, collate_documents
from torchtune.models import image_text_model as build
from torchtune.modules.loss import LinearCrossEntropyLoss
from torchtune.training import ParallelDims, clip_grad_norm_, parallelize
from torchtune.training.parallel import ParallelDimsError, check_parallelizable

ON_HOST = True  # rows are collated there; batches and models are sent to the device
FAMILIES = ("qwen3_vl", "qwen3_5_vl")


def rows(model: Any) -> list[dict[str, Any]]:
    """Documents with an image that crosses the cut, with one before it, and without any."""
    merge = model.encoder.merge
    generator = torch.Generator().manual_seed(1)
    documents = []
    for length, start, num_image_tokens in ((9, 1, 4), (17, 4, 12), (6, 0, 0)):
        tokens = torch.randint(3, 60, (length,), generator=generator)
        tokens[start : start + num_image_tokens] = model.image_tokens[0]
        row: dict[str, Any] = {"tokens": tokens, "labels": tokens.roll(-1)}
        if num_image_tokens:
            grid = (1, 2 * merge, merge * num_image_tokens // 2)
            patches = torch.randn(
                num_image_tokens * merge**2, model.description.vision.patch_values, generator=generator
            )
            places = torch.arange(start, start + num_image_tokens)
            positions = torch.arange(length).expand(3, 1, -1).clone()
            positions[1, 0, places] += places % 3
            has_axes = model.grid_positions
            row["encoder_input"] = {"images": Images(patches, (grid,), places, positions if has_axes else None)}
        documents.append(row)
    return documents


def gradients(folder: Path, family: str, dims: ParallelDims) -> dict[str, torch.Tensor]:
    """Loss, norm and gradients of a step."""
    with torch.device("meta"):
        model = build(checkpoint_dir=str(folder / family))
    parallelize(model, dims, device=own_device())
    FullModelHFCheckpointer(folder / family).load_model(model, device=own_device())
    batch = dims.collate(collate_documents)(rows(model)).to(own_device())
    loss_fn = LinearCrossEntropyLoss()
    loss_fn.set_model_output(model)
    labels = batch.pop("labels")
    loss = loss_fn(model(**batch), labels) * (labels.ne(-100).sum() / 32)
    loss.backward()
    values = {
        name: ranks.whole(parameter.grad) for name, parameter in model.named_parameters() if parameter.grad is not None
    }
    norm = clip_grad_norm_(model.parameters(), None)
    return {"loss": torch.tensor(dims.sum(loss.item())), "norm": torch.as_tensor(float(norm)), **values}


def on_two_ranks(folder: Path) -> None:
    dims = ParallelDims(cp=2, world_size=2)
    dims.build_mesh(DEVICE)
    for family in FAMILIES:
        values = gradients(folder, family, dims)
        if dist.get_rank() == 0:
            torch.save(values, folder / f"{family}.pt")


@pytest.mark.slow
def test_two_ranks_train_as_one_process(tmp_path):
    for family in FAMILIES:
        write_image_checkpoint(image_text_model(CONFIGS[family]()), tmp_path / family)
    ranks.run(2, [on_two_ranks], tmp_path)
    for family in FAMILIES:
        values = torch.load(tmp_path / f"{family}.pt")
        alone = gradients(tmp_path, family, ParallelDims())
        assert values.keys() == alone.keys()
        assert any(name.startswith("encoder.") for name in alone)
        for name, wanted in alone.items():
            assert (values[name] - wanted).abs().max() <= 1e-4 * wanted.abs().max(), (family, name)


def test_images_of_a_shard_are_those_among_its_positions():
    images = Images(torch.zeros(6, 12), ((1, 2, 3),), torch.tensor([1, 2, 3, 4, 5, 6]), torch.arange(8).expand(3, 1, 8))
    row = {"tokens": list(range(8)), "labels": [*range(1, 8), -100], "encoder_input": {"images": images}}
    batch = collate_documents([row]).pad_to_multiple(3)
    parts = [batch.split(rank, 3).inputs["encoder_input"]["images"] for rank in range(3)]
    assert [part.places.tolist() for part in parts] == [[1, 2], [0, 1, 2], [0]]
    assert [part.features.tolist() for part in parts] == [[0, 1], [2, 3, 4], [5]]
    assert [part.positions[0, 0].tolist() for part in parts] == [[0, 1, 2], [3, 4, 5], [6, 7, 0]]
    rows_without_documents = Batch(torch.zeros(1, 4, dtype=torch.long), inputs={"encoder_input": {"images": images}})
    with pytest.raises(DataError, match="it is not known how to split 'encoder_input'"):
        rows_without_documents.split(0, 2)


def test_images_that_attend_in_both_directions_are_refused(tmp_path):
    write_image_checkpoint(image_text_model(CONFIGS["qwen3_vl"]()), tmp_path)
    with torch.device("meta"):
        model = build(checkpoint_dir=str(tmp_path))
    check_parallelizable(model, ParallelDims(cp=2, world_size=2))
    model.image_blocks = True
    with pytest.raises(ParallelDimsError, match="the tokens of an image attend to each other in both directions"):
        check_parallelizable(model, ParallelDims(cp=2, world_size=2))
