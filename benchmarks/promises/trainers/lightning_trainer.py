"""Lightning's Trainer with strategy "ddp".

Warnings advise to save at ends of epochs, as without `save_steps`, and to test on one
device.
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
from lightning.pytorch import callbacks
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset


class Module(lightning.LightningModule):
    """The network, its loss and its optimizer, whose schedule is by updates."""

    def __init__(self, network: nn.Module, *optimizer: Any) -> None:
        super().__init__()
        self.network = network
        self._optimizer = optimizer

    def training_step(self, batch: Any) -> Any:
        """Returns the loss."""
        x, y = batch
        return functional.cross_entropy(self.network(x), y)

    def validation_step(self, batch: Any) -> None:
        """Logs the scores."""
        x, y = batch
        logits = self.network(x)
        accuracy = (logits.argmax(1) == y).float().mean()
        self.log("score", functional.cross_entropy(logits, y), sync_dist=True)
        self.log("accuracy", accuracy, sync_dist=True)

    test_step = validation_step

    def configure_optimizers(self) -> Any:
        """Returns the optimizer and its schedule."""
        optimizer, schedule = self._optimizer
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def train(
    module: Module,
    trained: Dataset,
    scored: Dataset,
    folder: str,
    *,
    resume: bool,
    save_steps: int | None,
    on_update: Callable[[int, float], None],
    batch_size: int,
    **settings: Any,
) -> tuple[int, float]:
    """Trains; returns the updates and the best score."""

    def tell(trainer: Any, *_: Any) -> None:
        on_update(trainer.global_step, trainer.optimizers[0].param_groups[0]["lr"])

    save = functools.partial(callbacks.ModelCheckpoint, folder)
    last = save(save_last=True, filename="{step}", every_n_train_steps=save_steps)
    best = save(filename="best", monitor="score", enable_version_counter=False)
    # Its documents' way to end a run whose loss is not finite. If strict, it ends
    # a resumed one too: at once, because nothing was scored yet.
    finite = callbacks.EarlyStopping(
        "score", patience=settings["max_steps"], strict=False, verbose=True
    )
    told = callbacks.LambdaCallback(on_train_batch_end=tell)
    trainer = lightning.Trainer(
        accelerator="cpu",
        strategy="ddp",
        default_root_dir=folder,
        callbacks=[told, last, best, finite],
        deterministic=True,
        logger=False,
        enable_progress_bar=False,
        **settings,
    )
    batches = DataLoader(trained, batch_size, shuffle=True)
    path = "last" if resume else None
    trainer.fit(module, batches, DataLoader(scored, batch_size), ckpt_path=path)
    return trainer.global_step, best.best_model_score


def evaluate(
    module: Module, scored: Dataset, folder: str, batch_size: int, devices: int
) -> tuple[float, float]:
    """Returns loss and accuracy of the newest weights."""
    trainer = lightning.Trainer(
        accelerator="cpu", devices=devices, logger=False, enable_progress_bar=False
    )
    newest = str(Path(folder, "last.ckpt"))
    [found] = trainer.test(module, DataLoader(scored, batch_size), ckpt_path=newest)
    return found["score"], found["accuracy"]
