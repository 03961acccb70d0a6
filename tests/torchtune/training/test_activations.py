"""What a forward pass keeps for the backward pass: checkpointing and offloading of activations."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from torchtune import training
from torchtune.models.llama3_2 import llama3_2
from torchtune.modules import TransformerSelfAttentionLayer
from torchtune.modules.conversion import apply_conversions
from torchtune.modules.peft import LoRA
from torchtune.training.activations import ActivationCheckpointingError, CheckpointedForward
from torchtune.utils import UserError, simulated


def make_model():
    torch.manual_seed(0)
    return llama3_2(
        vocab_size=64, num_layers=4, num_heads=4, num_kv_heads=2, embed_dim=32, max_seq_len=64, intermediate_dim=64
    )


def loss_and_gradients(model):
    torch.manual_seed(1)
    loss = model(torch.randint(0, 64, (2, 16))).square().mean()
    loss.backward()
    return loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


def saved_bytes(model):
    total = 0

    def pack(tensor):
        nonlocal total
        total += tensor.numel() * tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(torch.randint(0, 64, (2, 16)))
    return total


def linear_or_empty(module, recurse, numel):
    return isinstance(module, nn.Linear) or numel == 0


@pytest.mark.parametrize(
    "settings",
    [
        ({TransformerSelfAttentionLayer},),
        (linear_or_empty,),
        ("full", None),
        ("selective", 2),
        ("selective", "2"),
        ("selective", "op"),
        ("none", None),
    ],
)
def test_checkpointing_changes_neither_loss_gradients_nor_names(settings):
    plain, checkpointed = make_model(), make_model()
    by_policy = len(settings) == 1
    apply = training.set_activation_checkpointing if by_policy else training.apply_selective_activation_checkpointing
    apply(checkpointed, *settings)
    assert list(plain.state_dict()) == list(checkpointed.state_dict())
    loss, gradients = loss_and_gradients(plain)
    other_loss, other_gradients = loss_and_gradients(checkpointed)
    assert torch.equal(loss, other_loss)
    assert gradients.keys() == other_gradients.keys()
    for name, gradient in gradients.items():
        assert torch.equal(gradient, other_gradients[name]), name


@pytest.mark.parametrize("use_dora", [False, True])
def test_operators_of_layers_with_some_adapters_are_kept_or_computed_again(use_dora):
    """An adapter adds to a product in place: if that is the one that is kept, what is kept is not what was computed."""
    seen_tensors = []
    for mode in (None, "selective"):
        model = make_model()
        apply_conversions(model, [LoRA(rank=2, alpha=4, target_modules=["q_proj", "v_proj"], use_dora=use_dora)])
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_b" in name:
                    parameter.fill_(0.1)
        training.apply_selective_activation_checkpointing(model, mode, mode and "op")
        seen_tensors.append(loss_and_gradients(model))
    (loss, gradients), (other_loss, other_gradients) = seen_tensors
    assert torch.equal(loss, other_loss)
    for name, gradient in gradients.items():
        assert gradient is other_gradients[name] or torch.equal(gradient, other_gradients[name]), name


def test_checkpointed_layers_save_fewer_bytes():
    plain, full, second = make_model(), make_model(), make_model()
    training.set_activation_checkpointing(full, {TransformerSelfAttentionLayer})
    training.set_activation_checkpointing(full, {TransformerSelfAttentionLayer})  # twice is once
    training.apply_selective_activation_checkpointing(second, "selective", 2)
    assert not isinstance(full.layers[0].forward.forward, CheckpointedForward)
    assert [isinstance(layer.forward, CheckpointedForward) for layer in second.layers] == [False, True, False, True]
    assert saved_bytes(full) < 0.4 * saved_bytes(plain)
    assert saved_bytes(full) < saved_bytes(second) < saved_bytes(plain)


class Products(TorchDispatchMode):
    """Counts matrix products, those that are added to something aside."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket is torch.ops.aten.mm
        return func(*args, **kwargs or {})


def test_of_layers_with_adapters_every_other_product_of_a_base_is_kept():
    """Of the seven of a layer four are; an adapter's x Aᵀ is computed again."""
    counts = []
    for settings in ((False,), (False, "selective", "op"), (True,)):
        model = make_model()
        targets = ["q_proj", "k_proj", "v_proj", "output_proj", "w1", "w2", "w3"]
        apply_conversions(model, [LoRA(rank=2, alpha=4, target_modules=targets)])
        training.checkpoint_activations(model, *settings)
        loss = model(torch.randint(0, 64, (2, 16))).square().mean()
        with Products() as seen:
            loss.backward()
        counts.append(seen.count)
        assert all(parameter.grad is not None for name, parameter in model.named_parameters() if "lora_b" in name)
    plain, selective, full = counts
    assert full - plain == 4 * (7 + 7)
    assert selective - plain == 4 * (3 + 7)


def test_dropout_is_drawn_alike_in_the_recomputation():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5), nn.Linear(64, 1))
    training.set_activation_checkpointing(model, {nn.Dropout})
    x = torch.ones(8, 64, requires_grad=True)
    hidden = model[1](model[0](x))
    mask = hidden.detach() != 0
    hidden.sum().backward()
    assert torch.allclose(model[0].bias.grad, 2 * mask.sum(0).float())


def test_policies_and_modes_that_select_nothing_are_refused():
    with pytest.raises(ValueError, match="No module of TransformerDecoder matches"):
        training.set_activation_checkpointing(make_model(), {nn.Conv1d})
    with pytest.raises(ActivationCheckpointingError, match="not both"):
        training.checkpoint_activations(make_model(), True, "full")
    for mode, option in (("selective", "layer"), ("partly", None), ("selective", 0)):
        with pytest.raises(ActivationCheckpointingError, match="ac_option"):
            training.apply_selective_activation_checkpointing(make_model(), mode, option)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="is about machines without an accelerator")
def test_offloading_without_an_accelerator_is_refused():
    with pytest.raises(UserError, match="enable_activation_offloading: there is no accelerator"):
        training.get_act_offloading_ctx_manager(make_model(), True)


def test_small_tensors_and_parameters_stay_on_the_device():
    parameter = nn.Parameter(torch.zeros(32, 32))
    with simulated():  # tensors of the CPU stand for those of an accelerator
        offloading = training.OffloadActivations(min_offload_size=1024)
        assert not offloading._should_keep(torch.zeros(256)), "1,024 bytes"
        assert offloading._should_keep(torch.zeros(255))
        assert not offloading._should_keep(torch.zeros(512, dtype=torch.bfloat16))
        assert offloading._should_keep(parameter)
        assert offloading._should_keep(parameter.T), "a view of a parameter"


def test_block_without_offloading_can_be_entered_repeatedly():
    manager = training.get_act_offloading_ctx_manager(make_model(), False)
    for _ in range(2):
        with manager:
            pass


def test_inside_the_no_op_manager_nothing_is_packed():
    x = torch.ones(3, requires_grad=True)

    def refuse(_):
        raise AssertionError

    with torch.autograd.graph.saved_tensors_hooks(refuse, refuse), training.NoOpManager():
        y = x.exp()
    y.sum().backward()
    assert torch.equal(x.grad, x.detach().exp())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("use_streams", [True, False])
def test_offloading_changes_nothing_but_memory(use_streams):
    model = make_model().cuda()
    results = []
    for enable in (False, True):
        manager = training.get_act_offloading_ctx_manager(model, enable, use_streams=use_streams)
        for _ in range(2):
            model.zero_grad()
            torch.manual_seed(0)
            with manager:
                loss = model(torch.randint(0, 64, (2, 64)).cuda()).square().mean()
            loss.backward()
        results.append([parameter.grad.clone() for parameter in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
