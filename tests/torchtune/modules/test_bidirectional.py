"""Attention in both directions: in packed and padded batches, and where it is refused."""

import pytest
import torch

from tests.devices import DEVICE
from torchtune.data import collate_documents, padded_collate_packed
from torchtune.generation import GenerationError, check_generates
from torchtune.models import Description, ModelError, build
from torchtune.modules import BidirectionalAttention
from torchtune.modules.conversion import ConversionError, apply_conversions, get_conversions
from torchtune.modules.loss import LinearCrossEntropyLoss, LossError
from torchtune.modules.loss import setup_loss as setup_token_loss
from torchtune.rlhf.loss import DPOLoss, setup_loss
from torchtune.utils import batch_to_device

SIZES = {"vocab_size": 20, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "embed_dim": 32}
SIZES |= {"intermediate_dim": 16, "max_seq_len": 16}
ROWS = [{"tokens": [1, 2, 3], "labels": [-100] * 3}, {"tokens": [4], "labels": [-100]}]
ROWS += [{"tokens": [5, 6, 7, 8, 9], "labels": [-100] * 5}]


@pytest.fixture
def model():
    torch.manual_seed(0)
    model = build(Description(**SIZES))
    apply_conversions(model, [BidirectionalAttention()])
    return model.double()


def alone(model, row):
    """Hidden states of a row in a batch of its own, without documents."""
    return model(torch.tensor([row["tokens"]]), output="hidden")[0]


def test_first_position_sees_the_last():
    torch.manual_seed(0)
    model = build(Description(**SIZES)).double()
    tokens = torch.tensor([[1, 2, 3], [1, 2, 4]])
    hidden = model(tokens, output="hidden")
    torch.testing.assert_close(hidden[0, :2], hidden[1, :2])
    apply_conversions(model, [BidirectionalAttention()])
    hidden = model(tokens, output="hidden")
    assert (hidden[0, 0] - hidden[1, 0]).abs().max() > 1e-3
    assert not model.description.is_causal
    (conversion,) = get_conversions(model)
    conversion.revert(model)
    assert model.description == Description(**SIZES)
    hidden = model(tokens, output="hidden")
    torch.testing.assert_close(hidden[0, :2], hidden[1, :2])


def test_attention_equals_plain_softmax(model):
    attn = model.layers[0].attn
    x = torch.randn(1, 5, 32, dtype=torch.float64)
    q, k, v = (projection(x).view(1, 5, -1, 8) for projection in (attn.q_proj, attn.k_proj, attn.v_proj))
    attn.pos_embeddings = None
    heads = []
    for head in range(4):
        scores = q[0, :, head] @ k[0, :, head // 2].T / 8**0.5
        heads.append(scores.softmax(-1) @ v[0, :, head // 2])
    torch.testing.assert_close(attn(x)[0], attn.output_proj(torch.cat(heads, -1)))


def test_packed_documents_see_only_themselves(model):
    batch = collate_documents(ROWS).to(DEVICE)
    hidden = model(**batch.model_inputs(), output="hidden")[0]
    for row, states in zip(ROWS, hidden.split([3, 1, 5]), strict=True):
        torch.testing.assert_close(states, alone(model, row))


def test_padding_is_not_seen(model):
    """As documents of a padded batch, and as a mask."""
    padded = padded_collate_packed([[ROWS[0]], [ROWS[2]]])
    del padded["labels"]
    batch_to_device(padded, torch.device(DEVICE))
    hidden = model(**padded, output="hidden")
    torch.testing.assert_close(hidden[0, :3], alone(model, ROWS[0]))
    torch.testing.assert_close(hidden[1], alone(model, ROWS[2]))
    mask = torch.arange(5) < torch.tensor([[[3]], [[5]]])  # [b, 1, s]
    hidden = model(padded["tokens"], mask=mask.expand(2, 5, 5), output="hidden")
    torch.testing.assert_close(hidden[0, :3], alone(model, ROWS[0]))


def test_gradients_flow_from_first_positions_to_later_tokens(model):
    batch = collate_documents(ROWS).to(DEVICE)
    embedded = model.embed(batch.tokens).detach().requires_grad_()
    inputs = {**batch.model_inputs(), "tokens": None, "input_embeds": embedded}
    model(**inputs, output="hidden")[0, 0].sum().backward()
    assert embedded.grad[0, 2].any()  # the last token of the document
    assert not embedded.grad[0, 3:].any()


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"window": 4, "window_layers": (0,)}, "sliding windows"),
        ({"chunk": 4, "chunk_layers": (0,)}, "chunked attention"),
        ({"attn_softcap": 5.0}, "a soft cap"),
        ({"attn_sinks": True}, "attention sinks"),
    ],
)
def test_parts_that_cannot_see_later_positions_are_refused(fields, part):
    model = build(Description(**SIZES, **fields))
    with pytest.raises(ConversionError, match=f"the model has {part}.*, which cannot see later positions"):
        apply_conversions(model, [BidirectionalAttention()])
    with pytest.raises(ModelError, match=f"is_causal must be True in a model with {part}"):
        Description(**SIZES, **fields, is_causal=False)


def test_losses_that_predict_tokens_are_refused(model):
    for check in (lambda: setup_loss(DPOLoss(), model), lambda: setup_token_loss(LinearCrossEntropyLoss(), model)):
        with pytest.raises(LossError, match="predicts tokens, and the model attends to later tokens"):
            check()
    with pytest.raises(GenerationError, match="it attends to later tokens"):
        check_generates(model)
    assert "attends to later positions" in model.prefix_obstacle()


def test_modules_that_are_no_text_decoders_are_refused():
    with pytest.raises(ConversionError, match="a Linear is no text decoder"):
        BidirectionalAttention().convert(torch.nn.Linear(2, 2))
