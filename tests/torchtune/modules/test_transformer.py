"""The decoder: what it takes and refuses, caches, compilation."""

import copy
from types import SimpleNamespace

import pytest
import torch

from tests.devices import DEVICE
from torchtune.compat import slice_str_to_array
from torchtune.data import DataError, Documents
from torchtune.models import Description, build
from torchtune.modules import (
    KVCache,
    TransformerDecoder,
    delete_kv_caches,
    disable_kv_cache,
    local_kv_cache,
    text_decoder,
)

_TINY = Description(
    vocab_size=19, num_layers=3, embed_dim=16, intermediate_dim=24, max_seq_len=32, num_heads=4, num_kv_heads=2
)


@pytest.fixture
def model() -> TransformerDecoder:
    torch.manual_seed(0)
    return build(_TINY).eval()


def _tokens(*shape: int) -> torch.Tensor:
    return torch.randint(0, 19, shape, generator=torch.Generator().manual_seed(1))


def test_logits_are_float32_and_hidden_states_are_not(model):
    model.bfloat16()
    tokens = _tokens(2, 5)
    logits = model(tokens)
    assert (logits.dtype, logits.shape) == (torch.float32, (2, 5, 19))
    model.skip_output_layer = True
    hidden = model(tokens)
    assert (hidden.dtype, hidden.shape) == (torch.bfloat16, (2, 5, 16))
    assert torch.equal(model.output(hidden).float(), logits)


@pytest.mark.filterwarnings("ignore:(set_num_output_chunks|chunked_output) is deprecated:FutureWarning")
def test_chunks_of_logits_for_older_recipes_are_the_logits(model):
    tokens = _tokens(2, 5)
    logits, hidden = model(tokens), model(tokens, output="hidden")
    model.skip_output_layer = True  # as a chunked loss sets it; chunks are asked for by the recipe itself
    model.set_num_output_chunks(3)
    for chunks in (model(tokens), model.chunked_output(hidden)):
        assert [chunk.shape for chunk in chunks] == [(2, 2, 19), (2, 2, 19), (2, 1, 19)]
        assert torch.allclose(torch.cat(chunks, dim=1), logits, atol=1e-6)
    assert torch.equal(model(tokens, output="hidden"), hidden)
    model.set_num_output_chunks(0)
    assert torch.equal(model(tokens), hidden)


def test_embeddings_in_the_place_of_tokens_give_the_same_logits_and_hidden_states(model):
    tokens = _tokens(2, 6)
    assert torch.equal(model(None, input_embeds=model.tok_embeddings(tokens)), model(tokens))
    model.output_hidden_states = [0, 2, 3]
    first, _, last, logits = model(tokens)
    assert torch.equal(first, model.tok_embeddings(tokens))
    assert torch.equal(model.unembed(last), logits)


def test_given_positions_count_by_their_distances(model):
    tokens = _tokens(2, 6)
    expected = model(tokens)
    assert torch.equal(model(tokens, input_pos=torch.arange(6)), expected)
    assert torch.equal(model(tokens, input_pos=torch.arange(6).expand(2, 6)), expected)
    assert torch.allclose(model(tokens, input_pos=torch.arange(6) + 5), expected, atol=1e-5)  # only distances count


def test_wrong_arguments_of_the_decoder_are_refused(model):
    with pytest.raises(ValueError, match=r"tokens have the shape \[3\]: give \[b, s\]"):
        model(torch.tensor([1, 2, 3]))
    with pytest.raises(DataError, match=r"33 tokens is longer than the model's max_seq_len 32: shorten it"):
        model(_tokens(1, 33))
    model(_tokens(1, 40), documents=Documents.from_lengths((20, 20), DEVICE))  # each is short enough
    with pytest.raises(ValueError, match="33 tokens"):
        model(_tokens(1, 40), documents=Documents.from_lengths((33, 7), DEVICE))
    for input_pos in (None, torch.arange(6).expand(2, 6)):
        with pytest.raises(ValueError, match="documents cover 5 positions, the batch has 12"):
            model(_tokens(2, 6), documents=Documents.from_lengths((2, 3), DEVICE), input_pos=input_pos)
    with pytest.raises(ValueError, match="either tokens or input_embeds"):
        model(None)
    with pytest.raises(RuntimeError, match="setup_caches"):
        model.reset_caches()
    layer = model.layers[0]
    parts = {"tok_embeddings": model.tok_embeddings, "max_seq_len": 8, "num_heads": 4, "head_dim": 4}
    parts |= {"norm": model.norm, "output": model.output}
    with pytest.raises(ValueError, match="num_layers must say"):
        TransformerDecoder(layers=layer, **parts)
    with pytest.raises(ValueError, match="a list of layers"):
        TransformerDecoder(layers=[layer], num_layers=1, **parts)
    copies = TransformerDecoder(layers=layer, num_layers=2, **parts)
    assert copies.layers[0] is not copies.layers[1]


def test_decoding_step_by_step_equals_the_whole_row(model):
    tokens = _tokens(2, 7)
    expected = model(tokens)
    causal = torch.ones(9, 9, dtype=torch.bool).tril().expand(2, 9, 9)
    keys = set(model.state_dict())
    with (
        local_kv_cache(model, batch_size=2, device=DEVICE, dtype=torch.float32, decoder_max_seq_len=9),
        torch.no_grad(),
    ):
        assert model.caches_are_setup()
        assert model.caches_are_enabled()
        assert set(model.state_dict()) == keys
        for _ in range(2):
            pieces = [model(tokens[:, :4], mask=causal[:, :4], input_pos=torch.arange(4))]
            for step in range(4, 7):
                position = torch.tensor([step])
                pieces.append(model(tokens[:, step : step + 1], mask=causal[:, step : step + 1], input_pos=position))
            assert torch.allclose(torch.cat(pieces, dim=1), expected, atol=1e-5)
            assert model.layers[0].attn.kv_cache.size == 7
            with disable_kv_cache(model):
                assert not model.caches_are_enabled()
                assert torch.allclose(model(tokens), expected, atol=1e-6)
            assert model.layers[0].attn.kv_cache.size == 7
            model.reset_caches()
        with pytest.raises(ValueError, match="needs both mask and input_pos"):
            model(tokens)
        with (
            pytest.raises(ValueError, match="key-value caches already"),
            local_kv_cache(model, batch_size=1, device="cpu", dtype=torch.float32),
        ):
            pass
    assert not model.caches_are_setup()
    assert torch.equal(model(tokens), expected)
    with pytest.raises(ValueError, match="no key-value caches to delete"):
        delete_kv_caches(model)
    with pytest.raises(ValueError, match="no key-value caches to disable"), disable_kv_cache(model):
        pass


def test_cache_refuses_more_than_it_holds():
    cache = KVCache(batch_size=2, max_seq_len=4, num_kv_heads=1, head_dim=2, dtype=torch.float32)
    keys, values = cache.update(torch.ones(1, 1, 3, 2), torch.ones(1, 1, 3, 2) * 2)
    assert keys.shape == (1, 1, 4, 2)
    assert (keys[0, 0, :, 0].tolist(), values[0, 0, :, 0].tolist()) == ([1, 1, 1, 0], [2, 2, 2, 0])
    with pytest.raises(AssertionError, match="holds 4 positions"):
        cache.update(torch.ones(1, 1, 2, 2), torch.ones(1, 1, 2, 2))
    with pytest.raises(ValueError, match="holds 2 rows"):
        cache.update(torch.ones(3, 1, 1, 2), torch.ones(3, 1, 1, 2))
    cache.reset()
    assert cache.size == 0
    assert not cache.k_cache.any()


# dynamo looks at the .grad of the hidden states that it is handed
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_compiled_layers_keep_one_graph_for_all_documents(model):
    from torch._dynamo.testing import CompileCounter

    eager = copy.deepcopy(model)
    counter = CompileCounter()
    torch.compiler.reset()
    for layer in model.layers:
        layer.compile(backend=counter, fullgraph=True)
    counts = []
    for lengths in ((5, 4), (12,), (3, 3, 9, 1), (2, 2), (7, 8, 9), (1, 20)):
        documents = Documents.from_lengths(lengths, DEVICE)
        tokens = _tokens(1, sum(lengths))
        out = model(tokens, documents=documents)
        assert torch.allclose(out, eager(tokens, documents=documents), atol=1e-5)
        out.sum().backward()
        counts.append(counter.frame_count)
    assert counts[-1] == counts[1] <= 2  # the first length, then any
    torch.compiler.reset()


@pytest.mark.parametrize(
    ("text", "chosen"),
    [("0", [0]), ("-1", [4]), ("1:3", [1, 2]), (":2,4", [0, 1, 4]), ("::2", [0, 2, 4]), (":", [0, 1, 2, 3, 4])],
)
def test_indices_and_slices_of_a_text_select_items(text, chosen):
    assert slice_str_to_array(text, 5) == [index in chosen for index in range(5)]


class _Composed(torch.nn.Module):
    """A model with two parts, one of which reads text."""

    def __init__(self, text: TransformerDecoder) -> None:
        super().__init__()
        self.vision = torch.nn.Linear(4, 16)
        self.text = text


def test_a_model_names_its_text_decoder(model):
    from torchtune.supervision._flops import count_flops
    from torchtune.training import fit_vocabulary
    from torchtune.training.activations import apply_selective_activation_checkpointing

    assert model.text is model
    composed = _Composed(model)
    assert text_decoder(composed) is text_decoder(model) is model
    assert text_decoder(composed.vision) is composed.vision
    assert count_flops(composed) is None  # of images a batch has any number
    fit_vocabulary(composed, SimpleNamespace(vocab_size=25), resize=True)
    assert model.tok_embeddings.weight.shape[0] == 25
    tokens = _tokens(2, 6)
    expected = model(tokens)
    apply_selective_activation_checkpointing(composed, "full", None)
    assert torch.equal(model(tokens), expected)
    assert all(type(layer.forward).__name__ == "CheckpointedForward" for layer in model.layers)
