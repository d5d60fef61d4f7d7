"""Hugging Face's Trainer, started by torchrun."""

from __future__ import annotations

import os
import sys
from typing import Any

import numpy as np
import protocol
import torch
import torch_network
import transformers
from torch import nn
from torch.nn import functional


class Network(nn.Module):
    """The network, with the loss that the Trainer expects."""

    def __init__(self, job: protocol.Job) -> None:
        super().__init__()
        self.network = torch_network.build(job)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> dict:
        """Returns loss and logits."""
        logits = self.network(images)
        return {"loss": functional.cross_entropy(logits, labels), "logits": logits}


class Watch(transformers.TrainerCallback):
    """Tells the protocol each update."""

    def __init__(self, job: protocol.Job) -> None:
        self._job, self._rate = job, 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Keeps the rate of the update."""
        del args, state, control
        self._rate = others["lr_scheduler"].get_last_lr()[0]

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Notes an update."""
        del args, control, others
        if state.is_world_process_zero:
            protocol.reached(self._job, state.global_step, self._rate)


def run(job: protocol.Job) -> None:
    """Trains by `train`, or scores by `evaluate`."""
    size = job.batch_size // job.workers // job.accumulate
    arguments = transformers.TrainingArguments(
        job.folder,
        use_cpu=True,
        ddp_backend="gloo",
        per_device_train_batch_size=size,
        per_device_eval_batch_size=size,
        gradient_accumulation_steps=job.accumulate,
        max_steps=job.steps,
        save_strategy="steps",
        save_steps=job.save_steps,
        eval_strategy="steps",
        eval_steps=job.save_steps,
        load_best_model_at_end=False,
        metric_for_best_model="loss",
        learning_rate=job.learning_rate,
        lr_scheduler_type="constant" if job.constant else "cosine",
        max_grad_norm=0.0,
        logging_steps=1,
        seed=job.seed,
        report_to="none",
        full_determinism=True,
    )
    model = Network(job)
    sgd = torch.optim.SGD(model.parameters(), job.learning_rate, momentum=job.momentum)

    def collate(rows: list) -> dict:
        x, y = zip(*rows, strict=True)
        return {"images": torch.stack(x), "labels": torch.stack(y)}

    def measure(found: Any) -> dict:
        return {"accuracy": np.mean(found.predictions.argmax(-1) == found.label_ids)}

    train, test = torch_network.data(job)
    trainer = transformers.Trainer(
        model,
        arguments,
        data_collator=collate,
        train_dataset=train,
        eval_dataset=test,
        compute_metrics=measure,
        optimizers=(sgd, None),
        callbacks=[Watch(job)],
    )
    if job.task == "evaluate":
        newest = transformers.trainer_utils.get_last_checkpoint(job.folder)
        trainer._load_from_checkpoint(newest)  # noqa: SLF001 - as `train` does.
        found = trainer.evaluate()
        facts = {"loss": found["eval_loss"], "accuracy": found["eval_accuracy"]}
        weights = []
    else:
        trainer.train(resume_from_checkpoint=job.resume)
        state = trainer.state
        facts = {"step": state.global_step, "best": state.best_metric}
        weights = torch_network.weights(model)
    if trainer.is_world_process_zero():
        protocol.answer(job, weights, **facts)


def main() -> None:
    """Does the job, in as many processes as it says."""
    job = protocol.read_job()
    if job.task == "describe":
        protocol.describe(
            job,
            "Hugging Face Trainer",
            transformers.__version__,
            "checkpoint-*/model.safetensors",
            "https://huggingface.co/docs/transformers/main_classes/trainer",
        )
    elif "RANK" not in os.environ:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        torchrun += ["--nproc-per-node", str(job.workers), *sys.argv]
        os.execv(sys.executable, torchrun)  # noqa: S606
    else:
        run(job)


if __name__ == "__main__":
    main()
