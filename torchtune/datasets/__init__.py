"""Datasets for fine-tuning: named Hub datasets, local files, packing, mixtures and streams.

The way of a row from its file to the model, in the order of reading:

1. ``_from_config``: ``instantiate_dataset`` builds the datasets that a config names.
2. ``_sft``: ``SFTDataset`` joins the parts of a dataset of conversations, in the order of the steps 3 to 8.
3. ``_row_source``: ``RowSource`` knows where the rows come from, and loads them when step 4 asks for them.
   ``_data_files`` finds local files and their rows; its ``decoded_rows`` yields the columns of each row, which
   ``_file_formats`` decodes.
4. ``_tokenized``: ``prepare_rows`` opens the entry of the rows in the cache (``_row_cache``), whose key is their
   ``_fingerprint``. If the cache does not have them, ``RowTokenizer.tokenize_part`` converts all rows, in several
   processes (``_processes``), by the steps 5 to 7.
5. ``torchtune.data._to_messages``: the row becomes messages. ``mask_messages`` in ``torchtune.data._messages`` sets
   their masks, which say what is trained on.
6. ``torchtune.tokenizers._hf_tokenizer``: the messages become tokens and a mask, by the checkpoint's template.
   ``_trained_spans`` finds which parts of the text are trained on, and ``_masked_encoding`` encodes text and mask.
7. ``_sft``: ``SFTTransform`` has both steps, and turns tokens and mask into labels and their weights.
8. ``_token_store``: the tokens and labels of all rows are in files, from which
   ``TokenizedDataset`` (``_tokenized``) reads a row.
9. ``torchtune.data._loader``: ``BatchLoader`` reads the rows of a step, and ``torchtune.data._collate`` joins them to a
   ``torchtune.data._batch.Batch``.
10. ``torchtune.supervision._run_control``: ``RunControl.steps`` yields the batches of a step with the counts of all
    ranks. One of them, ``num_terms``, is the divisor of the loss: ``RunControl.synchronize`` of the step before has
    loaded the next step and added up the counts of all ranks.
11. ``torchtune.modules.loss``: the recipe computes the loss of each batch, as a sum that it divides by ``num_terms``.
"""

from torchtune._lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
