"""A continuous batch gives every sequence the tokens that it has alone."""

import contextlib
import functools
import weakref
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from tests.devices import DEVICE
from tests.tiny_images import END, IMAGE, START, image_text_model, qwen3_vl_config, write_image_checkpoint
from torchtune.checkpoints import ModelSource
from torchtune.data import Images
from torchtune.generation import (
    GenerationError,
    Request,
    _continuous_batch,
    _fast_linear,
    fast_linears,
    generate_tokens,
    stream_tokens,
)
from torchtune.generation._continuous_batch import StaticStep
from torchtune.models import Description, build, from_hf_config
from torchtune.models._mixers import DeltaNetMixer
from torchtune.modules.conversion import apply_conversions
from torchtune.modules.peft import LoRA, disable_adapter
from torchtune.utils import logged_once, onednn_computes

_SIZES: dict[str, Any] = {
    "vocab_size": 29,
    "num_layers": 2,
    "embed_dim": 16,
    "intermediate_dim": 24,
    "max_seq_len": 256,
    "num_heads": 4,
    "num_kv_heads": 2,
}
_PROMPTS = [[3, 1, 4, 1, 5, 9], [2, 6], [5, 3, 5, 8], [7] * 40, [9, 3, 2], [1, 2, 3, 4], [28]]
_KINDS = {
    "attention": {},
    "window, sinks and soft cap": {"window": 3, "window_layers": (0,), "attn_sinks": True, "attn_softcap": 5.0},
    "window and biases": {"window": 3, "window_layers": (1,), "q_bias": True},
    "keys of another layer": {"shared_kv_layers": 1, "v_norm": True, "full_keys_as_values": True}
    | {"layer_embed_dim": 6, "layer_embed_vocab": 29},
    "latents": {"kv_latent_dim": 8, "value_dim": 6, "rope_dim": 4, "head_dim": 8, "num_kv_heads": 4},
    "mixers": {
        "mixer": DeltaNetMixer(num_key_heads=2, num_value_heads=4, key_dim=6, value_dim=5, conv_taps=3),
        "mixer_layers": (0,),
    },
}


def _model(**options):
    torch.manual_seed(0)
    model = build(Description(**(_SIZES | options)))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return model


@pytest.fixture
def model():
    return _model()


def _alone(model, prompt, new, stop):
    """Greedy tokens by forward passes over the whole text, without any cache."""
    tokens = list(prompt)
    with torch.no_grad():
        while len(tokens) < len(prompt) + new and (len(tokens) == len(prompt) or tokens[-1] not in stop):
            tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    return tokens[len(prompt) :]


def _answers_as_alone(model, prompts=_PROMPTS[:1], new=40):
    batched = generate_tokens(model, prompts, max_new_tokens=new, temperature=0.0)
    for prompt, tokens in zip(prompts, batched.tokens, strict=True):
        assert tokens.tolist() == _alone(model, prompt, new, set())


@pytest.mark.parametrize("kind", [kind for kind in _KINDS if kind != "mixers"])
def test_steps_with_static_shapes_give_the_same_answers(kind, monkeypatch):
    """Rows join and leave, and the caches grow."""
    model = _model(**_KINDS[kind])
    static_steps = []
    batch_class = _continuous_batch.Batch

    def make_static_batch(*args: Any) -> Any:
        *first_args, _ = args
        return batch_class(*first_args, is_static=True)

    def count_steps(step: StaticStep, count: int) -> torch.Tensor:
        static_steps.append(count)
        return step.compute()[:count]

    monkeypatch.setattr(_continuous_batch, "Batch", make_static_batch)
    monkeypatch.setattr(StaticStep, "run", count_steps)
    limits = [9, 70, 4, 20, 30, 1, 12]
    batched = generate_tokens(
        model, _PROMPTS, max_new_tokens=limits, temperature=0.0, stop_tokens={11}, max_sequences=3, tokens_per_check=4
    )
    assert set(static_steps) == {1, 2, 3}
    for prompt, limit, tokens, log_probs in zip(_PROMPTS, limits, batched.tokens, batched.log_probs, strict=True):
        assert tokens.tolist() == _alone(model, prompt, limit, {11})
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *tokens.tolist()]]))[0, len(prompt) - 1 : -1]
        wanted = F.log_softmax(logits, -1).gather(1, tokens[:, None])[:, 0]
        torch.testing.assert_close(log_probs, wanted, rtol=0, atol=1e-5)


def test_steps_that_cannot_be_captured_run_uncaptured(model, monkeypatch):
    batch_class = _continuous_batch.Batch
    attempts = []

    def make_static_batch(*args: Any) -> Any:
        *others, _ = args
        return batch_class(*others, is_static=True)

    def make_stream() -> None:
        attempts.append("capture")
        raise RuntimeError("operation not permitted when stream is capturing\nCompile with TORCH_USE_CUDA_DSA")

    monkeypatch.setattr(_continuous_batch, "Batch", make_static_batch)
    monkeypatch.setattr(_continuous_batch, "StaticStep", functools.partial(StaticStep, captures=True))
    monkeypatch.setattr(torch.cuda, "Stream", make_stream)
    _answers_as_alone(model, _PROMPTS)
    assert attempts == ["capture"]  # it is not tried again
    sentences = [sentence for sentence in logged_once() if "captures no graph" in sentence]
    assert len(sentences) == 1
    assert sentences[0].endswith("captures no graph of it (operation not permitted when stream is capturing).")


@pytest.mark.parametrize("tokens_per_check", [1, 5])
@pytest.mark.parametrize("kind", _KINDS)
def test_answers_are_the_same_while_rows_join_and_leave(kind, tokens_per_check):
    model = _model(**_KINDS[kind])
    limits = [9, 70, 4, 20, 30, 1, 12]
    stop = {11}
    shapes = []
    handle = model.register_forward_pre_hook(lambda module, args: shapes.append(tuple(args[0].shape)))
    batched = generate_tokens(
        model,
        _PROMPTS,
        max_new_tokens=limits,
        temperature=0.0,
        stop_tokens=stop,
        max_sequences=3,
        tokens_per_check=tokens_per_check,
    )
    handle.remove()
    for prompt, limit, tokens, log_probs in zip(_PROMPTS, limits, batched.tokens, batched.log_probs, strict=True):
        assert tokens.tolist() == _alone(model, prompt, limit, stop)
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *tokens.tolist()]]))[0, len(prompt) - 1 : -1]
        wanted = F.log_softmax(logits, -1).gather(1, tokens[:, None])[:, 0]
        torch.testing.assert_close(log_probs, wanted, rtol=0, atol=1e-5)
    assert max(rows for rows, _ in shapes) == 3
    prefills = [rows for rows, positions in shapes if positions > 1]
    assert len(prefills) > 2
    if kind != "mixers":  # whose states are those of rows
        assert shapes[0] == (1, sum(map(len, _PROMPTS[:3])))
    # Fewer passes than one sequence after another needs: newcomers run beside those that are under way.
    assert len(shapes) < sum(len(tokens) for tokens in batched.tokens)


@pytest.mark.parametrize("tokens_per_check", [1, 4])
@pytest.mark.parametrize("kind", _KINDS)
def test_continued_sequence_runs_only_its_new_tokens(kind, tokens_per_check):
    """Ended sequences get further tokens, some at once and some later, beside those that are under way."""
    model = _model(**_KINDS[kind])
    stop = 11
    limit = 6
    tokens = {index: list(prompt) for index, prompt in enumerate(_PROMPTS)}  # by sequence
    log_probs = {}  # (sequence, position) -> log-prob
    turns = dict.fromkeys(tokens, 1)
    ended = []
    going_on = []
    shapes = []

    def more(batch):
        going_on.extend((index, batch.past(index)) for index in ended)
        ended.clear()
        assert all((past is None) == (kind == "mixers") for _, past in going_on)
        requests = []
        while going_on and (going_on[0][0] % 2 or not batch.is_unfinished):
            index, past = going_on.pop(0)
            tokens[index] += [8, index + 1] if index % 3 else [4, 4, 2, 1, 0, index]
            turns[index] += 1
            requests.append(Request(index, list(tokens[index]), limit, past=past))
        return requests

    handle = model.register_forward_pre_hook(lambda module, args: shapes.append(tuple(args[0].shape)))
    options = {"max_new_tokens": limit, "temperature": 0.0, "stop_tokens": [stop], "max_sequences": 4, "more": more}
    options["tokens_per_check"] = tokens_per_check
    starts = {}
    for step in stream_tokens(model, _PROMPTS, **options):
        for index, token, log_prob in zip(*map(torch.Tensor.tolist, vars(step).values()), strict=True):
            start = starts.setdefault((index, turns[index]), len(tokens[index]))
            tokens[index].append(token)
            log_probs[index, len(tokens[index]) - 1] = log_prob
            if (token == stop or len(tokens[index]) == start + limit) and turns[index] < 3:
                ended.append(index)
    handle.remove()
    assert set(turns.values()) == {3}
    for (index, _), start in starts.items():
        new = _alone(model, tokens[index][:start], limit, {stop})
        assert tokens[index][start : start + len(new)] == new
    expected = {}
    for index, sequence in tokens.items():
        with torch.no_grad():
            expected[index] = F.log_softmax(model(torch.tensor([sequence]))[0], -1)  # [s, v]
    for (index, position), log_prob in log_probs.items():
        token = tokens[index][position]
        assert log_prob == pytest.approx(expected[index][position - 1, token].item(), abs=1e-5)
    ran = sum(rows * positions for rows, positions in shapes)
    assert (ran < 350) == (kind != "mixers"), ran


def test_continued_sequence_sees_an_image_of_its_new_turn(tmp_path):
    """Keys and values of the first turn are known, but only a pass over the whole sequence encodes the image."""
    folder = write_image_checkpoint(image_text_model(qwen3_vl_config()), tmp_path)
    with torch.device("meta"):
        model = from_hf_config(folder, images=True)
    ModelSource(folder).read(model, torch.device(DEVICE))
    model.eval()
    vision = model.description.vision
    with torch.device("cpu"):  # where images of prompts are
        patches = torch.randn(4 * vision.merge**2, vision.patch_values, generator=torch.Generator().manual_seed(0))
    images = Images(patches, ((1, 2 * vision.merge, 2 * vision.merge),))  # 2 x 2 tokens
    # The first turn; then with its answer, the new turn and the answer to it.
    conversation = [[31, 41, 59, 26, 53, 58, 97, 93]]

    def more(batch):
        if len(conversation) > 1 or len(conversation[0]) < 8 + 3:
            return []
        past = batch.past(0)
        assert past is not None
        tokens = [*conversation[0], START, *[IMAGE] * 4, END, 5]
        with torch.device("cpu"):
            placed = model._with_places(images, torch.tensor([tokens]), None)
        conversation.append(list(tokens))
        return [Request(0, tokens, 3, images={"encoder_input": {"images": placed}}, past=past)]

    for step in stream_tokens(model, [list(conversation[0])], max_new_tokens=3, temperature=0.0, more=more):
        conversation[-1] += step.tokens.tolist()
    first, second = conversation
    expected = torch.tensor([second[:-3]])
    with torch.no_grad():
        for _ in range(3):
            logits = model(expected, encoder_input={"images": images.to(DEVICE)})
            expected = torch.cat([expected, logits[:, -1:].argmax(-1)], dim=1)
    assert second[: len(first)] == first
    assert second == expected[0].tolist()


def test_tokens_are_read_once_per_check(model, monkeypatch):
    reads = []
    read = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: reads.append(tensor.shape) or read(tensor))
    steps = list(stream_tokens(model, _PROMPTS[:2], max_new_tokens=17, temperature=0.0, tokens_per_check=8))
    assert len(steps) == 17
    assert [shape.numel() for shape in reads[-3:]] == [16, 16, 2]  # earlier ones are of the prompts


def test_samples_of_a_prompt_join_together(model):
    draws = torch.rand(14, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    options = {"max_new_tokens": 20, "num_samples": 2, "stop_tokens": [11, 12], "draws": draws}
    together = generate_tokens(model, _PROMPTS, **options)
    few = generate_tokens(model, _PROMPTS, max_sequences=4, **options)
    assert len({len(tokens) for tokens in few.tokens}) > 1
    for together_tokens, few_tokens in zip(together.tokens, few.tokens, strict=True):
        assert torch.equal(together_tokens, few_tokens)


on_cpu = pytest.mark.skipif(DEVICE != "cpu", reason="is about the layout of the CPU's kernels")


@on_cpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_return_from_their_fast_layout(dtype):
    model = _model(q_bias=True, v_bias=True)
    apply_conversions(model, [LoRA(2, 3, attn_modules=["q_proj", "v_proj"], apply_to_mlp=True)])
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    model.to(dtype)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    parameters = dict(model.named_parameters())
    packed = generate_tokens(model, _PROMPTS, max_new_tokens=48, temperature=0.0)
    if dtype == torch.float32:
        for prompt, tokens in zip(_PROMPTS, packed.tokens, strict=True):
            assert tokens.tolist() == _alone(model, prompt, 48, set())
    weight = model.layers[0].attn.q_proj.weight
    with contextlib.suppress(ZeroDivisionError), torch.inference_mode(), fast_linears(model, pack=True):
        assert (weight.numel() == 0) == onednn_computes(dtype)
        again = generate_tokens(model, _PROMPTS, max_new_tokens=48, temperature=0.0)
        with disable_adapter(model):
            base = generate_tokens(model, _PROMPTS[:1], max_new_tokens=3, temperature=0.0)
        raise ZeroDivisionError
    for packed_log_probs, plain_log_probs in zip(packed.log_probs, again.log_probs, strict=True):
        assert torch.equal(packed_log_probs, plain_log_probs)
    with disable_adapter(model):
        assert base.tokens[0].tolist() == _alone(model, _PROMPTS[0], 3, set())
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any("forward" in vars(module) for module in model.modules())
    model(torch.tensor([_PROMPTS[0]])).sum().backward()
    assert model.layers[0].attn.q_proj.lora_b.weight.grad.any()


@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("missing", [torch.float32, torch.bfloat16])
def test_dtype_without_onednn_kernels_uses_torch_products(pack, missing, monkeypatch):
    monkeypatch.setattr(_fast_linear, "onednn_computes", lambda dtype: dtype != missing and onednn_computes(dtype))
    model = _model().to(missing)
    with torch.no_grad():
        expected = model(torch.tensor([_PROMPTS[0]]))
        with fast_linears(model, pack=pack):
            assert not any("forward" in vars(module) for module in model.modules())
            assert torch.equal(model(torch.tensor([_PROMPTS[0]])), expected)


@on_cpu
def test_packed_and_plain_weights_are_not_in_memory_together(model, monkeypatch):
    packs = []
    restore = _fast_linear._Packed.restore

    def restore_after_the_others(packed):
        assert not any(ref() for ref in packs)
        packs.append(weakref.ref(packed))
        restore(packed)

    monkeypatch.setattr(_fast_linear._Packed, "restore", restore_after_the_others)
    with fast_linears(model, pack=True):
        pass
    assert len(packs) == 2 * 7 + 1


def test_fast_layers_apply_hooks_and_autocast_to_their_input():
    model = _model()
    tokens = torch.tensor([_PROMPTS[0]])
    apply_conversions(model, [LoRA(2, 3, attn_modules=["q_proj"])])
    model.layers[0].attn.k_proj.register_forward_pre_hook(lambda _, args: (args[0].mul_(0.5),))
    with torch.no_grad():
        wanted = model(tokens)
        with fast_linears(model, pack=True):
            torch.testing.assert_close(model(tokens), wanted)
        with torch.autocast(DEVICE, torch.bfloat16):
            wanted = model(tokens)
            for pack in (False, True):
                with fast_linears(model, pack=pack):
                    assert torch.equal(model(tokens), wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rank", [2, _fast_linear._SMALL_RANK + 1])
def test_packed_adapters_of_every_rank_compute_their_layer(rank, dtype):
    model = _model()
    apply_conversions(model, [LoRA(rank, 3 * rank, attn_modules=["q_proj"])])
    layer = model.to(dtype).layers[0].attn.q_proj
    for parameter in (layer.weight, layer.lora_a.weight, layer.lora_b.weight):
        torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(0))
    x = torch.randn(2, 3, 16, generator=torch.Generator().manual_seed(1)).to(dtype)
    weight, lora_a, lora_b = (w.double() for w in (layer.weight, layer.lora_a.weight, layer.lora_b.weight))
    with torch.no_grad():
        expected = x.double() @ (weight + 3 * lora_b @ lora_a).T
        with fast_linears(model, pack=True):
            y = layer(x)
    error = (y.double() - expected).abs().max() / expected.abs().max()
    assert error < (1e-6 if dtype == torch.float32 else 0.01)


@pytest.mark.parametrize("kind", ["attention", "latents"])
def test_successive_prompts_of_other_lengths_work_under_autocast(kind):
    model = _model(**_KINDS[kind])
    with torch.autocast(DEVICE, torch.bfloat16):
        together = generate_tokens(model, _PROMPTS, max_new_tokens=3, temperature=0.0)
        for prompt, log_probs in zip(_PROMPTS, together.log_probs, strict=True):
            alone = generate_tokens(model, [prompt], max_new_tokens=3, temperature=0.0)
            torch.testing.assert_close(log_probs, alone.log_probs[0], rtol=0, atol=0.1)


def test_packed_layers_give_the_log_probs_of_autocast(model):
    with fast_linears(model, pack=True), torch.autocast(DEVICE, torch.bfloat16):
        generated = generate_tokens(model, [_PROMPTS[0]], max_new_tokens=8, temperature=0.0)
    with torch.no_grad():
        logits = model(torch.tensor([[*_PROMPTS[0], *generated.tokens[0].tolist()]]))[0, len(_PROMPTS[0]) - 1 : -1]
    wanted = F.log_softmax(logits, -1).gather(1, generated.tokens[0][:, None])[:, 0]
    torch.testing.assert_close(generated.log_probs[0], wanted, rtol=0, atol=0.1)


def test_a_module_in_two_places_of_a_layer_is_packed_once(model):
    model.layers[1].mlp.w3 = model.layers[1].mlp.w1
    _answers_as_alone(model)


@pytest.mark.parametrize("what", ["hook", "bias"])
def test_hooks_and_biases_of_a_latent_projection_are_applied(what):
    model = _model(**_KINDS["latents"])
    attn = model.layers[1].attn
    if what == "hook":
        attn.kv_proj.register_forward_hook(lambda module, args, out: out * 0.5)
    else:
        attn.kv_proj = torch.nn.Linear(attn.kv_proj.in_features, attn.kv_proj.out_features)
        torch.nn.init.normal_(attn.kv_proj.bias)
    _answers_as_alone(model, _PROMPTS[:2], 9)


@on_cpu
def test_backward_inside_of_packed_layers_is_refused(model):
    with fast_linears(model, pack=True), pytest.raises(GenerationError, match="have no gradients inside"):
        model(torch.tensor([_PROMPTS[0]]))
    with fast_linears(model, pack=False):
        model(torch.tensor([_PROMPTS[0]])).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
