"""Datasets for fine-tuning: named Hub datasets, local files, packing, mixtures and streams.

The way of a row from its file to the model, in the order of reading:

1. ``_from_config``: ``setup_data`` builds the datasets that a config names.
2. ``_sft``: ``SFTDataset`` joins the parts of a dataset of conversations; ``SFTTransform`` converts one row.
3. ``_row_source``: ``RowSource`` knows where the rows come from; ``_data_files`` finds local files and their rows, and
   ``_file_formats`` decodes a row.
4. ``_tokenized``: ``prepare_rows`` takes token rows from the cache (``_row_cache``) or tokenizes all rows in several
   processes (``_processes``).
5. ``torchtune.data._to_messages``: the row becomes messages; their masks say what is trained on.
6. ``torchtune.tokenizers._hf_tokenizer``: the messages become tokens and a mask, by the checkpoint's template.
7. ``_tokenized``: ``shifted_labels`` turns tokens and mask into labels; ``_token_store`` keeps both.
8. ``torchtune.data._loader``: ``BatchLoader`` reads the rows of a step, and ``torchtune.data._collate`` joins them to a
   ``torchtune.data._batch.Batch``, from which the recipe computes the loss (``torchtune.modules.loss``).
"""

from torchtune._lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
