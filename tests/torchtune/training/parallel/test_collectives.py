"""What a micro-batch of every composition sends: kinds, bytes, numbers and order of collectives.

This process is rank 0 of ranks that do not exist, so what it receives is never computed.
"""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.torchtune.checkpoints.small import write_folder
from tests.torchtune.training.parallel.traffic import Traffic
from torchtune import training
from torchtune.estimate._simulate import one_thread, simulated_cluster
from torchtune.models import from_hf_config
from torchtune.models._mixers import DeltaNetMixer
from torchtune.modules.loss import LinearCrossEntropyLoss
from torchtune.modules.parallel.collectives import gather_vocabulary

ON_HOST = True
CPU = torch.device("cpu")
LENGTH = 64
GUIDE = Path(__file__).parents[4] / "docs" / "distributed.rst"
# Name -> shape of the model, and its settings.
_DELTA_NET = {"linear_num_key_heads": 2, "linear_num_value_heads": 8}  # fewer key heads than ranks
_DELTA_NET |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
MODELS: dict[str, tuple[str | tuple[str, dict[str, Any]], dict[str, Any]]] = {
    "llama": ("llama_tied", {"num_hidden_layers": 2}),
    "deep": ("llama_tied", {"num_hidden_layers": 5}),
    # Two experts on each rank, for the two shards of their weights: FSDP would pad one.
    "moe": ("qwen3_moe", {"num_hidden_layers": 2, "num_experts": 8}),
    "delta": (("Qwen3_5", _DELTA_NET), {"num_hidden_layers": 2, "layer_types": ["linear_attention"] * 2}),
    "convolutions": (("Lfm2", {"conv_L_cache": 3}), {"num_hidden_layers": 2, "layer_types": ["conv"] * 2}),
}
# What docs/distributed.rst calls a composition -> model, number of processes, sizes of the dimensions.
COMPOSITIONS: dict[str, tuple[str, int, dict[str, int]]] = {
    "4 shards": ("llama", 4, {"dp_shard": 4}),
    "2 copies of 2 shards": ("llama", 4, {"dp_replicate": 2, "dp_shard": 2}),
    "4 context-parallel ranks": ("llama", 4, {"cp": 4}),
    "2 tensor-parallel ranks, in 2 copies": ("llama", 4, {"dp_replicate": 2, "tp": 2}),
    "8 shards, experts over 4 of them": ("moe", 8, {"dp_shard": 8, "ep": 4}),
    "4 context-parallel ranks, Gated DeltaNet": ("delta", 4, {"cp": 4}),
    "2 tensor-parallel ranks, Gated DeltaNet": ("delta", 2, {"tp": 2}),
    "4 context-parallel ranks, short convolutions": ("convolutions", 4, {"cp": 4}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("collectives")
    for name, (shape, settings) in MODELS.items():
        write_folder(folder / name, shape, **settings)
    return folder


def mark_layers(model: nn.Module, traffic: Traffic) -> None:
    """Mark where every layer computes, in the forward and in the backward pass."""

    def mark_forward(index: int, module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        traffic.mark(("forward", index))
        output.register_hook(lambda grad: traffic.mark(("backward", index)))

    for index, layer in enumerate(model.layers):
        layer.mlp.register_forward_hook(partial(mark_forward, index))


def traffic_of(
    checkpoint: Path, processes: int, sizes: dict[str, int], *, checkpointed: bool = False, **settings: Any
) -> Traffic:
    """Return the traffic of a micro-batch, forward and backward, after one that is not counted."""
    with simulated_cluster(processes, processes), one_thread():
        dims = training.ParallelDims.start(CPU, **{"dp_shard": 1, **sizes})
        with torch.device("meta"):
            model = from_hf_config(checkpoint)
        training.parallelize(model, dims, device=CPU, **settings)
        model.to_empty(device=CPU)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(0.01)
        training.checkpoint_activations(model, checkpointed, None, None)
        loss_fn = LinearCrossEntropyLoss()
        loss_fn.set_model_output(model)
        tokens = torch.arange(LENGTH)[None]
        batch = dims.collate(lambda _: {"tokens": tokens, "labels": tokens.roll(-1)})([])
        labels = batch.pop("labels")

        def step() -> None:
            loss_fn(model(**batch), labels).backward()

        step()
        traffic = Traffic()
        mark_layers(model, traffic)
        with traffic:
            step()
    return traffic


@pytest.fixture(scope="module")
def traffic(folder):
    """The traffic of every composition."""
    return {
        name: traffic_of(folder / model, processes, sizes) for name, (model, processes, sizes) in COMPOSITIONS.items()
    }


def bytes_of(module: nn.Module) -> int:
    """Return the bytes of the float32 parameters of a module."""
    return 4 * sum(parameter.numel() for parameter in module.parameters())


def formulas(checkpoint: Path) -> dict[str, dict[str, float]]:
    """Return the bytes that docs/distributed.rst says for each composition of a model."""
    with torch.device("meta"):
        model = from_hf_config(checkpoint)
    description = model.description
    num_layers = description.num_layers
    num_bytes = bytes_of(model)
    layers = bytes_of(model.layers)
    hidden = 4 * LENGTH * description.embed_dim
    f = 3 / 4  # of four ranks
    gathered = {"all-gather": f * (num_bytes + layers)}
    reduced = {"reduce-scatter": f * num_bytes}
    if description.num_experts:
        experts = sum(bytes_of(layer.mlp.experts) for layer in model.layers)
        # Ranks 0 and 4 have the same quarter of the experts, and share its weights.
        of_experts = 1 / 2 * experts / 4
        f_of_others = 7 / 8
        return {
            "8 shards, experts over 4 of them": {
                "all-gather": f_of_others * (num_bytes + layers - 2 * experts) + 2 * of_experts,
                "reduce-scatter": f_of_others * (num_bytes - experts) + of_experts,
                "all-to-all": 4 * f * hidden * num_layers * description.experts_per_token,
            },
        }
    if isinstance(description.mixer, DeltaNetMixer):
        mixer = description.mixer
        channels = mixer.num_value_heads * mixer.value_dim
        # Queries and keys of every rank's head, values, two numbers of each value head, and the reach.
        sent = 2 * 4 * mixer.key_dim + channels + 2 * mixer.num_value_heads + 4
        exchanged = 2 * f * 4 * LENGTH / 4 * num_layers * (sent + channels)
        # Of two ranks: the input and output of each MLP, of the embedding and of the output; the channels as above.
        of_two_ranks = 1 / 2 * hidden * (2 * num_layers + 2)
        sent = 2 * 2 * mixer.key_dim + channels + 2 * mixer.num_value_heads + 2
        mixers = sum(bytes_of(layer.attn) for layer in model.layers)
        return {
            "4 context-parallel ranks, Gated DeltaNet": gathered | reduced | {"all-to-all": exchanged},
            "2 tensor-parallel ranks, Gated DeltaNet": {
                "all-gather": of_two_ranks,
                "reduce-scatter": of_two_ranks,
                "all-to-all": 2 * 1 / 2 * 4 * LENGTH / 2 * num_layers * (sent + channels),
                "all-reduce": 2 * 1 / 2 * mixers,
            },
        }
    if description.mixer is not None:
        ends = f * 4 * num_layers * 4 * (description.mixer.conv_taps - 1) * description.embed_dim
        return {
            "4 context-parallel ranks, short convolutions": {
                "all-gather": gathered["all-gather"] + ends,
                "reduce-scatter": reduced["reduce-scatter"] + ends,
            },
        }
    heads = (description.q_dim + max(description.kv_dim, 4 * description.head_dim)) / description.embed_dim
    of_two_ranks = 1 / 2 * hidden * (4 * num_layers + 2)
    return {
        "4 shards": gathered | reduced,
        "2 copies of 2 shards": {
            "all-gather": (num_bytes + layers) / 2,
            "reduce-scatter": num_bytes / 2,
            "all-reduce": num_bytes / 2,
        },
        "4 context-parallel ranks": gathered | reduced | {"all-to-all": 4 * f * hidden * num_layers * heads / 4},
        "2 tensor-parallel ranks, in 2 copies": {
            "all-gather": of_two_ranks,
            "reduce-scatter": of_two_ranks,
            "all-reduce": num_bytes / 2,
        },
    }


def test_logits_of_shards_are_gathered_along_the_vocabulary():
    with simulated_cluster(2, 2), one_thread():
        training.ParallelDims.start(CPU, dp_shard=1, tp=2)
        logits = gather_vocabulary(torch.zeros(2, 3, 5), torch.distributed.group.WORLD)
    assert logits.shape == (2, 3, 2 * 5)


def test_collectives_move_the_bytes_that_the_guide_says(folder, traffic):
    guide = GUIDE.read_text()
    wanted_bytes = {}
    for model in ("llama", "moe", "delta", "convolutions"):
        wanted_bytes |= formulas(folder / model)
    for name, wanted in wanted_bytes.items():
        moved = traffic[name].moved
        # Tensor parallelism: gradients of norms and three numbers for each label; experts: their numbers of tokens.
        assert moved == pytest.approx(wanted, rel=0.04 if "tensor" in name else 1e-3), name
        least, counted = sum(wanted.values()), sum(moved.values())
        row = f"   * - {name}\n     - {least:,.0f}\n     - {counted:,.0f}\n     - {counted / least:.2f}\n"
        assert row in guide, f"docs/distributed.rst lacks this row:\n{row}"


def test_step_calls_the_collectives_of_the_formulas(folder, traffic):
    num_layers = 2
    groups = num_layers + 1  # that FSDP gathers together: each layer, and what is in none
    shards = {"all-gather": 2 * num_layers + 1, "reduce-scatter": groups}
    assert {name: dict(of_mesh.calls) for name, of_mesh in traffic.items()} == {
        "4 shards": shards,
        "2 copies of 2 shards": shards | {"all-reduce": groups},
        "4 context-parallel ranks": shards | {"all-to-all": 4 * num_layers},
        "2 tensor-parallel ranks, in 2 copies": {
            "all-gather": 4 * num_layers + 2,
            "reduce-scatter": 4 * num_layers + 2,
            "all-reduce": groups + 2 * num_layers + 3,  # copies, gradients of norms, the loss
        },
        "8 shards, experts over 4 of them": {
            "all-gather": 4 * num_layers + 1,
            "reduce-scatter": 2 * num_layers + 1,
            "all-to-all": 5 * num_layers,
        },
        "4 context-parallel ranks, Gated DeltaNet": shards | {"all-to-all": 4 * num_layers},
        "2 tensor-parallel ranks, Gated DeltaNet": {
            "all-gather": 2 * num_layers + 2,
            "reduce-scatter": 2 * num_layers + 2,
            "all-to-all": 4 * num_layers,
            "all-reduce": 9 * num_layers + 2 * num_layers + 3,  # parameters of mixers, norms, the loss
        },
        "4 context-parallel ranks, short convolutions": {
            "all-gather": shards["all-gather"] + num_layers,
            "reduce-scatter": shards["reduce-scatter"] + num_layers,
        },
    }
    unsharded = traffic_of(folder / "llama", 4, {"dp_shard": 4}, reshard_after_forward=False)
    assert dict(unsharded.calls) == {"all-gather": groups, "reduce-scatter": groups}


def test_recomputed_layers_gather_no_weights_again(folder):
    sizes = {"dp_shard": 2, "tp": 2}
    plain, checkpointed = (traffic_of(folder / "llama", 4, sizes, checkpointed=value) for value in (False, True))
    # Tensor parallelism gathers the inputs of attention and MLP again, and sums the output of attention again.
    assert checkpointed.calls - plain.calls == {"all-gather": 2 * 2, "reduce-scatter": 2}
    hidden = 4 * LENGTH * 32 / 2
    assert checkpointed.moved - plain.moved == {"all-gather": 2 * 2 * hidden, "reduce-scatter": 2 * hidden}


def test_weights_of_the_next_layer_are_gathered_while_a_layer_computes(folder):
    """In the forward pass those of one layer more than computes, in the backward pass those of one layer less."""
    order = traffic_of(folder / "deep", 8, {"dp_shard": 8}).order
    last = 5 - 1
    middle = order.index(("forward", last))
    passes = {"forward": order[: middle + 1], "backward": order[middle + 1 :]}
    for index in range(last + 1):
        before = passes["forward"][: passes["forward"].index(("forward", index))]
        assert before.count("all-gather") == 1 + min(index + 1, last) + 1, "what is in no layer, and the layers so far"
        before = passes["backward"][: passes["backward"].index(("backward", index))]
        num_computed = last - index
        assert before.count("all-gather") == min(num_computed + 1, last) + 1
        assert before.count("reduce-scatter") == num_computed, "a layer's gradients are sent once they are there"


def test_experts_on_every_shard_are_gathered_with_their_layer(folder):
    """Only experts that other ranks do not have, or tokens that differ between them, need a mesh of their own."""
    num_layers = 2
    calls = traffic_of(folder / "moe", 4, {"dp_shard": 4}).calls
    assert dict(calls) == {"all-gather": 2 * num_layers + 1, "reduce-scatter": num_layers + 1}
