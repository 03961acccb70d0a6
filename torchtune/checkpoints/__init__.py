"""Checkpoints: loading, saving and resuming models as streams of named tensors.

One word per thing, in this package and its messages:

- **weight**: a full tensor of a model, under this library's name. **Parameter**: an ``nn.Parameter`` of a module. Most
  weights are one parameter; a conversion may store a weight in others (``StoredWeight``), which are its storage.
- **base weights** and **owned parameters**: the weights of the model without conversions, and the parameters that a
  conversion adds and saves apart from them, such as an adapter.
- **external tensor**, **external name**: a tensor in a file of another format, and its name there.
- **group**: the weights and external tensors that are converted together (:class:`torchtune.models.Group`).
  **TensorGroup**: the external tensors of a group, to write. **Op**: the conversion between the tensors of a group.
- **spec**: a full tensor on the meta device, for its shape and dtype. (A ``ModelSpec`` is that of a family.)
- **slice**: one range per dimension of a full tensor. **Shard**: the slice of one rank, with its values.
  **ExternalSlice**: the slice of an external tensor that holds part of a slice of a weight. **TensorSlice**: a slice of
  an external tensor with its values, to write.
- **weight files**: tensors in files, opened for reading; ``read`` returns a tensor or a slice of it. **Reader**: reads
  a slice of one weight from its files into a tensor. **Shard file**: one of several files that hold a model.
- **tensor file**: a safetensors file to write; a **writer** is the rank that writes it.
- **source**: where one model of a run comes from: a folder, its weight files and its adapter; it **loads** a model.
- **store**: the sources of all models of a run, by name, and the folder of its checkpoints. A **checkpointer** is a
  store of one model, with the arguments of configs.
- **checkpoint**: a folder ``epoch_N`` or ``step_N``, **complete** if it has the marker. **State**: optimizers,
  schedules, positions and random number generators, which a resume needs besides the weights. **Export**: the files of
  one model in a checkpoint, as other libraries load them.

The way of a weight from its file into a model, in the order of the calls:

1. ``_checkpointers``: the checkpointer of a config is a ``CheckpointStore`` with other arguments.
2. ``_checkpoint_store``: ``CheckpointStore.load_model``, on all ranks.
3. ``_load``: ``ModelSource.load`` opens the files; ``load_base`` lists the weights in them, and ``load_weight`` loads
   each in the three steps 6, 8 and 9.
4. ``_weight_files``: ``open_weight_files`` finds the format.
5. ``torchtune.models._weight_map``: ``WeightMap.select`` returns the groups of the tensors in the files.
6. ``_model_weights``: ``ModelWeights.allocate`` returns the slice of this rank, and the tensor to read it into, which
   for most weights is the shard of a parameter.
7. ``torchtune.training.parallel._shards``: ``my_shard`` is the one place that asks a DTensor for its slice.
8. ``_load`` again: ``WeightReader.read`` fills the tensor, by ``Group.read``, from the slices of external tensors
   that ``WeightFiles.read`` reads.
9. ``_model_weights`` again: ``ModelWeights.store_converted``, only for weights that are stored in another form.

And back into a file:

1. ``_checkpoint_store``: ``CheckpointStore.save`` describes all files before it writes any.
2. ``_export``: ``export_model`` distributes groups among files, as ``WeightGroup`` objects without values.
3. ``_save``: ``Saver.save`` goes through the groups: for each, it calls ``WeightGroup.compute_slices``, which computes
   from the shard of this rank (``SaveView.shard``) the slices of external tensors that it contributes, and sends them
   to the rank that writes the file (``FileWriter.write``).
4. ``_directories``: ``new_directory`` gives the folder its name and its marker when all files are complete.

Beside this way: ``_adapter`` and ``_adapter_settings`` (PEFT's layout), ``_small_files`` (config, tokenizer),
``_gguf`` and ``_quantize`` (other formats), ``_state`` and ``_resume`` (training state, resume),
``_bucket`` (object stores), ``_full_state_dicts`` (interface of copied recipes).
"""

from torchtune._lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
