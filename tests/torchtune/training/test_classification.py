"""The set-up of classifiers, and their scores."""

import numpy as np
import pytest

from tests.tiny import write_checkpoint
from torchtune.data import BatchLoader, DataError, collate_documents
from torchtune.datasets import classification_dataset, instantiate_dataset, text_completion_dataset
from torchtune.models import from_hf_config
from torchtune.modules import classifier_model
from torchtune.modules.loss import ClassificationLoss, LinearCrossEntropyLoss, setup_loss
from torchtune.tokenizers import hf_tokenizer
from torchtune.training import ClassificationError, ParallelDims, classification_scores, setup_classification


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def tokenizer(folder):
    return hf_tokenizer(str(folder), max_seq_len=64)


def classifier(folder, num_classes):
    return classifier_model(num_classes, "torchtune.models.from_hf_config", checkpoint_dir=folder)


def loader_of(tokenizer, row_labels, **settings):
    rows = [{"text": "the cat", "label": label} for label in row_labels]
    return as_loader(classification_dataset(tokenizer, rows, **settings))


def as_loader(dataset):
    return BatchLoader(dataset, batch_size=2, collate_fn=collate_documents, shuffle=False, seed=0)


def set_up(model, loader, loader_val=None, loss=None):
    return setup_classification(model, setup_loss(loss or ClassificationLoss(), model), loader, loader_val)


def test_model_gets_the_names_of_the_classes(folder, tokenizer):
    model = classifier(folder, 3)
    set_up(model, loader_of(tokenizer, ["c", "a", "b"]))
    assert model.description.class_names == ("a", "b", "c")
    assert model.description.problem_type == "single_label_classification"


def test_classes_of_the_model_come_before_those_of_the_data(folder, tokenizer):
    model = classifier(folder, 3)
    set_up(model, loader_of(tokenizer, "cab", labels=["c", "b", "a"]))
    loader = loader_of(tokenizer, "ab")
    set_up(model, loader)
    assert model.description.class_names == ("c", "b", "a")
    assert loader.dataset.task.class_names == ("c", "b", "a")


def test_validation_data_without_a_class_has_the_targets_of_the_training_data(folder, tokenizer):
    loader, loader_val = loader_of(tokenizer, "abc"), loader_of(tokenizer, "cc")
    set_up(classifier(folder, 3), loader, loader_val)
    assert [loader_val.dataset[index]["labels"][-1] for index in range(2)] == [2, 2]


def test_datasets_of_a_list_and_packs_share_the_classes(folder, tokenizer):
    component = "torchtune.datasets.classification_dataset"
    first = {"_component_": component, "source": [{"text": "the cat", "label": "b"}] * 3, "packed": True}
    second = {"_component_": component, "source": [{"text": "the dog", "label": "a"}] * 2, "packed": True}
    loader = as_loader(instantiate_dataset([first, second], tokenizer))
    model = classifier(folder, 2)
    set_up(model, loader)
    assert model.description.class_names == ("a", "b")
    labels = []
    for (batch,) in loader:
        labels += batch.labels[batch.labels >= 0].tolist()
    assert sorted(labels) == [0, 0, 1, 1, 1]


@pytest.mark.parametrize(
    ("num_classes", "labels", "message"),
    [
        (2, "abc", "the labels have 3 classes .a, b, c., but the model's head has 2: set num_classes=3"),
        (3, [0, 2], "the labels have 2 classes .0, 2., but the model's head has 3"),
        (2, [0.5, 1.0], "a regression needs 1 output, but the model's head has 2: set num_classes=1"),
        (2, "aaa", "all rows have the class 'a', from which nothing can be learned"),
        (2, [[], []], "no row has a class"),
        (1, [0.5, 0.5], "all rows have the label 0.5, from which nothing can be learned"),
        (1, [["a"], ["a"]], "all rows have the label .'a'., from which nothing can be learned"),
    ],
)
def test_labels_that_do_not_fit_the_model_are_refused(folder, tokenizer, num_classes, labels, message):
    with pytest.raises(ClassificationError, match=message):
        set_up(classifier(folder, num_classes), loader_of(tokenizer, labels))


@pytest.mark.parametrize("second", [[0.5, 1.5], [["a"], ["b"]]], ids=["numbers", "several classes per row"])
def test_datasets_with_labels_of_two_kinds_are_refused(folder, tokenizer, second):
    component = "torchtune.datasets.classification_dataset"
    datasets = []
    for labels in (["a", "b"], second):
        rows = [{"text": "the cat", "label": label} for label in labels]
        datasets.append({"_component_": component, "source": rows})
    loader = as_loader(instantiate_dataset(datasets, tokenizer))
    with pytest.raises(ClassificationError, match="have different labels or problem types"):
        set_up(classifier(folder, 2), loader)


def test_language_model_is_refused(folder, tokenizer):
    with pytest.raises(ClassificationError, match=r"the model predicts tokens: set model._component_ to .*=2 and"):
        set_up(from_hf_config(folder), loader_of(tokenizer, "ab"))


def test_loss_of_tokens_is_refused(folder, tokenizer):
    with pytest.raises(ClassificationError, match="loss: LinearCrossEntropyLoss predicts tokens"):
        set_up(classifier(folder, 2), loader_of(tokenizer, "ab"), loss=LinearCrossEntropyLoss())


def test_data_without_labels_is_refused(folder, tokenizer):
    texts = as_loader(text_completion_dataset(tokenizer, [{"text": "the cat"}]))
    with pytest.raises(ClassificationError, match="ClassificationLoss needs rows with labels"):
        set_up(classifier(folder, 2), texts)
    with pytest.raises(ClassificationError, match="some of the data is of classification_dataset and some is not"):
        set_up(classifier(folder, 2), loader_of(tokenizer, "ab"), texts)


def test_class_that_only_the_validation_data_has_is_refused(folder, tokenizer):
    with pytest.raises(DataError, match="row 1: the class 'c' is not one of a, b"):
        set_up(classifier(folder, 2), loader_of(tokenizer, "ab"), loader_of(tokenizer, "ac"))


def test_run_without_classes_has_no_scores(folder, tokenizer):
    texts = as_loader(text_completion_dataset(tokenizer, [{"text": "the cat"}]))
    scores = set_up(from_hf_config(folder), texts, loss=LinearCrossEntropyLoss())
    with scores.recorded():
        pass
    assert scores.over(ParallelDims()) == {}


def test_scores_of_one_class_per_row():
    # Classes 0, 0, 1, 1; predicted 0, 1, 1, 1; class 2 neither occurs nor is predicted.
    logits = np.array([[2.0, 0, 0], [0, 1, 0], [0, 1, 0], [0, 3, 1]])
    scores = classification_scores("single_label_classification", logits, np.array([[0], [0], [1], [1]]))
    # F1 of class 0: precision 1, recall 1/2; of class 1: precision 2/3, recall 1.
    assert scores == pytest.approx({"accuracy": 3 / 4, "f1": (2 / 3 + 4 / 5) / 2})


def test_scores_of_several_classes_per_row():
    logits = np.array([[1.0, -1, -1], [1, 1, -1]])
    targets = np.array([[1.0, 0, 0], [0, 1, 1]])
    scores = classification_scores("multi_label_classification", logits, targets)
    # Class 0: precision 1/2, recall 1; class 1: right; class 2: never found.
    assert scores == pytest.approx({"accuracy": 1 / 2, "f1": (2 / 3 + 1 + 0) / 3})


def test_scores_of_a_regression():
    scores = classification_scores("regression", np.array([[1.0], [2.0], [6.0]]), np.array([[0.0], [2.0], [4.0]]))
    assert scores == pytest.approx({"mae": 1.0, "r2": 1 - 5 / 8})
    assert classification_scores("regression", np.array([[1.0]]), np.array([[2.0]])) == {"mae": 1.0}
