"""Observers with collectives: all ranks leave them out, or none does."""

from tests.recipes.killing import launch


def test_ranks_stay_in_step_when_an_observer_fails(tmp_path):
    launch("supervision.together", 2, tmp_path)
