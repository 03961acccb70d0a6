"""``torchtune.load``, ``save`` and ``generate`` against ``transformers`` and ``peft``, and what they refuse."""

import json
import shutil

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

import torchtune
from tests.devices import DEVICE
from tests.tiny import write_adapter, write_checkpoint
from torchtune.models import from_hf_config
from torchtune.modules.low_precision import QuantizeBase
from torchtune.modules.peft import LoRA, get_adapter_params
from torchtune.utils import UserError

IDS = torch.tensor([[5, 40, 7, 99, 12]])
FP32 = {"dtype": "fp32", "device": DEVICE}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("facade") / "base")


@pytest.fixture(scope="module")
def adapter(base):
    return write_adapter(base.parent / "adapter", base)


def logits(folder, adapter=None):
    """Those of ``transformers``, or of ``peft``."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    model = model if adapter is None else PeftModel.from_pretrained(model, adapter)
    with torch.no_grad():
        return model(IDS).logits


def assert_equal(model, expected):
    assert not model.training
    with torch.no_grad():
        torch.testing.assert_close(model(IDS.to(DEVICE)).cpu(), expected, rtol=0, atol=2e-5)


def test_load_returns_the_weights_and_tokenizer_of_transformers(base, adapter, tmp_path):
    model, tokenizer = torchtune.load(base, device=DEVICE)
    assert model.tok_embeddings.weight.dtype == torch.float32  # as config.json says
    assert_equal(model, logits(base))
    assert tokenizer.encode("the cat", add_bos=False, add_eos=False) == AutoTokenizer.from_pretrained(base).encode(
        "the cat", add_special_tokens=False
    )
    assert (
        torchtune.load(str(base), dtype=torch.bfloat16, device=DEVICE)[0].tok_embeddings.weight.dtype == torch.bfloat16
    )

    adapted = logits(base, adapter)
    assert not torch.allclose(adapted, logits(base), atol=1e-2)
    for model in (
        torchtune.load(base, adapter=adapter, **FP32)[0],
        torchtune.load(adapter, **FP32)[0],  # peft wrote the folder of the base into it
    ):
        assert_equal(model, adapted)
        trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        assert trained == set(get_adapter_params(model))
    combined = shutil.copytree(base, tmp_path / "beside")
    shutil.copytree(adapter, combined, dirs_exist_ok=True)
    assert_equal(torchtune.load(combined, **FP32)[0], adapted)  # as transformers does

    new, _ = torchtune.load(base, adapter=[LoRA(rank=2), QuantizeBase()], **FP32)
    assert all(parameter.any() for name, parameter in get_adapter_params(new).items() if "lora_a" in name)
    assert not any(parameter.any() for name, parameter in get_adapter_params(new).items() if "lora_b" in name)


def test_saved_adapters_and_models_have_the_logits_of_the_model(base, adapter, tmp_path):
    model, _ = torchtune.load(base, adapter=adapter, **FP32)
    adapted = logits(base, adapter)
    folder = torchtune.save(model, tmp_path / "adapter")
    torch.testing.assert_close(logits(base, folder), adapted, rtol=0, atol=2e-5)
    assert json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"] == str(base)
    assert_equal(torchtune.load(folder, **FP32)[0], adapted)
    merged = torchtune.save(torch.compile(model), tmp_path / "merged", contents=("adapter", "merged"))
    torch.testing.assert_close(logits(merged), adapted, rtol=0, atol=2e-5)
    assert_equal(torchtune.load(merged, **FP32)[0], adapted)
    chat = [{"role": "user", "content": "Why?"}]
    for out in (folder, merged):  # tokenizer, chat template and generation config come along
        assert AutoTokenizer.from_pretrained(out).apply_chat_template(chat, tokenize=False) == (
            "<|im_start|>user\nWhy?<|im_end|>\n"
        )
        assert (out / "generation_config.json").read_bytes() == (base / "generation_config.json").read_bytes()
    with pytest.raises(UserError, match="merged is there already"):
        torchtune.save(model, merged)
    with pytest.raises(UserError, match=r"have .*adapter merged in: give path alone"):
        torchtune.load(merged, adapter=merged, **FP32)
    assert torchtune.save(model, merged, overwrite=True) == merged
    assert not (merged / "model.safetensors").exists()
    with pytest.raises(UserError, match=r"not written by torchtune\.save"):
        torchtune.save(model, shutil.copytree(adapter, tmp_path / "theirs"), overwrite=True)
    with pytest.raises(UserError, match="inside each other"):
        torchtune.save(model, base / "inside")
    with pytest.raises(UserError, match=r"lora_.* is trained"):
        torchtune.save(model, tmp_path / "lost", contents="model")
    assert {path.name for path in tmp_path.iterdir()} == {"adapter", "merged", "theirs"}  # nothing half written

    grown, _ = torchtune.load(base, **FP32)
    grown.tok_embeddings = torch.nn.Embedding(400, 32)
    with pytest.raises(UserError, match="tied to another embedding than tok_embeddings"):
        torchtune.save(grown, tmp_path / "grown")

    built = from_hf_config(base)
    with pytest.raises(UserError, match=r"base: .* not made by torchtune\.load"):
        torchtune.save(built, tmp_path / "own")
    with pytest.raises(UserError, match="OrderedDict cannot be saved"):
        torchtune.save(built.state_dict(), tmp_path / "own")
    wrapped = torch.nn.DataParallel(torch.compile(built))  # DistributedDataParallel has the model in the same place
    assert_equal(
        torchtune.load(torchtune.save(wrapped, tmp_path / "own", base=base), **FP32)[0], built.cpu().eval()(IDS)
    )


def test_generate_returns_the_tokens_of_transformers(base, monkeypatch, caplog):
    model, tokenizer = torchtune.load(base, **FP32)
    reference = AutoModelForCausalLM.from_pretrained(base)
    reference_tokenizer = AutoTokenizer.from_pretrained(base)

    def expected(ids):
        generated = reference.generate(
            input_ids=torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
            max_new_tokens=6,
            do_sample=False,
            eos_token_id=2,
        )
        return reference_tokenizer.decode(generated[0, len(ids) :], skip_special_tokens=True)

    chats = [[{"role": "user", "content": text}] for text in ("Where is the cat?", "Why?")]
    prompts = [
        reference_tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) for chat in chats
    ]
    greedy = {"max_new_tokens": 6, "temperature": 0}
    model.train()
    answers = [expected(ids) for ids in prompts]
    assert torchtune.generate(model, tokenizer, ["Where is the cat?", chats[1]], **greedy) == answers
    assert torchtune.generate(model, tokenizer, torch.tensor(prompts[1]), **greedy) == answers[1]  # ids are continued
    arrays = [torch.tensor(prompts[0]), torch.tensor(prompts[1]).numpy()]
    assert torchtune.generate(model, tokenizer, arrays, **greedy) == answers
    assert torchtune.generate(torch.compile(model), tokenizer, "Why?", **greedy) == answers[1]
    assert model.training
    drawn = [torchtune.generate(model, tokenizer, "Why?", max_new_tokens=6, seed=seed) for seed in (3, 3, 4)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert not caplog.records
    monkeypatch.setattr(model, "max_seq_len", len(prompts[1]) + 3)
    torchtune.generate(model, tokenizer, prompts[1], **greedy)
    assert "1 of 1 answers are cut, by the context of" in caplog.text


def test_invalid_arguments_of_generate_are_refused(base, tmp_path, monkeypatch):
    model, tokenizer = torchtune.load(base, **FP32)

    def refused(match, prompt="Why?", model=model, by=tokenizer, **kw):
        with pytest.raises(UserError, match=match):
            torchtune.generate(model, by, prompt, **{"max_new_tokens": 4, **kw})

    refused("the model has no token 5000", [1, 5000])
    refused("no room for an answer in the model's context of 4096", [7] * 4096)
    refused("end with a turn of the user", [{"role": "assistant", "content": "red"}])
    refused("end with a turn of the user", [])
    refused("prompt: a dict cannot be continued", {"role": "user", "content": "red"})
    refused("prompt: a NoneType cannot", None)
    refused("prompt: a bytes cannot", b"red")
    refused("prompt 0: a float cannot be continued: give a text, a list of messages, or token ids", [1.5])
    refused("prompt 1: a bytes cannot be continued", ["Why?", b"red"])
    refused("temperature is -1", temperature=-1)
    refused("top_k is 1.5: it is a number of tokens", top_k=1.5)
    refused("max_new_tokens is .* must be at least 1", max_new_tokens=0)
    monkeypatch.setattr(tokenizer, "max_seq_len", 8)
    refused("tokenizer.max_seq_len = 8 truncates it", "Where is the cat?")
    with torch.device("meta"):
        refused("'tok_embeddings.weight' has no values", model=from_hf_config(base))
    refused("a Linear does not generate", model=torch.nn.Linear(2, 2))
    refused("of transformers masks and ends nothing here", by=AutoTokenizer.from_pretrained(base))

    permuted = json.loads((base / "tokenizer.json").read_text())
    vocabulary = permuted["model"]["vocab"]
    for token, number in vocabulary.items():
        if number >= 3:  # after the special tokens
            vocabulary[token] = 3 + (number + 100) % (len(vocabulary) - 3)
    folder = shutil.copytree(base, tmp_path / "plain")
    (folder / "tokenizer.json").write_text(json.dumps(permuted))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": None}))
    plain, its = torchtune.load(folder, **FP32)
    refused("its tokens are not those that the model was loaded with", by=its)
    refused("has no chat template, so that it answers no questions", model=plain, by=its)
    assert isinstance(torchtune.generate(plain, its, its.encode("the", add_eos=False), max_new_tokens=2), str)
    with torch.no_grad():
        model.norm.scale.fill_(float("nan"))
    refused("logits are not finite in torch.float32", [7, 8])


def test_invalid_arguments_of_load_are_refused(base, adapter, tmp_path):
    def refused(match, path, **kw):
        with pytest.raises(UserError, match=match) as caught:
            torchtune.load(path, **{**FP32, **kw})
        assert "\n" not in str(caught.value)

    refused("there is no such folder", tmp_path / "nowhere")
    refused("is a file: give the folder", base / "config.json")
    (tmp_path / "gguf").mkdir()
    (tmp_path / "gguf" / "tiny.gguf").touch()
    refused("holds a GGUF file alone: .*gguf_to_hf", tmp_path / "gguf")
    refused("dtype: 'torch.int8' is not known", base, dtype=torch.int8)
    refused("dtype: 'half' is not known", base, dtype="half")
    refused("no adapter_model.safetensors", base, adapter=base)
    refused("LoRA: .*qproj", base, adapter=LoRA(target_modules=["qproj"]))  # matches nothing
    refused(r"'gate_proj', the nearest names are .*\.mlp\.w1\.", base, adapter=LoRA(target_modules=["gate_proj"]))
    with pytest.raises(UserError, match="target_modules is the text 'all-linear'"):
        LoRA(target_modules="all-linear")
    refused("LoRA is a class: give one of its objects", base, adapter=LoRA)
    refused("cannot get another one", adapter, adapter=LoRA(rank=2))
    refused("(?s)has the shape|of another model", write_checkpoint(tmp_path / "wide", width=64), adapter=adapter)
    small = write_checkpoint(tmp_path / "small", vocab_size=300)
    refused("has .* tokens but the checkpoint's embedding has 300 rows", small)
    orphaned = shutil.copytree(adapter, tmp_path / "lost")
    settings = json.loads((orphaned / "adapter_config.json").read_text())
    (orphaned / "adapter_config.json").write_text(
        json.dumps({**settings, "base_model_name_or_path": str(tmp_path / "gone")})
    )
    refused("names a base that is not there: correct its base_model_name_or_path", orphaned)
    for elsewhere in ("y" * 70_000, "/" + "ab/" * 30_000, "~nobody/model", "owner/" + "y" * 70_000):
        settings["base_model_name_or_path"] = elsewhere
        (orphaned / "adapter_config.json").write_text(json.dumps(settings))
        refused("names a base that is not there: correct its base_model_name_or_path", orphaned)
    quantized = shutil.copytree(base, tmp_path / "quantized")
    config = json.loads((quantized / "config.json").read_text())
    (quantized / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "gptq"}}))
    refused("quantization_config", quantized)


def test_model_is_loaded_from_the_cache_of_the_hub_without_a_network(base, tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=r"no folder own/tiny, .*no connection"):
        torchtune.load("own/tiny", **FP32)
    repository = tmp_path / "hub" / "models--own--tiny"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    shutil.copytree(base, repository / "snapshots" / ("0" * 40))
    model, _ = torchtune.load("own/tiny", adapter=LoRA(rank=2), **FP32)
    folder = torchtune.save(model, tmp_path / "adapter")
    assert json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"] == "own/tiny"
