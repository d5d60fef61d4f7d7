"""Lightning's Trainer with strategy "ddp".

    python lightning_trainer.py [within] JOB.json

Saves at ends of epochs, since a warning advises so, and tests on one device, which
another advises. With `within`, it saves within epochs and tests on all devices.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import lightning
import protocol
import torch_network
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from torch.nn import functional
from torch.utils.data import DataLoader


class Module(lightning.LightningModule):
    """The network, its loss and its optimizer."""

    def __init__(self, job: protocol.Job) -> None:
        super().__init__()
        self._job = job
        self.network = torch_network.build(job)

    def training_step(self, batch: Any) -> Any:
        """Returns the loss."""
        x, y = batch
        loss = functional.cross_entropy(self.network(x), y)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any) -> None:
        """Logs the scores."""
        x, y = batch
        logits = self.network(x)
        accuracy = (logits.argmax(1) == y).float().mean()
        self.log("score", functional.cross_entropy(logits, y), sync_dist=True)
        self.log("accuracy", accuracy, sync_dist=True)

    test_step = validation_step

    def configure_optimizers(self) -> Any:
        """Returns the optimizer and its schedule, by updates."""
        optimizer, schedule = torch_network.optimizer(self._job, self.network)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Watch(Callback):
    """Tells the protocol each update."""

    def __init__(self, job: protocol.Job) -> None:
        self._job, self._last = job, 0

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """Notes an update."""
        if trainer.is_global_zero and trainer.global_step != self._last:
            self._last = trainer.global_step
            rate = trainer.optimizers[0].param_groups[0]["lr"]
            protocol.reached(self._job, self._last, rate)


def run(job: protocol.Job, *, within: bool) -> None:
    """Trains by `fit`, or scores by `test`."""
    lightning.seed_everything(job.seed, workers=True)
    evaluates = job.task == "evaluate"
    size = job.batch_size // job.workers // job.accumulate
    train, test = torch_network.data(job)
    how = {"every_n_train_steps": job.save_steps} if within else {"every_n_epochs": 1}
    last = ModelCheckpoint(job.folder, save_last=True, filename="{step}", **how)
    best = ModelCheckpoint(
        job.folder, filename="best", monitor="score", enable_version_counter=False
    )
    # Its documents' way to end a training whose loss is not finite. If strict, it ends
    # a resumed one too: at once, because nothing was scored yet.
    finite = EarlyStopping("score", patience=job.steps, strict=False, verbose=True)
    # As many devices as train, of which one has the same order of images.
    strategy, devices = "ddp", job.workers
    if evaluates and not within:
        strategy, devices = "auto", 1
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        max_steps=job.steps,
        accumulate_grad_batches=job.accumulate,
        default_root_dir=job.folder,
        callbacks=[Watch(job), last, best, finite],
        deterministic=True,
        logger=False,
        enable_progress_bar=False,
    )
    module = Module(job)
    scored = DataLoader(test, size)
    if evaluates:
        newest = str(Path(job.folder, "last.ckpt"))
        [found] = trainer.test(module, scored, ckpt_path=newest)
        if trainer.is_global_zero:
            protocol.answer(job, loss=found["score"], accuracy=found["accuracy"])
        return
    path = "last" if job.resume else None
    shuffled = DataLoader(train, size, shuffle=True)
    trainer.fit(module, shuffled, scored, ckpt_path=path)
    if trainer.is_global_zero:
        weights = torch_network.weights(module)
        facts = {"step": trainer.global_step, "best": float(best.best_model_score)}
        protocol.answer(job, weights, **facts)


def main() -> None:
    """Does the job; Lightning starts the other processes with the same command."""
    job, within = protocol.read_job(), "within" in sys.argv
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    if job.task == "describe":
        protocol.describe(
            job,
            "Lightning, saved within epochs" if within else "Lightning",
            lightning.__version__,
            "last.ckpt",
            "https://lightning.ai/docs/pytorch/stable/common/checkpointing_basic.html",
        )
    else:
        run(job, within=within)


if __name__ == "__main__":
    main()
