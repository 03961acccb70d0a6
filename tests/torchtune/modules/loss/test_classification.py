"""The loss of classifiers against transformers, and packed rows against padded ones."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

import torchtune
from tests.devices import DEVICE
from tests.tiny import write_checkpoint
from torchtune.data import BatchLoader, collate_documents, padded_collate_sft
from torchtune.datasets import classification_dataset, instantiate_collate
from torchtune.modules.loss import ClassificationLoss, LossError, setup_loss
from torchtune.training import setup_classification

ROWS = {
    "single_label_classification": ["a", "c", "b", "a", "c"],
    "multi_label_classification": [["a", "c"], [], ["b"], ["a", "b", "c"], ["c"]],
    "regression": [0.5, -1.25, 3.0, 0.5, 2.0],
}
TEXTS = ["the cat sees", "a red", "why not the dog and where", "one", "two three big"]


def trained_loss(folder, labels, *, collate=collate_documents, batch_size=5, weights=None, **settings):
    """The mean loss of rows and the gradients of the model, as a recipe computes them."""
    model, tokenizer = torchtune.load(folder, dtype="fp32", device=DEVICE)
    rows = [{"text": text, "label": label} for text, label in zip(TEXTS, labels, strict=True)]
    data = classification_dataset(tokenizer, rows, **settings)
    collate = instantiate_collate(collate, tokenizer)
    loader = BatchLoader(data, batch_size=batch_size, collate_fn=collate, shuffle=False, seed=0)
    loss_fn = setup_loss(ClassificationLoss(), model)
    setup_classification(model, loss_fn, loader)
    total, count = 0.0, 0
    for (batch,) in loader:
        batch = batch.to(DEVICE)
        hidden = model(**batch.model_inputs(), output="hidden")
        part, number = loss_fn.sum_and_count(hidden, batch.labels, model.output, index=batch.label_index)
        total = total + part
        count = count + int(number)
    loss = total / count
    loss.backward()
    names = {"embedding": model.tok_embeddings.weight, "head": model.output.weight}
    return loss.item(), {name: parameter.grad.cpu() for name, parameter in names.items()}


@pytest.fixture(scope="module", params=ROWS)
def classifier(request, tmp_path_factory):
    """Problem type, and a folder with a random classifier that transformers has written."""
    folder = write_checkpoint(tmp_path_factory.mktemp(request.param))
    outputs = 1 if request.param == "regression" else 3
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(folder, num_labels=outputs, problem_type=request.param, pad_token_id=0)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    return request.param, folder


def test_loss_and_gradients_are_those_of_transformers(classifier):
    problem_type, folder = classifier
    labels = ROWS[problem_type]
    reference = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).to(DEVICE)
    _, tokenizer = torchtune.load(folder, dtype="fp32", device="cpu")
    ids = [torch.tensor(tokenizer.encode(text, add_eos=False)) for text in TEXTS]
    tokens = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in ids], batch_first=True)
    targets = torch.zeros(len(labels), 3)
    if problem_type == "single_label_classification":
        targets = torch.tensor(["abc".index(label) for label in labels])
    elif problem_type == "multi_label_classification":
        for row, classes in zip(targets, labels, strict=True):
            for name in classes:
                row["abc".index(name)] = 1.0
    else:
        targets = torch.tensor(labels)
    expected = reference(input_ids=tokens, attention_mask=mask, labels=targets).loss
    expected.backward()
    loss, gradients = trained_loss(folder, labels)
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    gradient = reference.model.embed_tokens.weight.grad.cpu()
    torch.testing.assert_close(gradients["embedding"], gradient, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(gradients["head"], reference.score.weight.grad.cpu(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "other",
    [{"packed": True, "max_seq_len": 12}, {"collate": padded_collate_sft}, {"batch_size": 2}],
    ids=["packed", "padded", "batches"],
)
def test_packed_and_padded_rows_have_the_same_loss(classifier, other):
    problem_type, folder = classifier
    loss, gradients = trained_loss(folder, ROWS[problem_type])
    other_loss, other_gradients = trained_loss(folder, ROWS[problem_type], **other)
    assert other_loss == pytest.approx(loss, rel=1e-5)
    for name, gradient in gradients.items():
        torch.testing.assert_close(other_gradients[name], gradient, rtol=1e-4, atol=1e-5)


def test_batch_without_labels_has_the_loss_zero_and_a_gradient():
    projection = torch.nn.Linear(8, 3, bias=False)
    hidden = torch.randn(1, 4, 8, requires_grad=True)
    labels = torch.full((1, 4), -100)
    total, count = ClassificationLoss().sum_and_count(hidden, labels, projection)
    total.backward()
    assert total.item() == 0
    assert count.item() == 0
    assert not projection.weight.grad.any()


def test_weights_of_all_positions_are_factors_of_the_labeled_tokens():
    torch.manual_seed(0)
    projection = torch.nn.Linear(8, 3, bias=False)
    hidden = torch.randn(1, 4, 8)
    labels = torch.tensor([[-100, 2, -100, 0]])
    row_losses = []
    total, count = ClassificationLoss().sum_and_count(
        hidden, labels, projection, weights=torch.tensor([[7.0, 2.0, 7.0, 0.5]]), row_losses=row_losses
    )
    assert count.item() == 2.5
    torch.testing.assert_close(total, (row_losses[0] * torch.tensor([2.0, 0.5])).sum())
    expected = torch.nn.functional.cross_entropy(projection(hidden[0, [1, 3]]), labels[0, [1, 3]], reduction="none")
    torch.testing.assert_close(row_losses[0], expected)


def test_unknown_problem_type_is_refused():
    with pytest.raises(LossError, match="problem_type is 'tokens': choose one of single_label_classification"):
        ClassificationLoss().set_targets("tokens", torch.zeros(1, 1))
