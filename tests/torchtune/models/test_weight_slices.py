"""Parts of tensors through the ops of weight maps: the same as converting the whole and taking the part."""

import math
import random
from types import SimpleNamespace

import pytest
import torch

from torchtune.models import ModelError
from torchtune.models._weight_map import Group, Identity, Op
from torchtune.models._weight_ops import ExpertAdapter, FusedAdapter, InterleaveRope, Split, Stack

DESCRIPTION = SimpleNamespace(head_dim=8, q_dim=5, k_dim=3, v_dim=4, num_experts=4)


def matrices(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    """Tensors in which every number occurs once."""
    tensors = []
    first = 0
    for shape in shapes:
        end = first + math.prod(shape)
        tensors.append(torch.arange(first, end).reshape(shape).float())
        first = end
    return tensors


def nothing_of(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [torch.full_like(tensor, -1) for tensor in tensors]


def copy_part(op: Op, which: int, ours: torch.Tensor, slices: tuple, external: list, written: list) -> None:
    """Read a part of one of our tensors, and write it."""
    wanted = ours[slices]
    read = torch.full_like(wanted, -1)
    for part in op.external_slices(which, slices, [tensor.shape for tensor in external], DESCRIPTION):
        part.fill(read, external[part.external][part.slices])
        written[part.external][part.slices] = part.of(wanted)
    assert torch.equal(read, wanted)


def any_slices(shape: torch.Size, rng: random.Random) -> tuple[slice, ...]:
    return tuple(slice(*sorted(rng.choices(range(size + 1), k=2))) for size in shape)


@pytest.mark.parametrize(
    ("op", "external"),
    [
        (Identity(), matrices((6, 4))),
        (Identity(), matrices(())),
        (InterleaveRope(), matrices((24, 4))),
        (InterleaveRope(), matrices((24,))),
        (Split(("q_dim", "k_dim", "v_dim")), matrices((12, 3))),
        (Stack(), matrices(*[(3, 4)] * 5)),
        (Stack(transpose=True), matrices(*[(3, 4)] * 5)),
    ],
    ids=str,
)
def test_any_slice_is_read_as_from_the_whole_tensor(op, external):
    rng = random.Random(0)
    for which, tune_tensor in enumerate(op.to_tune(external, DESCRIPTION)):
        for _ in range(100):
            slices = any_slices(tune_tensor.shape, rng)
            written = nothing_of(external)
            copy_part(op, which, tune_tensor, slices, external, written)
            assert sum(int((tensor >= 0).sum()) for tensor in written) == tune_tensor[slices].numel()
            assert all(bool(((w == e) | (w < 0)).all()) for w, e in zip(written, external, strict=True))


def test_a_group_reads_a_slice_of_one_tensor_by_the_names_of_its_files():
    external = {f"{i}.weight": tensor for i, tensor in enumerate(matrices((3, 4), (3, 4)))}
    group = Group(tuple(external), ("experts",), Stack(), DESCRIPTION)
    slices = (slice(1, 2), slice(0, 2), slice(1, 4))
    target = torch.empty(1, 2, 3)
    shapes = [tensor.shape for tensor in external.values()]
    group.read("experts", slices, target, shapes, lambda name, part: external[name][part])
    assert torch.equal(target, torch.stack(list(external.values()))[slices])


def test_any_slice_of_a_fused_adapter_is_read_as_from_the_whole():
    """Read as from the whole; all rows of all parts together write the whole, zeros off the diagonal included."""
    op = FusedAdapter(("q_dim", "k_dim", "v_dim"))
    rng = random.Random(0)
    adapters_of_parts = matrices((2, 7), (2, 7), (2, 7), (5, 2), (3, 2), (4, 2))
    external = op.to_external(adapters_of_parts, DESCRIPTION)
    assert all(map(torch.equal, op.to_tune(external, DESCRIPTION), adapters_of_parts))
    written = nothing_of(external)
    for which, tensor in enumerate(adapters_of_parts):
        for _ in range(50):
            copy_part(op, which, tensor, any_slices(tensor.shape, rng), external, nothing_of(external))
        for rows in (slice(0, 1), slice(1, tensor.shape[0])):
            copy_part(op, which, tensor, (rows, slice(0, tensor.shape[1])), external, written)
    assert all(map(torch.equal, written, external))


@pytest.mark.parametrize(
    ("lora_a", "lora_b"),
    [(torch.ones(4, 6), torch.zeros(12, 4)), (torch.ones(6, 6), torch.ones(12, 6))],
    ids=["rank that three parts cannot share", "values off the block diagonal"],
)
def test_adapter_that_is_not_made_of_the_parts_of_its_projection_is_refused(lora_a, lora_b):
    op = FusedAdapter(("q_dim", "k_dim", "v_dim"))
    with pytest.raises(ModelError, match="not made of one for each of its parts"):
        op.to_tune([lora_a, lora_b], DESCRIPTION)


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("swapped", [False, True])
def test_adapters_of_experts_are_products_in_peft_and_any_experts_of_them_are_written_alone(parts, swapped):
    """With peft's formula: B [out, rank, experts] and A [experts, rank, in] make [experts, out, in]."""
    op = ExpertAdapter(parts, swapped)
    experts = 4
    rank = 3
    adapters_of_parts = matrices(*[(experts, 6, rank)] * parts, *[(experts, rank, 5)] * parts)
    external = op.to_external(adapters_of_parts, DESCRIPTION)
    a = external[0].reshape(experts, parts * rank, -1)
    b = external[1].reshape(-1, parts * rank, experts)
    wanted = torch.cat(
        [first @ second for first, second in zip(adapters_of_parts[:parts], adapters_of_parts[parts:], strict=True)],
        dim=2,
    )
    delta = torch.einsum("ore,eri->eoi", b, a)
    assert torch.equal(delta if swapped else delta.transpose(1, 2), wanted)
    assert all(map(torch.equal, op.to_tune(external, DESCRIPTION), adapters_of_parts))
    adapters = [adapters_of_parts[0], torch.cat(adapters_of_parts[parts:], dim=2)]  # one adapter of all parts
    spread = op.to_tune(
        op.to_block_diagonal(ExpertAdapter(1, swapped).to_external(adapters, DESCRIPTION), DESCRIPTION), DESCRIPTION
    )
    assert all(map(torch.equal, spread, [adapters_of_parts[0]] * parts + adapters_of_parts[parts:]))

    written = nothing_of(external)
    for which, tensor in enumerate(adapters_of_parts):
        for chosen in (slice(0, 1), slice(1, 4), slice(4, 4)):
            slices = (chosen, slice(0, tensor.shape[1]), slice(0, tensor.shape[2]))
            copy_part(op, which, tensor, slices, external, written)
    assert all(map(torch.equal, written, external))
