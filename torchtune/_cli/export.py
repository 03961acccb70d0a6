"""``tune export``."""

import argparse
from pathlib import Path

from torchtune._cli.subcommand import Subcommand
from torchtune.utils import UserError

FORMATS = ("hf", "adapter", "merged", "gguf", "compressed-tensors", "ollama")
_GGUF = ("q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "bf16", "f16", "f32")
# Format -> kinds of quantization; the first is the default.
QUANTS = {"gguf": _GGUF, "ollama": _GGUF, "compressed-tensors": ("int4", "int8", "fp8", "8da4w")}


class Export(Subcommand):
    """Subcommand that writes a trained model for other programs and checks the files."""

    name = "export"
    help = "Write a trained model for other programs, and check it there"
    description = (
        "Write a trained model in the format of another program, load the files in the library that\n"
        "reads them, and compare its logits with those of the trained model. If they differ, nothing\n"
        "is written and the exit code is 3."
    )
    epilog = """
        formats:
          hf                  all weights, for transformers and vLLM; of a run without adapters
          adapter             the LoRA adapter in PEFT's layout
          merged              all weights with the adapter merged into them
          gguf                one GGUF file, for llama.cpp
          compressed-tensors  quantized weights, for vLLM and transformers
          ollama              a GGUF file with its Modelfile

        examples:
          $ tune export /tmp/run --to merged
          $ tune export /tmp/run/epoch_2 --to gguf --quant q4_0 --output /tmp/cats
          $ tune export /tmp/run --to adapter --push me/cats --yes
    """

    def _add_arguments(self) -> None:
        add = self._parser.add_argument
        add("model", help="folder of a run (its best checkpoint, or last) or of a checkpoint")
        add("--to", required=True, choices=FORMATS, metavar="FORMAT", help="format, see below")
        kinds = "; ".join(f"{name}: {', '.join(QUANTS[name])}" for name in ("gguf", "compressed-tensors"))
        add("--quant", help=f"kind of quantization, by default the first\n({kinds})")
        add("--output", type=Path, help="folder to write (default: CHECKPOINT-FORMAT beside the checkpoint)")
        add("--check", action=argparse.BooleanOptionalAction, help="read the files where they will be read (default)")
        add("--device", default="cpu", help="device of the check, in float32 (cpu)")
        add("--push", metavar="OWNER/NAME", help="repository on the hub to upload to; without --yes a dry run")
        add("--yes", action="store_true", help="upload")

    def _run(self, args: argparse.Namespace) -> None:
        quants = QUANTS.get(args.to, ())
        if args.quant:
            args.quant = args.quant.lower()
        elif quants:
            args.quant = quants[0]
        else:  # the format has no quantization
            args.quant = None
        if args.quant is not None and args.quant not in quants:
            choices = f"it goes with {', '.join(QUANTS)}"
            if quants:
                choices = f"choose out of {', '.join(quants)}"
            raise UserError(f"--quant {args.quant}: {args.to} has no such quantization: {choices}.")
        if args.yes and not args.push:
            raise UserError("--yes uploads, and there is nowhere to: add --push OWNER/NAME.")
        from torchtune._cli._export import export  # after the checks, because torch takes seconds to import

        export(args)
