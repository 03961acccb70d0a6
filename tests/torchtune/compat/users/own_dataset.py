"""A dataset builder as people wrote them for releases 0.4 to 0.7."""

from collections.abc import Mapping
from typing import Any

from torchtune.data._common import CROSS_ENTROPY_IGNORE_IDX
from torchtune.data._messages import InputOutputToMessages, Message, validate_messages
from torchtune.data._prompt_templates import _get_prompt_template, _TemplateType
from torchtune.datasets._packed import PackedDataset
from torchtune.datasets._sft import SFTDataset
from torchtune.modules.tokenizers import ModelTokenizer
from torchtune.modules.transforms import Transform


class QuestionsToMessages(Transform):
    """Rows of a question and an answer."""

    def __init__(self, template: _TemplateType | None = None) -> None:
        self.template = None if template is None else _get_prompt_template(template)

    def __call__(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        """Convert a row."""
        messages = [
            Message(role="user", content=sample["question"], masked=True),
            Message(role="assistant", content=sample["answer"]),
        ]
        validate_messages(messages)
        return {"messages": messages if self.template is None else self.template(messages)}


def questions_dataset(
    tokenizer: ModelTokenizer,
    *,
    source: str,
    template: _TemplateType | None = None,
    packed: bool = False,
    **load_dataset_kwargs: Any,
) -> SFTDataset | PackedDataset:
    """Build the dataset."""
    ds = SFTDataset(
        source=source,
        message_transform=QuestionsToMessages(template),
        model_transform=tokenizer,
        **load_dataset_kwargs,
    )
    assert ds[0]["labels"][0] == CROSS_ENTROPY_IGNORE_IDX
    assert len(InputOutputToMessages()({"input": "a", "output": "b"})["messages"]) == 2
    return PackedDataset(ds, max_seq_len=tokenizer.max_seq_len) if packed else ds
