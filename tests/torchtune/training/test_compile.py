import warnings

import pytest
import torch
from torch import nn
from torch._dynamo import register_backend
from torch._dynamo.backends.common import aot_autograd

from tests.devices import DEVICE
from torchtune import training
from torchtune.data import Documents
from torchtune.models import Description, build
from torchtune.models._mixers import DeltaNetMixer
from torchtune.models.llama3_2 import llama3_2
from torchtune.modules.kernels.onednn import fast_products
from torchtune.modules.loss import LinearCrossEntropyLoss, setup_loss
from torchtune.utils import UserError

pytestmark = [
    # inductor imports a part of torch that is written with torch.jit
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning"),
]


def make_model():
    torch.manual_seed(0)
    return llama3_2(
        vocab_size=64, num_layers=3, num_heads=4, num_kv_heads=2, embed_dim=32, max_seq_len=128, intermediate_dim=64
    )


def batch(lengths):
    documents = Documents.from_lengths(lengths, DEVICE)
    torch.manual_seed(sum(lengths))
    tokens = torch.randint(0, 64, (1, documents.num_tokens))
    return {"tokens": tokens, "documents": documents, "input_pos": documents.positions()[None]}


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("checkpointing", [(False,), (True,), (False, "selective", "op")])
def test_layers_share_two_compilations_whatever_the_lengths(checkpointing, monkeypatch):
    """``aot_eager`` goes through the whole front end and skips code generation, which is slow."""
    monkeypatch.setenv("TORCH_COMPILE_BACKEND", "aot_eager")
    plain, compiled = make_model(), make_model()
    training.checkpoint_activations(compiled, *checkpointing)
    training.compile_model(compiled)
    assert list(plain.state_dict()) == list(compiled.state_dict())
    for lengths in ((7, 9), (5, 20, 3), (30,), (4, 4, 4, 4), (1, 50)):
        for model in (plain, compiled):
            model.zero_grad()
        losses = [model(**batch(lengths)).square().mean() for model in (plain, compiled)]
        for loss in losses:
            loss.backward()
        assert torch.allclose(*losses, atol=1e-6)
        for actual, expected in zip(compiled.parameters(), plain.parameters(), strict=True):
            assert torch.allclose(actual.grad, expected.grad, atol=1e-5)
    stats = torch._dynamo.utils.counters["stats"]
    assert stats["unique_graphs"] == 2  # the first length, then any length
    # A selectively checkpointed layer is one call, which holds all others
    assert stats["calls_captured"] > (60 if len(checkpointing) == 1 else 3)
    assert not torch._dynamo.utils.counters["graph_break"]


def test_products_of_a_layer_are_compiled_once_for_few_rows_and_many():
    linear = nn.Linear(128, 128)
    graphs = []

    def product(x):
        with fast_products(x):
            return linear(x)

    compiled = torch.compile(product, backend=lambda graph, _: graphs.append(graph) or graph.forward, dynamic=True)
    for rows in (16, 40, 64, 300):  # on both sides of what is worth another kernel
        compiled(torch.randn(rows, 128))
    assert len(graphs) == 1


def test_model_without_layers_and_loss_are_compiled_whole(monkeypatch):
    monkeypatch.setenv("TORCH_COMPILE_BACKEND", "aot_eager")
    model = nn.Linear(3, 3)
    loss = nn.MSELoss()
    training.compile_model(model, verbose=False)
    assert training.compile_loss(loss, verbose=False) is loss
    x = torch.ones(2, 3)
    assert loss(model(x), x).item() == pytest.approx(
        (nn.functional.linear(x, model.weight, model.bias) - x).square().mean().item()
    )
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2


@pytest.mark.skipif(DEVICE != "cpu", reason="is about the compiler of the CPU's kernels")
def test_time_of_compiling_on_a_cpu_is_logged_once(monkeypatch, caplog):
    monkeypatch.setenv("TORCH_COMPILE_BACKEND", "inductor")
    caplog.set_level("INFO", logger="torchtune")
    training.compile_model(make_model())
    training.compile_loss(LinearCrossEntropyLoss())
    (record,) = caplog.records
    assert record.getMessage().startswith("Compiling 3 layers and the loss with inductor: on a CPU, C++ that takes")
    with warnings.catch_warnings(record=True) as seen:
        warnings.warn_explicit("of its own imports", DeprecationWarning, "x.py", 1, module="torch._inductor.codecache")
    assert not seen


def test_a_plain_loss_is_compiled(monkeypatch):
    monkeypatch.setenv("TORCH_COMPILE_BACKEND", "aot_eager")
    model = make_model()
    loss = training.compile_loss(setup_loss(nn.CrossEntropyLoss(), model), verbose=False)
    tokens = torch.arange(8)[None]
    hidden = model(tokens, output="hidden")
    total, _ = loss.sum_and_count(hidden, tokens, model.output)
    exact = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten(), reduction="sum")
    torch.testing.assert_close(total, exact)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_loss_with_a_compile_strategy_compiles_itself(monkeypatch):
    monkeypatch.setenv("TORCH_COMPILE_BACKEND", "eager")

    class Loss(nn.Module):
        def apply_compile_strategy(self, **kwargs):
            self.compiled_with = kwargs

    (argument,) = training.compile_loss(Loss()).compiled_with.items()
    assert argument[0] == "backend"
    assert torch.compile(lambda x: x + 1, backend=argument[1])(torch.ones(1)) == 2


def test_a_compiler_that_fails_does_not_end_a_run(monkeypatch, caplog):
    """Each part runs uncompiled, and it is said once."""

    def broken(graph, inputs):
        raise AssertionError("384 v.s. 383\nand a page of details")

    register_backend(broken, name="broken_compiler")
    monkeypatch.setenv("TORCH_COMPILE_BACKEND", "broken_compiler")
    model = make_model()
    loss = LinearCrossEntropyLoss()
    tokens = torch.arange(8)[None]
    grads = []
    for compiles in (False, True):
        if compiles:
            training.compile_model(model)
            training.compile_loss(loss)
        total, _ = loss.sum_and_count(model(tokens, output="hidden"), tokens, model.output)
        total.backward()
        grads.append([total.detach(), *(parameter.grad for parameter in model.parameters())])
        model.zero_grad()
    for first, second in zip(*grads, strict=True):
        torch.testing.assert_close(first, second)
    messages = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert messages == [
        "compile: broken_compiler failed on a part of the model, which runs uncompiled, slower and with the same "
        "results (AssertionError: 384 v.s. 383)."
    ]


def test_a_compiler_that_fails_on_the_backward_pass_does_not_end_a_run(monkeypatch, caplog):
    """By default torch compiles the backward pass inside of it, where a failure cannot be caught."""

    def broken(graph, inputs):
        raise AssertionError("no kernel for this gradient")

    backend = aot_autograd(fw_compiler=lambda graph, _: graph.forward, bw_compiler=broken)
    register_backend(backend, name="broken_in_backward")
    monkeypatch.setenv("TORCH_COMPILE_BACKEND", "broken_in_backward")
    model = make_model()
    grads = []
    for compiles in (False, True):
        if compiles:
            training.compile_model(model)
        for lengths in ((7, 9), (5, 20, 3)):  # static shapes, then dynamic ones
            model(**batch(lengths)).square().mean().backward()
        grads.append([parameter.grad for parameter in model.parameters()])
        model.zero_grad()
    for compiled, expected in zip(*grads, strict=True):
        torch.testing.assert_close(compiled, expected)
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "failed on a part of the model, which runs uncompiled" in warning
    assert "no kernel for this gradient" in warning


@pytest.mark.skipif(DEVICE != "cpu", reason="is about the compiler of the CPU's kernels")
def test_missing_cpp_compiler_is_refused_before_the_first_step(monkeypatch):
    from torch._inductor import config as inductor_config

    monkeypatch.delenv("TORCH_COMPILE_BACKEND", raising=False)
    monkeypatch.setattr(inductor_config.cpp, "cxx", ("no-such-compiler",))
    import torch._inductor.cpp_builder as builder

    builder.get_cpp_compiler.cache_clear() if hasattr(builder.get_cpp_compiler, "cache_clear") else None
    with pytest.raises(UserError, match=r"needs a C\+\+ compiler and finds none: install g\+\+"):
        training.compile_model(make_model())


@pytest.mark.parametrize("has_delta_rule", [False, True])
def test_gated_delta_nets_are_compiled_without_mixed_reductions(has_delta_rule, monkeypatch):
    from torch._inductor import config as inductor_config

    monkeypatch.setenv("TORCH_COMPILE_BACKEND", "eager")
    mixer = DeltaNetMixer(num_key_heads=2, num_value_heads=4, key_dim=16, value_dim=16)
    sizes = {"vocab_size": 32, "num_layers": 1, "embed_dim": 32, "intermediate_dim": 32, "max_seq_len": 64}
    mixer_options = {"mixer": mixer, "mixer_layers": (0,)} if has_delta_rule else {}
    if not hasattr(inductor_config.triton, "mix_order_reduction"):
        pytest.skip("this torch does not fuse such reductions")
    with inductor_config.patch({"triton.mix_order_reduction": True}):
        training.compile_model(build(Description(**sizes, num_heads=2, num_kv_heads=2, **mixer_options)), verbose=False)
        assert inductor_config.triton.mix_order_reduction is not has_delta_rule
