"""Feed-forward layers in tiles of the sequence: the values and gradients of whole rows, with fewer activations."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from torchtune.models import Description, build
from torchtune.modules import FeedForward, TiledMLP, TransformerSelfAttentionLayer
from torchtune.modules.conversion import ConversionError, apply_conversions
from torchtune.modules.peft import LoRA
from torchtune.training import set_activation_checkpointing

SIZES = Description(
    vocab_size=19, num_layers=2, embed_dim=16, intermediate_dim=40, max_seq_len=512, num_heads=4, num_kv_heads=2
)
TOKENS = torch.randint(0, 19, (2, 21), generator=torch.Generator().manual_seed(1))


class LongestHidden(TorchDispatchMode):
    """Number of tokens of the longest hidden activations that an operator returns."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        # [b, s, hidden]; the other matrices of this width are gradients of weights
        if isinstance(output, torch.Tensor) and output.dim() == 3 and output.shape[-1] == SIZES.intermediate_dim:
            self.tokens = max(self.tokens, output.shape[0] * output.shape[1])
        return output


def gradients(model: torch.nn.Module) -> tuple[torch.Tensor, dict[str, torch.Tensor], int]:
    """Logits, gradients by name, and the number of tokens of the longest hidden activations."""
    with torch.autograd.set_multithreading_enabled(False), LongestHidden() as hidden:
        logits = model(TOKENS)
        logits.square().sum().backward()
    return logits, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, hidden.tokens


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("adapter", [False, True])
def test_tiles_have_the_values_and_gradients_of_whole_rows(adapter: bool, recomputed: bool) -> None:
    models = []
    for conversions in ([], [TiledMLP(tile_size=8)]):
        torch.manual_seed(0)
        model = build(SIZES).to(torch.float64)
        if adapter:
            conversions = [*conversions, LoRA(rank=2, apply_to_mlp=True)]
        apply_conversions(model, conversions)
        if recomputed:
            set_activation_checkpointing(model, {TransformerSelfAttentionLayer})
        models.append(model.to(torch.float64))
    whole, tiled = models
    tiled.load_state_dict(whole.state_dict())
    logits, expected, tokens = gradients(whole)
    tiled_logits, tiled_gradients, tokens_of_a_tile = gradients(tiled)
    torch.testing.assert_close(tiled_logits, logits, rtol=1e-12, atol=1e-12)
    assert tiled_gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(tiled_gradients[name], gradient, rtol=1e-10, atol=1e-12)
    assert (tokens, tokens_of_a_tile) == (2 * 21, 2 * 8)


@pytest.mark.parametrize(("conversions", "saves_hidden"), [([], True), ([TiledMLP(tile_size=8)], False)])
def test_hidden_activations_of_tiles_are_not_saved(conversions: list[TiledMLP], saves_hidden: bool) -> None:
    model = build(SIZES)
    apply_conversions(model, conversions)
    shapes = set()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        shapes.add(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(TOKENS).sum()
    assert ((2, 21, SIZES.intermediate_dim) in shapes) == saves_hidden
    if not saves_hidden:
        assert SIZES.intermediate_dim not in {shape[-1] for shape in shapes if len(shape) == 3}


def test_short_rows_are_computed_whole() -> None:
    model = build(SIZES)
    (report,) = apply_conversions(model, [TiledMLP(tile_size=21)])
    assert "2 modules converted (mlp)" in str(report)
    assert gradients(model)[2] == 2 * 21


def test_conversion_can_be_undone() -> None:
    with torch.device("meta"):
        model = build(SIZES)
    conversion = TiledMLP(tile_size=4)
    conversion.convert(model)
    conversion.revert(model)
    assert {module.tile_size for module in model.modules() if isinstance(module, FeedForward)} == {None}


@pytest.mark.parametrize("tile_size", [0, -1, True, 1.5])
def test_tile_size_that_is_no_positive_number_is_refused(tile_size) -> None:
    with pytest.raises(ConversionError, match=r"tile_size is .*: give a number of tokens"):
        TiledMLP(tile_size)


def test_model_without_feed_forward_layers_is_refused() -> None:
    with pytest.raises(ConversionError, match="no feed-forward layers"):
        TiledMLP().convert(torch.nn.Linear(2, 2))
