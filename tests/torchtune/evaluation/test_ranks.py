"""Models that ranks share are measured as those of one process."""

from tests.tiny import write_adapter, write_checkpoint, write_lines
from tests.torchtune.training.parallel.test_compositions import launch


def test_shared_models_are_measured_as_by_one_process(tmp_path):
    write_checkpoint(tmp_path / "checkpoint")
    write_adapter(tmp_path / "adapter", tmp_path / "checkpoint")
    write_checkpoint(tmp_path / "one key head", key_heads=1)
    questions = ["the cat sees", "a dog", "why not", "red red red"]
    write_lines(tmp_path / "rows.jsonl", [{"prompt": question, "answer": "a"} for question in questions])
    launch("evaluation.ranks", 2, tmp_path)
