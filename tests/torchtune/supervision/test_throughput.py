"""Where the time goes, and how much of a device a model makes use of."""

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode, mm_flop

from tests.devices import DEVICE
from torchtune import supervision, training
from torchtune.data import Documents
from torchtune.models import Description, build
from torchtune.models._mixers import DeltaNetMixer
from torchtune.modules import BidirectionalAttention
from torchtune.modules.conversion import apply_conversions
from torchtune.modules.loss import LinearCrossEntropyLoss
from torchtune.modules.peft import LoRA
from torchtune.supervision import peak_flops
from torchtune.supervision._flops import count_flops
from torchtune.utils import Activity, watch_activity

SIZES = {"num_layers": 3, "num_heads": 4, "num_kv_heads": 2, "embed_dim": 16, "intermediate_dim": 24}


def in_place(added, a, b, **kwargs):
    return mm_flop(a, b)


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def tiny(**changes):
    torch.manual_seed(0)
    return build(Description(vocab_size=40, max_seq_len=64, **{**SIZES, **changes}))


def frozen_below(model):
    for part in (model.tok_embeddings, *model.layers[:2]):
        part.requires_grad_(False)
    return model


def with_adapters(model):
    lora = LoRA(rank=2, alpha=4, attn_modules=["q_proj", "v_proj"], apply_to_mlp=True)
    apply_conversions(model, [lora])
    model.tok_embeddings.requires_grad_(True)  # so that gradients pass every frozen matrix
    return model


def without_loss(model):
    model.skip_output_layer = False
    return model


@pytest.mark.parametrize(
    "change",
    [nn.Module.train, frozen_below, with_adapters, without_loss],
    ids=["full", "upper layers", "adapters", "logits everywhere"],
)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_operations_are_those_that_torch_counts(change, tied):
    model = change(tiny(tie_word_embeddings=tied))
    loss_fn = LinearCrossEntropyLoss(num_output_chunks=1)
    if change is not without_loss:
        loss_fn.set_model_output(model)
    tokens = torch.randint(40, (2, 8))
    labels = tokens.clone()
    labels[:, :5] = -100
    # torch does not know what the product in place costs that adapters make.
    with FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: in_place}) as counter:
        out = model(tokens)
        (out.mean() if change is without_loss else loss_fn(out, labels)).backward()
    products = (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_)  # with weights; attention's are others
    torch_flops = sum(counter.get_flop_counts()["Global"].get(op, 0) for op in products)
    counted = count_flops(model)
    assert torch_flops == counted.token * tokens.numel() + counted.label * 6


def test_attention_counts_pairs_that_see_each_other():
    by_pair = 12 * 4 * 4  # 12 for each channel of the queries
    counted = count_flops(tiny())
    assert counted.pair == {None: 3 * by_pair}
    assert counted.attention([1, 3]) == 3 * by_pair * (1 + 6)
    windows = count_flops(tiny(window=2, window_layers=(0, 2)))
    assert windows.pair == {2: 2 * by_pair, None: by_pair}
    assert windows.attention([1, 4]) == 2 * by_pair * (1 + 1 + 2 + 2 + 2) + by_pair * (1 + 10)
    assert windows.attention([3, 2], [0, 3]) == windows.attention([5])
    both_ways = tiny()
    BidirectionalAttention().convert(both_ways)
    counted = count_flops(both_ways)
    assert counted.pair == {}
    assert counted.attention([1, 3]) == 3 * by_pair * (1 + 9)
    assert counted.attention([3, 2], [0, 3]) == counted.attention([5])
    lower = count_flops(frozen_below(tiny()))
    assert lower.pair == {None: (4 + 4 + 12) * 16}


def test_linear_attention_counts_by_token():
    mixer = DeltaNetMixer(num_key_heads=2, num_value_heads=4, key_dim=6, value_dim=5)
    model = tiny(mixer=mixer, mixer_layers=(0, 2))
    tokens = torch.randint(40, (2, 8))
    with FlopCounterMode(display=False) as counter:
        model(tokens).sum().backward()
    torch_flops = counter.get_flop_counts()["Global"]
    products = torch_flops.get(torch.ops.aten.mm, 0) + torch_flops.get(torch.ops.aten.addmm, 0)
    counted = count_flops(model)
    convolved = 4 * (2 * 2 * 6 + 4 * 5)  # four positions of queries, keys and values
    state = 4 * 6 * 5
    assert counted.token * 16 + counted.label * 16 - products == 16 * 2 * 3 * (2 * convolved + 6 * state)
    assert counted.pair == {None: 12 * 4 * 4}


def test_experts_count_where_tokens_are_sent():
    experts = {"num_experts": 8, "expert_dim": 12, "expertless_layers": (1,)}
    matrices = 3 * 16 * 12  # of an expert
    router = 16 * 8
    dense = 3 * 16 * 24
    common = count_flops(tiny()).token - 2 * 6 * dense  # of two layers with experts
    for chosen in (1, 2):
        counted = count_flops(tiny(experts_per_token=chosen, **experts))
        assert counted.token == common + 2 * 6 * (router + chosen * matrices)


def test_models_without_layers_are_not_counted():
    assert count_flops(nn.Linear(2, 2)) is None


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA A10G", 70.0),
        ("NVIDIA A10", 125.0),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H200", 989.4),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("Quadro RTX 6000", None),
        ("Tesla T4", None),
    ],
)
def test_peak_flops_are_known_by_device_name(name, peak):
    assert peak_flops(name) == (peak and peak * 1e12)


def test_throughput_counts_both_kinds_of_tokens_without_pauses():
    clock = Clock()
    throughput = supervision.Throughput(window=2, clock=clock)
    assert set(throughput.metrics().values()) == {0.0}
    for seconds, processed in ((50.0, 7), (1.0, 100), (3.0, 300)):
        clock.now += seconds
        throughput.step(processed=processed, trained=processed // 4)
        with throughput.paused():
            clock.now += 1000.0
    counts = {"processed_tokens": 407, "trained_tokens": 101, "elapsed_seconds": 3054.0}
    assert throughput.metrics() == counts | {"tokens_per_second_per_gpu": 100.0, "trained_tokens_per_second": 25.0}
    assert (throughput.processed, throughput.trained) == (407, 101)
    with pytest.raises(ValueError, match="at least 1"):
        supervision.Throughput(window=0)


def test_shares_are_of_the_time_since_the_last_log():
    clock = Clock()
    dims = training.ParallelDims()
    dims.world_size = 2
    throughput = supervision.Throughput(clock=clock, dims=dims)

    def wait(seconds):
        clock.now += seconds
        dims.waited += seconds

    def loader():
        for number in range(2):
            clock.now += 3.0
            yield [number]

    for number, _ in enumerate(throughput.loading(loader())):
        clock.now += 4.0
        wait(1.0)
        throughput.step(processed=80, trained=8)
        if number == 0:
            first = throughput.metrics()
            with throughput.paused("validation"):
                clock.now += 1.0
                wait(1.0)  # is part of the validation
    counts = {"processed_tokens": 160, "trained_tokens": 8, "elapsed_seconds": 8.0}  # the tokens of both processes
    assert first == {
        **counts,
        "tokens_per_second_per_gpu": 10.0,
        "trained_tokens_per_second": 1.0,
        "lost_to_waiting": 1 / 8,
        "lost_to_data": 3 / 8,
    }
    assert throughput.metrics() == {
        **{name: 2 * count for name, count in counts.items()},
        "elapsed_seconds": 18.0,  # with validation
        "tokens_per_second_per_gpu": 10.0,
        "trained_tokens_per_second": 1.0,
        "lost_to_waiting": 1 / 10,
        "lost_to_data": 3 / 10,
        "lost_to_validation": 2 / 10,
    }


def test_mfu_is_needed_flops_over_peak_flops(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")  # no machine here has one
    clock = Clock()
    model = tiny().bfloat16()
    LinearCrossEntropyLoss().set_model_output(model)
    throughput = supervision.Throughput(clock=clock, model=model, device=torch.device("cuda"))
    documents = Documents.from_lengths([3, 5], DEVICE)
    batch = {"tokens": torch.zeros(1, 8, dtype=torch.int64), "documents": documents}
    for _ in throughput.loading([[batch, batch]]):
        model(batch["tokens"], documents=documents)
        clock.now += 2.0
        throughput.step(processed=16, trained=5)
    counted = count_flops(model)
    expected = counted.token * 16 + counted.label * 5 + 2 * counted.attention([3, 5])
    assert throughput.metrics()["mfu"] == pytest.approx(expected / 2.0 / 989.4e12)


@pytest.mark.parametrize(
    ("name", "dtype", "said"),
    [("Some GPU", torch.bfloat16, 1), ("NVIDIA H200", torch.float32, 0)],
    ids=["unknown", "float32"],
)
def test_mfu_is_left_out_where_the_peak_is_unknown(name, dtype, said, monkeypatch, caplog):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    model = tiny().to(dtype)
    with caplog.at_level("INFO", logger="torchtune"):
        throughput = supervision.Throughput(model=model, device=torch.device("cuda"))
    assert "mfu" not in throughput.metrics()
    assert len([record for record in caplog.records if "no MFU" in record.message]) == said
    assert "mfu" not in supervision.Throughput(model=model, device=torch.device("cpu")).metrics()


def test_activity_moves_with_every_part_of_a_loop():
    model = tiny()
    throughput = supervision.Throughput(model=model, step=6)
    activity = throughput.activity
    assert str(activity) == "in step 7"
    moves = activity.moves
    for _ in throughput.loading(iter([[1], [2]])):
        assert activity.moves > moves
        moves = activity.moves
        model(torch.zeros(2, 8, dtype=torch.int64))
        assert (activity.moves, tuple(activity.shape)) == (moves + 1, (2, 8))
        with throughput.paused("saving"):
            assert str(activity) == f"saving after step {activity.step}"
        throughput.step(processed=1, trained=1)
        assert activity.phase == "training"
    assert activity.step == 8


def test_run_control_does_not_reset_the_activity(tmp_path):
    """A run that goes on is at a later step, which messages of lost ranks and of full memory name."""
    with watch_activity(Activity(0)):
        throughput = supervision.Throughput(step=7)
        supervision.RunControl(training.ParallelDims(), tmp_path)
        assert throughput.activity.step == 7
