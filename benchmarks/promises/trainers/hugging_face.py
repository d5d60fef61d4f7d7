"""Hugging Face's Trainer, started by torchrun."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import transformers
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset


class _Network(nn.Module):
    """A network with the loss that the Trainer expects."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> dict:
        logits = self.network(images)
        return {"loss": functional.cross_entropy(logits, labels), "logits": logits}


def _measure(found: Any) -> dict:
    return {"accuracy": np.mean(found.predictions.argmax(-1) == found.label_ids)}


def build(
    network: nn.Module,
    optimizer: torch.optim.Optimizer,
    trained: Dataset,
    scored: Dataset,
    folder: str,
    *,
    save_steps: int,
    batch_size: int,
    on_update: Callable[[int, float], None],
    **settings: Any,
) -> transformers.Trainer:
    """Returns the Trainer, which saves and scores every `save_steps` updates."""

    class Updates(transformers.TrainerCallback):
        def on_optimizer_step(self, _: Any, state: Any, *__: Any, **of: Any) -> None:
            # It is not yet counted.
            on_update(state.global_step + 1, of["lr_scheduler"].get_last_lr()[0])

    arguments = transformers.TrainingArguments(
        folder,
        use_cpu=True,
        ddp_backend="gloo",
        per_device_train_batch_size=batch_size,
        per_device_eval_batch_size=batch_size,
        save_steps=save_steps,
        eval_strategy="steps",
        eval_steps=save_steps,
        metric_for_best_model="loss",
        max_grad_norm=0.0,
        logging_steps=1,
        report_to="none",
        full_determinism=True,
        **settings,
    )
    return transformers.Trainer(
        _Network(network),
        arguments,
        train_dataset=[{"images": x, "labels": y} for x, y in trained],
        eval_dataset=[{"images": x, "labels": y} for x, y in scored],
        compute_metrics=_measure,
        optimizers=(optimizer, None),
        callbacks=[Updates()],
    )


def evaluate(trainer: transformers.Trainer) -> tuple[float, float]:
    """Returns the loss and the accuracy of the newest weights."""
    newest = transformers.trainer_utils.get_last_checkpoint(trainer.args.output_dir)
    trainer._load_from_checkpoint(newest)  # noqa: SLF001 - as `train` does.
    found = trainer.evaluate()
    return found["eval_loss"], found["eval_accuracy"]
