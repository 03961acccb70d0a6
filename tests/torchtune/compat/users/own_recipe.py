"""A recipe as people wrote them for releases 0.2 to 0.6, with a config that is read as it goes."""

import sys
from functools import partial

import torch
from omegaconf import DictConfig
from torch.utils.data import DataLoader

from torchtune import config, modules, training, utils
from torchtune.data._collate import padded_collate_sft
from torchtune.modules.peft.peft_utils import get_adapter_params, set_trainable_params
from torchtune.recipe_interfaces import FTRecipeInterface
from torchtune.training.checkpointing._utils import ModelType, get_path, safe_torch_load

log = utils.get_logger("DEBUG")


class OwnRecipe(FTRecipeInterface):
    """LoRA on one device."""

    def __init__(self, cfg: DictConfig) -> None:
        self._device = utils.get_device(device=cfg.device)
        self._dtype = utils.get_dtype(cfg.dtype, device=self._device)
        self.seed = utils.set_seed(seed=cfg.seed)
        self._output_dir = cfg.output_dir
        self.max_steps_per_epoch = cfg.max_steps_per_epoch
        self.losses: list[float] = []

    def load_checkpoint(self, cfg_checkpointer: DictConfig) -> dict:
        """Read the weights."""
        self._checkpointer = config.instantiate(cfg_checkpointer)
        return self._checkpointer.load_checkpoint()

    def setup(self, cfg: DictConfig) -> None:
        """Build everything."""
        self._metric_logger = config.instantiate(cfg.metric_logger)
        self._metric_logger.log_config(cfg)
        checkpoint = self.load_checkpoint(cfg.checkpointer)
        with utils.set_default_dtype(self._dtype), self._device:
            self._model = config.instantiate(cfg.model)
        set_trainable_params(self._model, get_adapter_params(self._model))
        utils.set_activation_checkpointing(self._model, auto_wrap_policy={modules.TransformerDecoderLayer})
        self._model.load_state_dict(checkpoint[utils.MODEL_KEY], strict=False)
        utils.validate_expected_param_dtype(self._model.named_parameters(), dtype=self._dtype)
        tokenizer = config.instantiate(cfg.tokenizer)
        self._loss_fn = config.instantiate(cfg.loss)
        self._optimizer = config.instantiate(cfg.optimizer, self._model.parameters())
        self._lr_scheduler = config.instantiate(
            cfg.lr_scheduler, self._optimizer, num_training_steps=self.max_steps_per_epoch, last_epoch=-1
        )
        dataset = config.instantiate(cfg.dataset, tokenizer=tokenizer)
        collate = partial(padded_collate_sft, padding_idx=tokenizer.pad_id, ignore_idx=self._loss_fn.ignore_index)
        self._dataloader = DataLoader(dataset, batch_size=cfg.batch_size, collate_fn=collate)

    def train(self) -> None:
        """Take the steps of one epoch."""
        for idx, batch in enumerate(self._dataloader):
            if idx == self.max_steps_per_epoch:
                break
            labels = batch.pop("labels")
            logits = self._model(batch["tokens"])
            loss = self._loss_fn(logits.reshape(-1, logits.size(-1)), labels.reshape(-1))
            loss.backward()
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)
            self._lr_scheduler.step()
            self.losses.append(loss.item())
            self._metric_logger.log_dict({"loss": loss.item()}, step=idx)

    def save_checkpoint(self, epoch: int) -> None:
        """Keep the adapter."""
        torch.save(get_adapter_params(self._model), f"{self._output_dir}/adapter_{epoch}.pt")

    def cleanup(self) -> None:
        """Close the log."""
        self._metric_logger.close()


@config.parse
def recipe_main(cfg: DictConfig) -> None:
    """Run the recipe."""
    config.log_config(recipe_name="OwnRecipe", cfg=cfg)
    recipe = OwnRecipe(cfg)
    recipe.setup(cfg=cfg)
    recipe.train()
    recipe.save_checkpoint(epoch=0)
    recipe.cleanup()
    assert len(recipe.losses) == cfg.max_steps_per_epoch
    assert ModelType.LLAMA3.value == "llama3"
    assert safe_torch_load(get_path(cfg.output_dir, "adapter_0.pt"))
    assert training.MODEL_KEY == utils.MODEL_KEY


if __name__ == "__main__":
    sys.exit(recipe_main())
