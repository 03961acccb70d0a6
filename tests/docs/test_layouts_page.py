"""The page of layouts shows what the tokenizers make."""

from tests.docs.layouts_page import SHOWN, examples, parts_of_page
from tests.torchtune.models.named_layouts import ROWS


def test_the_page_is_current():
    assert parts_of_page()[1] == examples(), "run python -m tests.docs.layouts_page"


def test_every_layout_is_on_the_page_or_equals_one_that_is():
    same = {
        "qwen2_5": "qwen2",
        "mistral_v3": "mistral_v3_tekken",
        "qwen3_no_think": "qwen3",
        "gpt_oss_ranks": "gpt_oss",
    }
    assert {same.get(row.case.name, row.case.name) for row in ROWS} == SHOWN.keys()
