"""``tune chat``."""

import argparse
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torchtune._cli.subcommand import (
    CHECKPOINT,
    Subcommand,
    add_placement,
    check_least,
    check_most,
    find_checkpoint,
    shared_by_processes,
)

_HELP = (
    "/reset starts a new conversation, /system TEXT starts one with that system prompt (/system alone: without one), "
    "/image FILE shows an image with the next line, /quit ends the chat."
)


class Chat(Subcommand):
    """Subcommand for a conversation with a model."""

    name = "chat"
    help = "Talk with a model"
    description = (
        "Talk with a checkpoint, downloaded or trained, with or without an adapter. Answers are\n"
        f"streamed; Ctrl-C stops an answer, not the chat.\n{_HELP}"
    )
    epilog = """
        examples:
          $ tune chat --model /tmp/SmolLM2-135M-Instruct
          $ tune chat --model /tmp/SmolLM2-135M-Instruct --adapter /tmp/run/epoch_0
          $ tune chat --model /tmp/Qwen3-VL-2B-Instruct --image cat.png
          $ tune chat --model /tmp/Llama-3.3-70B-Instruct --nproc-per-node 8
          $ echo "Why is the sky blue?" | tune chat --model /tmp/SmolLM2-135M-Instruct --temperature 0
    """

    def _add_arguments(self) -> None:
        add = self._parser.add_argument
        add("--model", required=True, help=CHECKPOINT)
        add("--adapter", help="folder or repository of a LoRA adapter of that model")
        add("--system", help="system prompt")
        add("--image", action="append", metavar="FILE", help="image that is shown with the first line; may be repeated")
        add("--temperature", type=float, default=0.6, help="randomness; 0 takes the most likely token (default: 0.6)")
        add("--top-k", type=int, help="sample from the k most likely tokens (default: all)")
        add("--top-p", type=float, help="sample from the most likely tokens up to this probability (default: all)")
        add("--min-p", type=float, help="sample from tokens at least this times as likely as the first (default: all)")
        add("--max-new-tokens", type=int, default=1024, help="maximum tokens per answer (default: 1024)")
        add("--seed", type=int, help="seed of sampling (default: random)")
        add_placement(self._parser)

    def _run(self, args: argparse.Namespace) -> None:
        check_least(args, temperature=0, top_k=0, top_p=0, min_p=0, max_new_tokens=1, seed=0)
        check_most(args, top_p=1, min_p=1)
        args.model = find_checkpoint(args.model)
        conversation = _Conversation(args)
        ranks = conversation.ranks
        with conversation:
            if ranks.rank == 0 and sys.stdin.isatty():
                print(_HELP)
            while True:
                # Of several processes, rank 0 reads the lines, and all of them handle them.
                line = None
                if ranks.rank == 0:
                    line = self._read_line()
                line = ranks.broadcast(line)
                if line is None:
                    return
                self._handle_line(conversation, line)

    @staticmethod
    def _read_line() -> str | None:
        """Return the next line of standard input; None at its end, and for ``/quit``."""
        is_terminal = sys.stdin.isatty()
        while True:
            try:
                if is_terminal:
                    line = input("> ")
                else:
                    line = next(sys.stdin).rstrip("\n")
            except (EOFError, StopIteration):
                return None
            except KeyboardInterrupt:  # Ctrl-C clears the line; Ctrl-D or /quit ends the chat
                print()
                continue
            # Bytes that are not UTF-8 are surrogates of the line, which cannot be encoded.
            if not line.isascii() and line.encode(errors="ignore").decode() != line:
                print("That line is not UTF-8: send it as UTF-8.", file=sys.stderr)
                continue
            if line.strip() == "/quit":
                return None
            return line.strip()

    @staticmethod
    def _handle_line(conversation: "_Conversation", line: str) -> None:
        """Run a command of the chat, or answer a line."""
        command, _, argument = line.partition(" ")
        argument = argument.strip()
        if not line:
            return
        if command == "/reset":
            conversation.reset()
        elif command == "/system":
            conversation.reset(argument)
        elif command == "/image":
            conversation.show(argument)
        elif command.startswith("/"):
            print(f"{command} is not a command. {_HELP}", file=sys.stderr)
        else:
            conversation.answer(line)


class _Conversation:
    """A model and the messages of the conversation."""

    def __init__(self, args: argparse.Namespace) -> None:
        import torch

        import torchtune
        from torchtune.generation import check_generates, fast_linears
        from torchtune.training.parallel import NO_TIMEOUT, Ranks

        self._args = args
        self._system = args.system
        self._model, self._tokenizer = torchtune.load(
            args.model,
            adapter=args.adapter,
            dtype=args.dtype,
            device=args.device,
            images=bool(args.image),  # the part that reads images takes memory: only for a chat that shows some
            shards=shared_by_processes("layers"),
        )
        check_generates(self._model)  # refuses a classifier, whose outputs are no tokens
        self.ranks = Ranks(timeout=NO_TIMEOUT)  # the followers wait for the user
        self._rng = torch.Generator(self._model.tok_embeddings.weight.device)
        seed = args.seed
        if seed is None:
            seed = self._rng.seed()
        self._rng.manual_seed(self.ranks.broadcast(seed))  # all ranks draw the same tokens
        self._fast_linears = fast_linears(self._model, pack=True)  # entered and left with this object
        self.reset()
        for file in args.image or ():
            self.show(file)

    def __enter__(self) -> None:
        self._fast_linears.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._fast_linears.__exit__(*error)

    def reset(self, system: str | None = None) -> None:
        """Clear the messages; ``system`` replaces the system prompt, an empty string removes it."""
        if system is not None:
            self._system = system
        self._messages: list[dict[str, Any]] = []
        self._images: list[dict[str, Any]] = []  # images of the next line
        if self._system:
            self._messages.append({"role": "system", "content": self._system})

    def show(self, file: str) -> None:
        """Show an image with the next line; print the reason if it cannot be read."""
        from torchtune.data import DataError, open_image

        try:
            if not getattr(self._tokenizer, "takes_images", False):
                raise DataError("the model reads text only, or --image was not given for the first image")
            self._images.append({"type": "image", "content": open_image(file)})
        except DataError as error:
            print(f"{file} is not shown: {error}.", file=sys.stderr)

    def answer(self, text: str) -> None:
        """Print the answer to ``text``, and add both to the conversation, even if the answer is interrupted."""
        from torchtune.data import as_messages
        from torchtune.generation import prompt_row

        question = {"role": "user", "content": [*self._images, {"type": "text", "content": text}]}
        messages = [*self._messages, question]
        row = prompt_row(self._tokenizer, as_messages(messages), "the conversation")
        tokens = row["tokens"]
        room = self._model.max_seq_len - len(tokens)
        if room < 1:
            print(
                f"The conversation's {len(tokens)} tokens fill the model's context of {self._model.max_seq_len}: start "
                "a new one with /reset.",
                file=sys.stderr,
            )
            return
        answer, end_reason = self._stream_answer(row, min(room, self._args.max_new_tokens))
        self._images = []  # the question in the messages has them
        self._messages = [*messages, {"role": "assistant", "content": answer}]
        if end_reason == "length" and room > self._args.max_new_tokens:
            print(f"(truncated at --max-new-tokens {self._args.max_new_tokens})", file=sys.stderr)
        elif end_reason == "length":
            print(f"(truncated: the context of {self._model.max_seq_len} tokens is full; use /reset)", file=sys.stderr)

    def _stream_answer(self, row: dict[str, Any], limit: int) -> tuple[str, str]:
        """Print an answer; return it and why it ended ("stop", "length" or "interrupt")."""
        from torchtune.generation import images_of_row, stream_tokens
        from torchtune.tokenizers import StreamDecoder

        decoder = StreamDecoder(self._tokenizer)
        pieces: list[str] = []
        end_reason = "length"
        steps = stream_tokens(
            self._model,
            [row["tokens"]],
            max_new_tokens=limit,
            temperature=self._args.temperature,
            top_k=self._args.top_k,
            top_p=self._args.top_p,
            min_p=self._args.min_p,
            stop_tokens=self._tokenizer.stop_tokens,
            rng=self._rng,
            images=[images_of_row(row, self._rng.device)],
            tokens_per_check=1,  # each token is printed at once
        )
        try:
            with self._delayed_interrupts() as is_interrupted:
                for step in steps:
                    token = int(step.tokens)
                    if token in self._tokenizer.stop_tokens:
                        end_reason = "stop"
                        break
                    pieces.append(decoder.put(token))
                    print(pieces[-1], end="", flush=True)
                    if is_interrupted():
                        end_reason = "interrupt"
                        break
        except KeyboardInterrupt:  # of a single process; several learn of it after a token
            end_reason = "interrupt"
        finally:
            steps.close()  # the generator holds the KV cache
        pieces.append(decoder.end())
        print(pieces[-1], flush=True)
        return "".join(pieces), end_reason

    @contextmanager
    def _delayed_interrupts(self) -> Iterator[Callable[[], bool]]:
        """Context manager in which Ctrl-C waits for the end of a token, if there are several processes.

        Raised in the middle of a collective, it would leave the other ranks waiting. They learn of it together.

        Yields:
            A function that returns whether there was a Ctrl-C. A collective.
        """
        if self.ranks.size == 1:
            yield lambda: False
            return
        was_pressed = False

        def note(*_: Any) -> None:
            nonlocal was_pressed
            was_pressed = True

        previous_handler = signal.signal(signal.SIGINT, note)
        try:
            yield lambda: self.ranks.any(was_pressed)
        finally:
            signal.signal(signal.SIGINT, previous_handler)
