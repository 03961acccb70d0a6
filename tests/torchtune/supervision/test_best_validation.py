"""The best validation of a run, and when the patience ends it."""

from torchtune.supervision import BestValidation


def test_patience_counts_validations_since_the_last_improvement(tmp_path):
    best = BestValidation(tmp_path, "val_loss", patience=2)
    improved = []
    stops = []
    for step, loss in enumerate([2.0, 2.5, 1.0, 1.5, 1.0], 1):
        improved.append(best.update(step, {"val_loss": loss}))
        stops.append(best.should_stop)
    assert improved == [True, False, True, False, False]
    assert stops == [False, False, False, False, True]
