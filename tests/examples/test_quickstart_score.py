"""The scoring of the quickstart, on a random model of two layers."""

import sys
from pathlib import Path

from tests.tiny import write_checkpoint

FOLDER = Path(__file__).parents[2] / "examples" / "quickstart"


def test_answers_do_not_depend_on_the_batch(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    import score

    model, tokenizer = score.load(write_checkpoint(tmp_path / "model"), "fp32")
    # The random model has 256 positions and a small vocabulary; the first words of each order do.
    asked = [
        {"system": "a b", "user": " ".join(conversation["user"].split()[:4])}
        for conversation in score.conversations()[:5]
    ]
    together = score.answer(model, tokenizer, asked)
    alone = score.answer(model, tokenizer, asked, max_sequences=1)
    assert together == alone
    assert any(together)
    sys.modules.pop("score")
