"""Any loss says a sum and a count to a recipe, or is refused before training."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchtune.models.llama3 import llama3
from torchtune.modules import TransformerDecoder
from torchtune.modules.loss import (
    CEWithChunkedOutputLoss,
    ForwardKLLoss,
    LinearCrossEntropyLoss,
    LossError,
    SFTLoss,
    setup_loss,
)

VOCAB = 61


@pytest.fixture
def model() -> TransformerDecoder:
    torch.manual_seed(0)
    model = llama3(
        vocab_size=VOCAB, num_layers=1, num_heads=2, num_kv_heads=2, embed_dim=16, max_seq_len=32, intermediate_dim=24
    )
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model.double()


def batch() -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(1)
    tokens, labels = torch.randint(VOCAB, (2, 3, 10), generator=rng)
    labels[0, :7] = labels[2, 4] = -100
    return tokens, labels


class Focal(nn.Module):
    """A user's loss of each label: cross entropy times (1 - p)²."""

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        losses = F.cross_entropy(logits, labels, reduction="none")
        return (1 - (-losses).exp()) ** 2 * losses


class Mean(Focal):
    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        return super().forward(logits, labels).mean()


class OfLogits(SFTLoss, nn.Module):
    """Written for older recipes: logits and labels of a whole batch."""

    def apply_compile_strategy(self, *args: object, **kwargs: object) -> nn.Module:
        return self

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())


class OfHidden(OfLogits):
    """Written for older recipes: it tells the model to return hidden states."""

    def set_model_output(self, model: nn.Module) -> None:
        super().set_model_output(model)
        model.skip_output_layer = True
        self.head = (model.output,)

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return super().forward(self.head[0](outputs), targets)


class Doubled(LinearCrossEntropyLoss):
    """Changes the mean alone, of a loss that has a sum."""

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return 2 * super().forward(outputs, targets)


def focal(logits: Tensor, labels: Tensor) -> Tensor:
    p = torch.softmax(logits, -1).gather(1, labels[:, None])
    return ((1 - p) ** 2 * -p.log()).sum()


def entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels, reduction="sum")


@pytest.mark.parametrize(
    ("loss", "formula"),
    [
        (LinearCrossEntropyLoss(), entropy),
        (nn.CrossEntropyLoss(), entropy),
        (nn.CrossEntropyLoss(reduction="none"), entropy),
        (
            nn.CrossEntropyLoss(label_smoothing=0.1),
            lambda x, y: F.cross_entropy(x, y, label_smoothing=0.1, reduction="sum"),
        ),
        (Focal(), focal),
        (Mean(), focal),
        (OfLogits(), entropy),
        (OfHidden(), entropy),
        (Doubled(), lambda x, y: 2 * entropy(x, y)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_sum_and_gradients_are_those_of_the_formula(model, loss, formula):
    tokens, labels = batch()
    reference = copy.deepcopy(model)
    chosen = labels != -100
    exact = formula(reference(tokens).double()[chosen], labels[chosen])
    exact.backward()
    total, count = setup_loss(loss, model).sum_and_count(model(tokens, output="hidden"), labels, model.output)
    assert int(count) == int(chosen.sum()) == 22
    total.backward()
    # Logits are float32 to losses of logits.
    torch.testing.assert_close(total.double(), exact, rtol=1e-6, atol=0)
    for actual, expected in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(actual.grad, expected.grad, rtol=1e-5, atol=1e-5)


def test_a_batch_without_labels_adds_nothing(model):
    tokens, labels = batch()
    hidden = model(tokens, output="hidden")
    loss = setup_loss(nn.CrossEntropyLoss(), model)
    total, count = loss.sum_and_count(hidden, torch.full_like(labels, -100), model.output)
    assert (total.item(), int(count)) == (0.0, 0)
    total.backward()
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def lambda_loss(function: Callable[..., object]) -> nn.Module:
    class Loss(nn.Module):
        def forward(self, logits: Tensor, labels: Tensor) -> object:
            return function(logits, labels)

    return Loss()


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (nn.CrossEntropyLoss(reduction="sum"), "returns no mean over the labels"),
        (nn.MSELoss(), "cannot be called with logits"),
        (LinearCrossEntropyLoss(ignore_index=-1), "ignores the label -1, but -100 marks"),
        (nn.CrossEntropyLoss(ignore_index=0), "ignores the label 0"),
        (ForwardKLLoss(), "missing 1 required positional argument: 'labels'"),
        (lambda_loss(lambda logits, labels: logits[:, :-1].flatten(0, 2)), "Dimension out of range"),
        (lambda_loss(lambda logits, labels: None), "returns a NoneType: return the mean loss"),
        (lambda_loss(lambda logits, labels: logits), r"returns a tensor \[2, 61\]"),
        (lambda_loss(lambda logits, labels: F.cross_entropy(logits, labels).detach()), "without gradient"),
        (nn.PReLU(), "PReLU has parameters"),
        ("cross_entropy", "str is no torch.nn.Module"),
    ],
)
def test_losses_that_cannot_train_are_refused_in_one_sentence(model, loss, message):
    with pytest.raises(LossError, match=message) as raised:
        setup_loss(loss, model)
    assert str(raised.value).startswith("loss: ")


def test_no_loss_tells_the_model_what_to_return(model):
    tokens, _ = batch()
    logits = model(tokens)
    for loss in (LinearCrossEntropyLoss(), nn.CrossEntropyLoss(), OfLogits()):
        setup_loss(loss, model)
        assert model.skip_output_layer is False
        assert torch.equal(model(tokens), logits)


def test_output_argument_of_forward_decides_what_it_returns(model):
    tokens, _ = batch()
    hidden = model(tokens, output="hidden")
    assert torch.equal(model.output(hidden).float(), model(tokens))
    with pytest.warns(FutureWarning, match="LinearCrossEntropyLoss"):
        CEWithChunkedOutputLoss().set_model_output(model)  # an older recipe
    assert torch.equal(model(tokens), hidden)
    assert torch.equal(model(tokens, output="logits"), model.output(hidden).float())
    with pytest.raises(ValueError, match="ask for 'logits' or 'hidden'"):
        model(tokens, output="loss")


class WithIndex(LinearCrossEntropyLoss):
    """Its ``sum_and_count`` was written before recipes gave it a list for the losses of single tokens."""

    def sum_and_count(self, hidden, labels, projection, *, index=None):
        assert index is not None
        return super().sum_and_count(hidden, labels, projection, index=index)


class Older(LinearCrossEntropyLoss):
    """Its ``sum_and_count`` was written before recipes gave it the positions of the labels."""

    def sum_and_count(self, hidden: Tensor, labels: Tensor, projection: nn.Module) -> tuple[Tensor, Tensor]:
        total, count = super().sum_and_count(hidden, labels, projection)
        return 2 * total, count


class PerToken(nn.Module):
    """A user's own loss of single tokens."""

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits, labels, reduction="none")


@pytest.mark.parametrize("kind", [LinearCrossEntropyLoss, PerToken])
def test_losses_of_single_tokens_are_appended_to_the_list_that_the_recipe_gives(model, kind):
    tokens, labels = batch()
    hidden = model(tokens, output="hidden")
    loss = setup_loss(kind(), model)
    row_losses = []
    total, count = loss.sum_and_count(hidden, labels, model.output, row_losses=row_losses)
    logits = model.output(hidden).double().flatten(0, 1)
    every = nn.functional.cross_entropy(logits, labels.flatten(), reduction="none")
    losses = torch.cat(row_losses)
    assert not losses.requires_grad
    torch.testing.assert_close(losses.double(), every[labels.flatten() != -100], rtol=1e-5, atol=1e-6)
    alone, _ = loss.sum_and_count(hidden, labels, model.output)
    assert alone.item() == total.item()
    assert len(losses) == count


@pytest.mark.parametrize("kind", [WithIndex, Older, OfLogits, nn.CrossEntropyLoss])
def test_a_loss_that_gives_no_losses_of_single_tokens_trains(model, kind):
    tokens, labels = batch()
    index = (labels.flatten() != -100).nonzero()[:, 0]
    row_losses = []
    loss = setup_loss(kind(), model)
    hidden = model(tokens, output="hidden")
    total, _ = loss.sum_and_count(hidden, labels, model.output, index=index, row_losses=row_losses)
    assert total.isfinite()
    assert row_losses == []


def test_known_positions_of_labels_change_nothing(model):
    tokens, labels = batch()
    hidden = model(tokens, output="hidden")
    index = (labels.flatten() != -100).nonzero()[:, 0]
    expected, count = LinearCrossEntropyLoss().sum_and_count(hidden, labels, model.output)
    for kind, factor in ((LinearCrossEntropyLoss, 1), (nn.CrossEntropyLoss, 1), (Older, 2), (OfLogits, None)):
        loss = setup_loss(kind(), model)
        alone, same = (
            loss.sum_and_count(hidden, labels, model.output, index=label_index) for label_index in (None, index)
        )
        assert (alone[0].item(), alone[1].item()) == (same[0].item(), same[1].item())
        assert same[1] == count
        if factor:
            torch.testing.assert_close(same[0].double(), factor * expected, rtol=1e-6, atol=0)


def test_loss_of_single_tokens_is_weighted_and_a_mean_refuses_weights(model):
    torch.manual_seed(0)
    hidden = torch.randn(1, 4, model.output.in_features, dtype=torch.float64)
    labels = torch.tensor([[5, -100, 7, 9]])
    weights = torch.tensor([[0.5, 9.0, 2.0, 1.0]])
    logits = model.output(hidden)[0].float()  # as losses get them
    losses = nn.functional.cross_entropy(logits, labels[0], reduction="none")
    loss = setup_loss(nn.CrossEntropyLoss(reduction="none"), model)
    total, count = loss.sum_and_count(hidden, labels, model.output, weights=weights)
    torch.testing.assert_close(total, (losses * weights[0])[[0, 2, 3]].sum())
    assert count == 3.5
    mean = setup_loss(nn.CrossEntropyLoss(), model)
    with pytest.raises(LossError, match="rows of the data have weights, which CrossEntropyLoss cannot apply"):
        mean.sum_and_count(hidden, labels, model.output, weights=weights)
