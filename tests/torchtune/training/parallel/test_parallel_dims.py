import pytest
import torch

from torchtune import training
from torchtune.models import Description, build
from torchtune.training import ParallelDims
from torchtune.training.parallel import check_parallelizable
from torchtune.utils import UserError


def test_shard_dimension_takes_the_remaining_processes():
    dims = ParallelDims(dp_replicate=2, dp_shard=-1, tp=2, cp=1, world_size=16)
    assert (dims.dp_shard, dims.data_size, dims.min_seq_len_divisor) == (4, 8, 2)
    assert dims.dp_enabled
    assert dims.tp_enabled
    assert not dims.cp_enabled
    assert str(dims).startswith("16 processes = 2 copies x 4 shards")


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"dp_shard": 3, "tp": 2, "world_size": 4}, r"x tensor_parallel_dim 2 = 6, but there are 4 processes"),
        ({"dp_shard": -1, "tp": 3, "world_size": 4}, r"4 processes cannot be divided by .*tensor_parallel_dim 3 = 3"),
        ({"tp": 0}, "tensor_parallel_dim is 0"),
        ({"dp_shard": 0}, "data_parallel_shard_dim is 0: it must be at least 1, or -1"),
        ({"dp_replicate": -1}, "data_parallel_replicate_dim is -1"),
        ({"ep": 0}, "expert_parallel_dim is 0: it must be at least 1."),
        (
            {"dp_shard": 2, "cp": 3, "ep": 4, "world_size": 6},
            r"expert_parallel_dim is 4: it must divide the shards, .*_shard_dim 2 x context_parallel_dim 3 = 6",
        ),
        (
            {"dp_shard": 2, "tp": 2, "ep": 3, "world_size": 4},
            "_shard_dim 2 x context_parallel_dim 1 x tensor_parallel_dim 2 = 4",
        ),
        ({"pp": 2, "world_size": 2}, "pipeline parallelism is not available"),
    ],
)
def test_sizes_that_do_not_fit_the_processes_are_refused(sizes, message):
    with pytest.raises(UserError, match=message):
        ParallelDims(**sizes)


def test_machines_started_with_different_nnodes_are_refused(monkeypatch):
    """The rendezvous is complete as soon as one of the machines says so."""
    torchrun = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "nobody", "MASTER_PORT": "0", "GROUP_WORLD_SIZE": "2"}
    for name, value in {**torchrun, "TORCHTUNE_NNODES": "3"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="was started with --nnodes 3, but the run has 2: "):
        ParallelDims.start(torch.device("cpu"), dp_shard=-1)


def test_one_process_changes_nothing():
    dims = ParallelDims()
    assert dims.sum(3, 2.5) == [3, 2.5]
    assert dims.any(True) is True
    assert dims.collate(len) is len
    assert dims.is_main
    sizes = {"num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "embed_dim": 8, "intermediate_dim": 8}
    model = build(Description(vocab_size=8, max_seq_len=8, **sizes))
    before = dict(model.named_parameters())
    training.parallelize(model, dims, device=torch.device("cpu"))
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    with pytest.raises(UserError, match="fsdp_cpu_offload"):
        training.parallelize(model, dims, device=torch.device("cpu"), cpu_offload=True)


def test_experts_take_their_ranks_from_the_shards():
    dims = ParallelDims(dp_replicate=2, dp_shard=-1, cp=2, ep=4, world_size=16)
    assert (dims.dp_shard, dims.data_size, dims.non_data_parallel_size) == (4, 8, 2)
    assert dims.ep_enabled
    assert str(dims).endswith("experts over 4 of the shards")


@pytest.mark.parametrize(
    ("experts", "message"),
    [
        (0, "expert_parallel_dim is 4: the model has no experts: set it to 1"),
        (6, r"expert_parallel_dim is 4: it must divide the 6 experts of 'layers\.0\.mlp\.experts'"),
    ],
)
def test_experts_that_cannot_be_distributed_are_named(experts, message):
    sizes = {"num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "embed_dim": 8, "intermediate_dim": 8}
    mixture = {"num_experts": experts, "experts_per_token": 2, "expert_dim": 8} if experts else {}
    with torch.device("meta"):
        model = build(Description(vocab_size=8, max_seq_len=8, **sizes, **mixture))
    with pytest.raises(UserError, match=message):
        check_parallelizable(model, ParallelDims(dp_shard=4, ep=4, world_size=4))


def test_layers_and_listed_modules_are_sharded_by_themselves():
    module = torch.nn.Linear(1, 1)
    assert training.get_shard_conditions("decoder.layers.3", module)
    assert training.get_shard_conditions("tok_embeddings", module, ["tok_embeddings"])
    assert not training.get_shard_conditions("layers.3.attn", module)
    assert not training.get_shard_conditions("output", module)
