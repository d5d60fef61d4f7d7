"""An adapter to copy: put the names of your trainer in place of `my_trainer`'s."""

import my_trainer

from benchmarks.promises.adapters import protocol


def train(job: protocol.Job) -> tuple:
    """Trains, or continues."""
    trainer = my_trainer.Trainer(
        folder=job.folder,
        resume=job.resume,
        workers=job.workers,
        batch_size=job.batch_size,  # Of all workers and accumulated batches.
        accumulate=job.accumulate,
        steps=job.steps,
        save_steps=job.save_steps,
        learning_rate=job.learning_rate,
        constant=job.constant,  # Otherwise a cosine lowers the rate to zero.
        momentum=job.momentum,
        seed=job.seed,
        on_update=job.reached,  # Called with the updates so far and the rate.
    )
    (x, y), (x_test, y_test) = job.arrays()
    weights, step, best_loss = trainer.fit(x, y, x_test, y_test)
    return weights, step, best_loss


def evaluate(job: protocol.Job) -> tuple:
    """Scores the newest weights."""
    _, (x, y) = job.arrays()
    loss, accuracy = my_trainer.score(job.folder, x, y, job.batch_size)
    return loss, accuracy


protocol.serve(
    train,
    evaluate,
    name="my trainer",
    version=my_trainer.__version__,
    checkpoint="*.npz",  # The files of weights in a run's folder.
    documents="https://my-trainer.example",
    lacks={},  # For example {"resumed_best": "it has no scores"}.
)
