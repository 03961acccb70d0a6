from types import SimpleNamespace

from torchtune.training import plan_run

TINY = {
    "_component_": "torchtune.models.llama3_2.llama3_2",
    "vocab_size": 1000,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "embed_dim": 64,
    "intermediate_dim": 128,
    "max_seq_len": 256,
}
ADAMW = {"_component_": "torch.optim.AdamW", "lr": 1e-4}


def settings(**changes) -> SimpleNamespace:
    base = {
        "model": TINY,
        "tokenizer": {"max_seq_len": 128},
        "dtype": "bf16",
        "device": "cpu",
        "batch_size": 2,
        "optimizer": ADAMW,
        "optimizer_precision": "stochastic_rounding",
        "enable_activation_checkpointing": True,
        "loss": {"num_output_chunks": 4},
    }
    return SimpleNamespace(**{**base, **changes})


def test_the_text():
    text = plan_run(settings())
    assert "parameters  " in text
    assert "bfloat16" in text
    assert "mesh        1 process, device cpu" in text
    assert "micro-batch 2 x 128 = 256 tokens at most" in text
    assert "2 x 256 = 512 tokens (tokenizer.max_seq_len is not set" in plan_run(settings(tokenizer={}))


def test_converters_and_what_they_leave_to_train():
    lora = {"_component_": "torchtune.modules.peft.LoRA", "rank": 4, "alpha": 8, "attn_modules": ["q_proj", "v_proj"]}
    text = plan_run(settings(model_converters=[lora]))
    trained = 2 * (4 * (64 + 64) + 4 * (64 + 32))  # layers, q and v, A and B
    assert f"of which {trained:,} are trained" in text
    assert "converted   LoRA: 4 modules converted" in text


def test_a_recipe_that_does_not_train():
    text = plan_run(SimpleNamespace(model=TINY, dtype="fp32"))
    assert "of weights" in text
    assert "optimizer" not in text
