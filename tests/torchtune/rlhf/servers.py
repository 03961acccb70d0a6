"""A server of this machine that answers as vLLM or as `transformers serve` does, with a model of transformers.

It loads the weights that it is told to take by libraries that are not ours, samples from them, and remembers what it
was asked and which tokens it sampled.
"""

import json
import math
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from tests.serving import JSONHandler, serving

ON_HOST = True  # the server has a model of its own there
_LOADING = threading.Lock()  # from_pretrained sets global state


class TinyServer(ThreadingHTTPServer):
    """Args: folder of the model it starts with; ``faults`` by name say what goes wrong."""

    def __init__(self, folder: Path, faults: set[str], port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.base = folder
        self.name = str(folder)
        self.faults = faults
        self.models = {str(folder): AutoModelForCausalLM.from_pretrained(folder)}
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.sampled: list[list[int]] = []
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"

    def load(self, folder: str) -> torch.nn.Module:
        with _LOADING:
            return self._load(folder)

    def _load(self, folder: str) -> torch.nn.Module:
        if (Path(folder) / "adapter_config.json").exists():
            from peft import PeftModel

            with warnings.catch_warnings():  # peft calls what transformers deprecates
                warnings.simplefilter("ignore")
                return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(self.base), folder)
        return AutoModelForCausalLM.from_pretrained(folder)

    @torch.no_grad()
    def sample(
        self, model: torch.nn.Module, prompt: list[int], most: int, temperature: float, stop: list[int], seed: int
    ) -> tuple[list[int], list[float]]:
        """Tokens and log-probs; temperature 0 takes the likeliest."""
        generator = torch.Generator().manual_seed(seed)
        tokens = list(prompt)
        sampled_log_probs = []
        while len(sampled_log_probs) < most and (not sampled_log_probs or tokens[-1] not in stop):
            logits = model(torch.tensor([tokens])).logits[0, -1].float()
            if "hot" in self.faults:
                temperature *= 2.0
            log_probs = (logits / (temperature or 1.0)).log_softmax(-1)
            top_log_probs = log_probs
            if self.faults & {"top_k", "top_k after"}:
                is_cut = log_probs < log_probs.topk(20).values[-1]
                top_log_probs = log_probs.masked_fill(is_cut, -math.inf).log_softmax(-1)
            if "top_k after" in self.faults:
                log_probs = top_log_probs
            if temperature:
                token = int(top_log_probs.exp().multinomial(1, generator=generator))
            else:
                token = int(logits.argmax())
            tokens.append(token)
            sampled_log_probs.append(float(log_probs[token]))
        self.sampled.append(tokens[len(prompt) :])
        return self.sampled[-1], sampled_log_probs


class _Handler(JSONHandler):
    server: TinyServer

    def do_GET(self) -> None:
        names = ["another"] if "another" in self.server.faults else list(self.server.models)
        self.reply({"status": "ok", "data": [{"id": name} for name in names]})

    def do_POST(self) -> None:
        body = self.read_json()
        with self.server.lock:
            before = [path for path, _ in self.server.asked].count("/v1/completions")
            self.server.asked.append((self.path, body))
            if "dies" in self.server.faults and self.path == "/v1/completions" and before:
                return  # without a reply
            status, content = self._answer(body)
            self.reply(content, status)

    def _answer(self, body: dict[str, Any]) -> tuple[int, Any]:
        server = self.server
        faults = server.faults
        path = self.path.removeprefix("/v1")
        if path in faults:
            return 404, {"detail": "Not Found"}
        if path == "/completions" and "slow" in faults:
            time.sleep(0.4)
        if path == "/load_lora_adapter":
            if body["lora_name"] in server.models:
                return 400, "has already been loaded"
            server.models[body["lora_name"]] = server.load(body["lora_path"])
            return 200, "Success"
        if path == "/unload_lora_adapter":
            del server.models[body["lora_name"]]
            return 200, "Success"
        if path == "/collective_rpc":
            if "stale" not in faults:
                server.models[server.name] = server.load(body["kwargs"]["weights_path"])
            return 200, {"results": [None]}
        if path == "/reset_prefix_cache":
            return 200, {"success": True}
        if path == "/reset":
            server.models.clear()
            return 200, {"status": "ok"}
        if path == "/load_model":
            server.models[body["model"]] = server.load(body["model"])
            return 200, 'data: {"status": "ready"}\n\n'
        if body["model"] not in server.models:
            return 404, {"message": f"The model `{body['model']}` does not exist."}
        model = server.models[body["model"]]
        if isinstance(body["prompt"], str):
            return 200, self._text(model, body)
        return 200, self._tokens(model, body)

    def _tokens(self, model: torch.nn.Module, body: dict[str, Any]) -> dict[str, Any]:
        choices = []
        for index in range(body["n"]):
            tokens, log_probs = self.server.sample(
                model,
                body["prompt"],
                body["max_tokens"],
                body["temperature"],
                body["stop_token_ids"],
                (body.get("seed", 0) + index) % 2**63,
            )
            ended = tokens[-1] in body["stop_token_ids"]
            choices.append(
                {
                    "index": index,
                    "text": "",
                    "token_ids": None if "no tokens" in self.server.faults else tokens,
                    "prompt_token_ids": body["prompt"],
                    "logprobs": {"token_logprobs": log_probs},
                    "finish_reason": "stop" if ended else "length",
                }
            )
        return {"model": body["model"], "choices": choices[::-1]}

    def _text(self, model: torch.nn.Module, body: dict[str, Any]) -> dict[str, Any]:
        how = GenerationConfig(**json.loads(body["generation_config"]))
        tokenizer = AutoTokenizer.from_pretrained(self.server.base)
        prompt = tokenizer(body["prompt"]).input_ids
        temperature = how.temperature if how.do_sample else 0.0
        tokens, _ = self.server.sample(
            model, prompt, how.max_new_tokens, temperature, [how.eos_token_id], body.get("seed", 0)
        )
        reason = "length" if len(tokens) >= how.max_new_tokens else "stop"
        return {
            "model": "another" if "fixed" in self.server.faults else f"{body['model']}@main",
            "choices": [{"text": tokenizer.decode(tokens, skip_special_tokens=True), "finish_reason": reason}],
            "usage": {"prompt_tokens": len(prompt), "completion_tokens": len(tokens)},
        }


@contextmanager
def tiny_server(folder: Path, *faults: str, port: int = 0) -> Iterator[TinyServer]:
    """Run a server as long as the block lasts."""
    with TinyServer(folder, set(faults), port) as server, serving(server):
        yield server
