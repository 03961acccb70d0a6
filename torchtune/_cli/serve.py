"""``tune serve``."""

import argparse
import signal
from pathlib import Path
from typing import Any

from torchtune._cli.subcommand import (
    CHECKPOINT,
    Subcommand,
    add_placement,
    check_least,
    find_checkpoint,
    shared_by_processes,
)
from torchtune.utils import UserError

_FORMATS = ("hermes", "qwen_xml", "llama3", "mistral", "harmony", "gemma4")


class Serve(Subcommand):
    """Subcommand for a server of chats."""

    name = "serve"
    help = "Serve a model to clients of the OpenAI API"
    description = (
        "Answer /v1/chat/completions on this machine, with a checkpoint and adapters for it, each under a model\n"
        "name of its own. Requests with a session (header X-Session-Id) are kept as tokens, masks and log-probs for\n"
        "training: GET /v1/sessions/NAME returns them, DELETE also forgets them. Ctrl-C ends the server."
    )
    epilog = """
        examples:
          $ tune serve /tmp/SmolLM2-135M-Instruct
          $ tune serve /tmp/SmolLM2-135M-Instruct --adapter orders=/tmp/run/epoch_0 --port 9000
          $ tune serve /tmp/Llama-3.3-70B-Instruct --nproc-per-node 8
          $ curl localhost:8000/v1/chat/completions -d \\
              '{"model": "SmolLM2-135M-Instruct", "messages": [{"role": "user", "content": "Hi"}]}'
    """

    def _add_arguments(self) -> None:
        add = self._parser.add_argument
        add("model", help=CHECKPOINT)
        add(
            "--adapter",
            action="append",
            default=[],
            metavar="NAME=PATH",
            help="LoRA adapter of that model and its model name; repeat for several",
        )
        add("--name", help="model name of the checkpoint (default: the name of its folder)")
        add("--port", type=int, default=8000, help="port on 127.0.0.1; 0 takes a free one (default: 8000)")
        add("--max-new-tokens", type=int, default=1024, help="default of a request's max_tokens (default: 1024)")
        add("--max-sequences", type=int, default=8, help="requests answered at the same time (default: 8)")
        add("--max-waiting", type=int, default=256, help="requests that may wait (default: 256)")
        add("--tool-format", choices=_FORMATS, help="format of tool calls (default: detected in the chat template)")
        add_placement(self._parser)

    def _run(self, args: argparse.Namespace) -> None:
        check_least(args, port=0, max_new_tokens=1, max_sequences=1, max_waiting=1)
        from torchtune._cli._chat_api import ChatServer
        from torchtune.generation import follow_batches
        from torchtune.rlhf.environments import detect_format
        from torchtune.tokenizers import chat_template_text
        from torchtune.training.parallel import NO_TIMEOUT, Ranks

        path = find_checkpoint(args.model)
        models, tokenizer = _load(path, args.name or Path(path).name, args)
        ranks = Ranks(timeout=NO_TIMEOUT)  # the others wait for requests
        if ranks.rank > 0:
            follow_batches(models, ranks, max_sequences=args.max_sequences)
            return
        try:
            server = ChatServer(
                ("127.0.0.1", args.port),
                models,
                tokenizer,
                tool_format=args.tool_format or detect_format(chat_template_text(tokenizer)),
                max_new_tokens=args.max_new_tokens,
                max_sequences=args.max_sequences,
                max_waiting=args.max_waiting,
                ranks=ranks,
            )
        except (OSError, OverflowError) as error:  # OverflowError: a port above 65535
            raise UserError(f"--port {args.port} cannot be used ({error}): choose another one, or 0.") from error
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the server as Ctrl-C does
        with server:
            print(f"serving {', '.join(models)} at http://127.0.0.1:{server.server_port}/v1", flush=True)
            try:
                server.serve_forever()
            finally:
                signal.signal(signal.SIGINT, signal.SIG_DFL)  # a second Ctrl-C does not wait for the model


def _load(path: str, name: str, args: argparse.Namespace) -> tuple[dict[str, Any], Any]:
    """Load the model, and a copy with shared parameters for each adapter."""
    import torchtune
    from torchtune._facade import adapted_copy, load_adapted_shard
    from torchtune.generation import check_generates

    shards = shared_by_processes("layers")
    base, tokenizer = torchtune.load(path, dtype=args.dtype, device=args.device, shards=shards)
    check_generates(base)
    models = {name: base}
    for text in args.adapter:
        adapter_name, _, adapter = text.partition("=")
        if not (adapter_name and adapter) or adapter_name in models:
            raise UserError(f"--adapter {text}: give NAME=PATH, with a name of its own for each.")
        if shards is None:
            models[adapter_name] = adapted_copy(base, adapter)
        else:  # a sharded model cannot be copied with new parameters
            models[adapter_name] = load_adapted_shard(base, path, adapter, dtype=args.dtype, device=args.device)
    return models, tokenizer
