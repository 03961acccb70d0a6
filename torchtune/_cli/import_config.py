"""``tune import``."""

import argparse
from pathlib import Path

from torchtune._cli.subcommand import Subcommand
from torchtune.utils import UserError, atomic_write


class Import(Subcommand):
    """Subcommand that converts a config of another library."""

    name = "import"
    help = "Convert a config of Axolotl, TRL or LLaMA-Factory"
    description = (
        "Convert a YAML config of Axolotl, TRL (`trl sft --config`) or LLaMA-Factory to one of ours:\n"
        "one that builds any model from its checkpoint. Every key without a counterpart is listed."
    )
    epilog = """
        examples:
          $ tune import qlora.yml
          $ tune import sft.yaml --from trl --output mine.yaml
    """

    def _add_arguments(self) -> None:
        self._parser.add_argument("file", type=Path, help="YAML file of the other library")
        self._parser.add_argument("--from", dest="library", choices=("axolotl", "trl", "llama-factory"), help="library")
        self._parser.add_argument("--output", type=Path, help="file to write (<name>_torchtune.yaml)")

    def _run(self, args: argparse.Namespace) -> None:
        import yaml

        from torchtune._cli._find_recipe import recipe_named_by
        from torchtune._cli._foreign_config import ForeignConfig
        from torchtune.config import load_and_check

        output = args.output or Path(f"{args.file.stem}_torchtune.yaml")
        if output.exists():
            raise UserError(f"{output} exists: choose another --output.")
        converted = ForeignConfig(args.file, args.library)
        report = [f"{converted.library} config {args.file}, as a config of the recipe {converted.data['recipe']}."]
        for title, keys in (("Without counterpart", converted.left), ("No setting is needed", converted.covered)):
            if keys:
                report.append(f"{title}:")
                report += [f"  {key}: {reason}" for key, reason in keys.items()]
        # The first line names the recipe; the report follows as comments.
        text = yaml.safe_dump(converted.data, sort_keys=False, allow_unicode=True)
        recipe_line, settings = text.split("\n", 1)
        comments = [f"# {line}" for line in report]
        with atomic_write(output, "w") as file:
            file.write("\n".join([recipe_line, *comments, "", settings]))
        print("\n".join(report), end="\n\n", flush=True)
        try:
            load_and_check(output, [], recipe_named_by(output).load_main())
        except UserError as error:
            unfinished = f"Written to {output}, which does not pass `tune validate`: correct it, and check it again."
            raise UserError(f"{unfinished}\n{error}") from error
        print(f"Written to {output}, which is well-formed.")
        folder = converted.data["checkpointer"]["checkpoint_dir"]
        if not Path(converted.repository).is_dir():
            print(f"  tune download {converted.repository} --output-dir {folder}")
        print(f"  tune run --config {output}")
