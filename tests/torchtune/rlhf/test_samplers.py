"""Sampling from a server: the tokens, their log-probs, and above all the weights that it samples from."""

import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest
import torch

import torchtune
from tests.devices import DEVICE
from tests.recipes.runs import start
from tests.tiny import write_checkpoint, write_conversations
from tests.torchtune.rlhf.servers import tiny_server
from tests.torchtune.rlhf.test_grpo import token_scores
from torchtune.modules.conversion import Conversion, ConversionReport, Phase, apply_conversions
from torchtune.modules.peft import LoRA
from torchtune.rlhf import LocalSampler, RolloutError, ServerSampler, collate_rollouts, setup_policy_loss
from torchtune.rlhf._servers import VLLMServer
from torchtune.rlhf.loss import GRPOLoss
from torchtune.tokenizers import hf_tokenizer

PROMPTS = [[1, 65, 66, 67], [1, 70, 71]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("served") / "checkpoint")


@pytest.fixture(scope="module")
def make(checkpoint):
    def build(server, kind="vllm", adapters=False, **arguments):
        adapter = LoRA(rank=4, alpha=8) if adapters else None
        model, tokenizer = torchtune.load(checkpoint, adapter=adapter, device=DEVICE)
        arguments = {"url": server.url, "server": kind, "checkpoint_dir": str(checkpoint), **arguments}
        return ServerSampler(model, tokenizer, folder=str(checkpoint.parent / "weights"), **arguments)

    return build


def difference(sampler, rollouts):
    """Largest difference of the trainer's log-probs to those that came with the answers."""
    batch = collate_rollouts(rollouts, [1.0] * len(rollouts)).to(DEVICE)
    loss = setup_policy_loss(GRPOLoss(), sampler.model, sampler)
    scores, labelled = token_scores(sampler.model, batch, loss)
    return (scores[labelled] - batch.per_token["sampled"][labelled]).abs().max().item()


def shift(sampler, seed):
    generator = torch.Generator().manual_seed(seed)
    for weight in filter(lambda weight: weight.requires_grad, sampler.model.parameters()):
        weight.data += 0.1 * torch.randn(weight.shape, generator=generator)


@pytest.mark.parametrize("adapters", [False, True])
def test_the_server_samples_from_the_weights_of_this_step(adapters, checkpoint, make):
    with tiny_server(checkpoint) as server:
        sampler = make(server, adapters=adapters, max_new_tokens=6, temperature=1.3, max_difference=1e-3)
        assert sampler.gives_log_probs
        for seed in range(2):
            shift(sampler, seed)
            rollouts = sampler(PROMPTS, 3, [2**64 - 5, 7])
            assert difference(sampler, rollouts) < 1e-4
        prompts_of_rollouts = [rollout.tokens[: rollout.prompt_len].tolist() for rollout in rollouts]
        assert prompts_of_rollouts == [PROMPTS[0]] * 3 + [PROMPTS[1]] * 3
        assert len({tuple(rollout.answer) for rollout in rollouts[:3]}) > 1
        assert all(rollout.finished == (rollout.answer[-1] in sampler.stop_tokens) for rollout in rollouts)
        again = sampler(PROMPTS, 3, [2**64 - 5, 7])
        assert [rollout.answer for rollout in again] == [rollout.answer for rollout in rollouts]
        likeliest = sampler(PROMPTS, 1)
        assert [rollout.answer for rollout in likeliest] == [rollout.answer for rollout in sampler(PROMPTS, 1)]
        controls = [path for path, _ in server.asked if path != "/v1/completions"]
        expected_requests = ["/collective_rpc", "/reset_prefix_cache"] * 3
        if adapters:
            expected_requests = ["/v1/load_lora_adapter"] + ["/v1/load_lora_adapter", "/v1/unload_lora_adapter"] * 2
        assert controls == expected_requests, "weights travel at the start and when they have changed, and only then"
        # A model's generation_config.json may truncate the distribution: a request has to say that it does not.
        body = next(body for path, body in server.asked if path == "/v1/completions")
        untruncated = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
        assert {name: body[name] for name in untruncated} == untruncated
    folder = checkpoint.parent / "weights"
    assert len(list(folder.glob("weights-*/step_*"))) == 1, "the weights of former steps are removed"
    del sampler
    assert not list(folder.glob("weights-*"))


def test_a_server_with_stale_weights_ends_the_run(checkpoint, make):
    with tiny_server(checkpoint, "stale") as server:
        sampler = make(server, max_new_tokens=4)
        sampler(PROMPTS, 2, [1, 2])
        shift(sampler, 0)
        with pytest.raises(
            RolloutError, match=r"differ from the trainer's by .* it has another model or other weights"
        ):
            sampler(PROMPTS, 2, [1, 2])


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("top_k after", r"-0\.\d+ ± 0\.\d+ above 1 in the importance ratio"),
        ("top_k", r"\+\d\.\d+ ± 0\.\d+ nats above the negative entropy"),
        ("hot", r"-\d\.\d+ ± 0\.\d+ nats above the negative entropy"),
    ],
)
def test_answers_of_another_distribution_are_refused(fault, said, checkpoint, make):
    with tiny_server(checkpoint, fault) as server:
        sampler = make(server, max_new_tokens=24, max_difference=9.0)
        with pytest.raises(RolloutError, match=r"are not samples from the model's distribution") as caught:
            sampler(PROMPTS, 24, [1, 2])
    assert re.search(said, str(caught.value)), str(caught.value)


@pytest.mark.parametrize("adapters", [False, True])
def test_another_server_answers_while_one_is_down(adapters, checkpoint, make, caplog):
    prompts = [*PROMPTS, *PROMPTS]
    seeds = [1, 2, 3, 4]
    with tiny_server(checkpoint) as first:
        with tiny_server(checkpoint, "dies") as second:
            port = second.server_port
            sampler = make(first, url=[first.url, second.url], adapters=adapters, max_new_tokens=4, max_difference=1e-3)
            rollouts = sampler(prompts, 2, seeds)
            answered = Counter(tuple(body["prompt"]) for path, body in first.asked if path == "/v1/completions")
            assert answered == {tuple(PROMPTS[0]): 2, tuple(PROMPTS[1]): 1}, "two answered once, then nothing"
        assert [answer.answer for answer in rollouts] == [answer.answer for answer in sampler(prompts, 2, seeds)]
        assert caplog.text.count("Other servers answer its prompts") == 1
        shift(sampler, 0)
        assert difference(sampler, sampler(prompts, 2, seeds)) < 1e-4
        with tiny_server(checkpoint, port=port) as second:
            shift(sampler, 1)
            assert difference(sampler, sampler(prompts, 2, seeds)) < 1e-4
            assert [body["prompt"] for path, body in second.asked if path == "/v1/completions"] == [PROMPTS[1]] * 2


@pytest.mark.parametrize("adapters", [False, True])
def test_a_restarted_server_loads_the_weights_again(adapters, checkpoint, make):
    with tiny_server(checkpoint) as server:
        port = server.server_port
        sampler = make(server, adapters=adapters, max_new_tokens=4, max_difference=1e-3)
        shift(sampler, 0)
        first = sampler([*PROMPTS, *PROMPTS], 2, [1, 2, 3, 4])
    again = []
    thread = threading.Thread(target=lambda: again.extend(sampler([*PROMPTS, *PROMPTS], 2, [1, 2, 3, 4])))
    thread.start()
    time.sleep(0.3)  # no server listens at the port
    assert thread.is_alive()
    with tiny_server(checkpoint, port=port) as server:
        thread.join(60)
        assert [rollout.answer for rollout in again] == [rollout.answer for rollout in first]
        loads = [path for path, _ in server.asked if path in ("/collective_rpc", "/v1/load_lora_adapter")]
        assert len(loads) == 1
        shift(sampler, 1)
        assert difference(sampler, sampler(PROMPTS, 2, [1, 2])) < 1e-4


def test_texts_that_do_not_become_the_sampled_tokens_are_dropped(checkpoint, make, caplog):
    with tiny_server(checkpoint) as server:
        sampler = make(server, "transformers", max_new_tokens=3, temperature=1.5)
        sampler(PROMPTS, 1)
        rows = sampler.model.tok_embeddings.weight.data
        rows[2] = rows[server.sampled[0][0]]  # the end is as likely as what is likeliest
        server.sampled.clear()
        rollouts = sampler(PROMPTS, 24, [5, 6])
        not_dropped = [
            (rollout, tokens) for rollout, tokens in zip(rollouts, server.sampled, strict=True) if rollout.answer
        ]
        assert 5 < len(not_dropped) < len(rollouts)
        assert all(rollout.answer == tokens for rollout, tokens in not_dropped)
        assert {rollout.finished for rollout, _ in not_dropped} == {True, False}
        assert all(rollout.log_probs is None for rollout in rollouts)
        assert "answers are dropped" in caplog.text
        names = [body["model"] for path, body in server.asked if path == "/load_model"]
        assert len(set(names)) == 2
        assert set(server.models) == {names[1]}, "the server forgets what it loaded before"
        assert sampler(PROMPTS, 1)[0].answer == sampler(PROMPTS, 1)[0].answer
        with pytest.raises(RolloutError, match="gives no log-probs to weigh tokens by"):
            setup_policy_loss(GRPOLoss(importance_cap=2.0), sampler.model, sampler)


@pytest.mark.parametrize(
    ("kind", "faults", "arguments", "said"),
    [
        ("vllm", ["another"], {}, r"serves another, not '.*checkpoint': correct sampler.model_name"),
        ("vllm", ["/collective_rpc"], {}, r"takes no new weights: start vLLM with VLLM_SERVER_DEV_MODE=1 .*404"),
        ("vllm", ["/load_lora_adapter"], {"adapters": True}, "start vLLM with --enable-lora and VLLM_ALLOW"),
        ("vllm", ["no tokens"], {}, "without token ids and a log-prob for each"),
        ("vllm", ["slow"], {"timeout": 0.1}, "has not answered within 0.1 s"),
        ("vllm", [], {"url": "http://127.0.0.1:9/v1"}, "No server answers at http://127.0.0.1:9/v1/models"),
        ("transformers", ["/load_model"], {}, "404 Not Found"),
        ("transformers", ["fixed"], {}, "answers with the model 'another', not with .* without a fixed model"),
        ("transformers", [], {"temperature": 0.0}, "temperature is 0"),
        ("sglang", [], {}, "it must be vllm or transformers"),
        ("vllm", [], {"url": []}, "sampler.url is empty"),
    ],
)
def test_errors_of_a_server_are_one_sentence(
    kind,
    faults,
    arguments,
    said,
    checkpoint,
    make,
):
    with tiny_server(checkpoint, *faults) as server, pytest.raises(RolloutError) as caught:
        make(server, kind, **{"max_new_tokens": 2, **arguments})(PROMPTS, 1, [1, 2])
    assert re.search(said, str(caught.value)), str(caught.value)


@pytest.fixture
def transformers_serve(tmp_path):
    """Url of a process of ``transformers serve``."""
    for package in ("fastapi", "uvicorn", "openai"):
        pytest.importorskip(package, reason="the extra serving is not installed")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [Path(sys.executable).with_name("transformers"), "serve", "--device", "cpu", "--port", str(port)]
    with (tmp_path / "serve.log").open("w") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, "HF_HUB_OFFLINE": "1"}
        )
    try:
        for _ in range(600):
            if process.poll() is not None:
                break
            with suppress(OSError), socket.create_connection(("localhost", port), timeout=1.0):
                break
            time.sleep(0.2)
        assert process.poll() is None, (tmp_path / "serve.log").read_text()[-2000:]
        yield f"http://localhost:{port}/v1"
    finally:
        process.terminate()
        process.wait(60)


@pytest.mark.slow
def test_transformers_serve_answers_with_the_weights_of_this_step(checkpoint, make, transformers_serve):
    prompts = [[1, 65 + i, 70 + i] for i in range(24)]
    with tiny_server(checkpoint) as unused:
        sampler = make(unused, "transformers", url=transformers_serve, max_new_tokens=1)
    local = LocalSampler(sampler.model, hf_tokenizer(str(checkpoint)), max_new_tokens=1)
    former = []
    for seed in range(2):
        shift(sampler, seed)
        answers = [rollout.answer for rollout in sampler(prompts, 1)]
        expected = [rollout.answer for rollout in local(prompts, 1)]
        not_dropped = [i for i, answer in enumerate(answers) if answer]
        assert len(not_dropped) >= 3
        assert [answers[i] for i in not_dropped] == [expected[i] for i in not_dropped]
        assert expected != former
        former = expected
    assert sum(bool(rollout.answer) for rollout in sampler(prompts[:1], 24, [5])) > 0


def test_a_recipe_trains_on_answers_of_a_server(tmp_path):
    """In every step the server's log-probs are those of the weights that the step before it made."""
    folder = write_checkpoint(tmp_path / "checkpoint")
    sampler = {"_component_": "torchtune.rlhf.ServerSampler", "checkpoint_dir": str(folder), "max_new_tokens": 6}
    settings = {"max_steps_per_epoch": 3, "num_samples": 3, "optimizer__lr": 0.05, "lr_scheduler": None}
    settings["loss"] = {"_component_": "torchtune.rlhf.loss.GRPOLoss", "importance_cap": 2.0}
    with tiny_server(folder) as server:
        sampler |= {"url": server.url, "server": "vllm", "folder": str(tmp_path / "weights")}
        write_conversations(tmp_path / "data.jsonl")
        run = start("lora_grpo_single_device", tmp_path, sampler=sampler, **settings)
    records = [record for record in run.records if "policy/sampler_difference" in record]
    assert len(records) == 3
    assert max(record["policy/sampler_difference"] for record in records) < 1e-4
    assert max(abs(record["policy/importance"] - 1.0) for record in records) < 1e-4
    assert min(record["grad_norm"] for record in records) > 0


def test_vllm_gets_merged_weights_for_adapters_that_peft_lacks():
    class Scale(Conversion):
        phase = Phase.KERNEL

        def convert(self, model):
            model.scale = torch.nn.Parameter(torch.ones(2))
            return ConversionReport("Scale")

        def owned_parameters(self, model):
            return {"scale"}

    server = VLLMServer("http://localhost:1/v1", None, None)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4, device="meta"))
    assert server.contents(model) == "model"
    apply_conversions(model, [LoRA(rank=2, target_modules=["0"])])
    assert server.contents(model) == "adapter"
    apply_conversions(model, [Scale()])
    assert server.contents(model) == "merged"
    two_layers = torch.nn.ModuleDict({"a": torch.nn.Linear(4, 4), "b": torch.nn.Linear(4, 4)})
    apply_conversions(two_layers, [LoRA(rank=2, target_modules=["a"], train_modules=["b"])])
    assert server.contents(two_layers) == "merged"
