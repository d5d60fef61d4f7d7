"""A trainer in NumPy and, as a program, an adapter that has no code of this package.

    python numpy_trainer.py [FAULT] JOB.json

With the name of a promise as FAULT, it breaks that promise.
"""

import dataclasses
import json
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

__version__ = np.__version__
STATE = "state.npz"


def softmax(x, kernel, bias):
    logits = x @ kernel + bias
    powers = np.exp(logits - logits.max(1, keepdims=True))
    return powers / powers.sum(1, keepdims=True)


def scores(x, y, weights):
    found = softmax(x, *weights)
    loss = -np.log(found[np.arange(len(y)), y] + 1e-30).mean()
    return float(loss), float((found.argmax(1) == y).mean())


def gradients(x, y, weights):
    error = softmax(x, *weights)
    error[np.arange(len(y)), y] -= 1
    return [x.T @ error / len(y), error.mean(0)]


def scaled(x):
    return x.reshape(len(x), -1) / np.float32(127.5) - 1


def load(folder, fault=""):
    file = Path(folder, STATE)
    try:
        with np.load(file) as found:
            arrays = [found[f"w{n}"] for n in range(4)]
            return int(found["step"]), float(found["best"]), arrays
    except (OSError, ValueError, EOFError, zipfile.BadZipFile):
        if fault == "cut_checkpoint":
            return 0, np.inf, None
        sys.exit(f"{file} is damaged.")


@dataclasses.dataclass
class Trainer:
    folder: str
    resume: bool
    workers: int
    batch_size: int
    accumulate: int
    steps: int
    save_steps: int
    learning_rate: float
    momentum: float
    constant: bool
    seed: int
    on_update: Callable
    fault: str = ""

    def fit(self, x, y, x_test, y_test):
        """Returns the weights, the last update and the best loss."""
        np.seterr(all="ignore")
        x, x_test = scaled(x), scaled(x_test)
        classes = max(4, y.max() + 1)
        began, best, weights, slots = self._start([[x.shape[1], classes], [classes]])
        for step in range(began, self.steps):
            rate = self._rate_of(step, began)
            chosen = self._batch_of(step, began, len(y))
            for n, gradient in enumerate(self._averaged(x[chosen], y[chosen], weights)):
                slots[n] = self.momentum * slots[n] - rate * gradient
                weights[n] = weights[n] + slots[n]
            finite = np.isfinite(np.square(weights[0]).sum())
            if self.fault != "nan" and not finite:
                sys.exit(
                    f"The norm of the weights is not finite after step {step + 1}."
                )
            if (step + 1) % self.save_steps == 0:
                best = min(best, scores(x_test, y_test, weights)[0])
                self._save(step + 1, best, weights, slots)
            self.on_update(step + 1, rate)
        self._save(self.steps, best, weights, slots)
        return weights, self.steps, best

    def _start(self, shapes):
        step, best, found = 0, np.inf, None
        if self.resume:
            step, best, found = load(self.folder, self.fault)
        arrays = found or [np.zeros(shape, np.float32) for shape in shapes * 2]
        if self.resume and self.fault == "resumed_best":
            best = np.inf
        if self.fault == "resumed_weights":
            arrays[2:] = [one * 0 for one in arrays[2:]]
        return step, best, arrays[:2], arrays[2:]

    def _rate_of(self, step, began):
        share = 0.0 if self.constant else step / self.steps
        if self.fault == "resumed_schedule":
            share *= 1 - began / self.steps
        return float(self.learning_rate * (1 + np.cos(np.pi * share)) / 2)

    def _batch_of(self, step, began, count):
        size = self.batch_size
        epoch, number = divmod(step, count // size)
        if self.fault == "resumed_images":
            number = (number - began) % (count // size)
        order = np.random.default_rng([self.seed, epoch]).permutation(count)
        return order[size * number : size * (number + 1)]

    def _averaged(self, x, y, weights):
        count = self.workers * self.accumulate
        if self.fault == "workers" and self.workers > 1:
            x, y = x[:-1], y[:-1]
        parts = [gradients(x[n::count], y[n::count], weights) for n in range(count)]
        divisor = count
        if self.fault == "accumulation":
            divisor = self.workers
        # Each part has as many images.
        return [sum(one) / divisor for one in zip(*parts, strict=True)]

    def _save(self, step, best, weights, slots):
        file = Path(self.folder, STATE)
        temporary = file if self.fault == "full_disk" else file.with_suffix(".new.npz")
        arrays = {f"w{n}": one for n, one in enumerate([*weights, *slots])}
        with temporary.open("wb") as target:
            np.savez(target, step=step, best=best, **arrays)
        temporary.replace(file)


def score(folder, x, y, batch_size, fault=""):
    """Returns the loss and the accuracy of the newest weights."""
    *_, arrays = load(folder)
    if fault == "evaluation":
        padded = -(-len(y) // batch_size) * batch_size
        chosen = np.arange(padded) % len(y)
        x, y = x[chosen], y[chosen]
    return scores(scaled(x), y, arrays[:2])


def main():
    job = json.loads(Path(sys.argv[-1]).read_text())
    fault = sys.argv[1] if sys.argv[2:] else ""

    def answer(weights=(), **facts):
        arrays = {f"w{number}": one for number, one in enumerate(weights)}
        np.savez(job["answer"], facts=json.dumps(facts), **arrays)

    if job["task"] == "describe":
        about = {"name": "NumPy", "version": __version__, "documents": "none"}
        lacks = {fault.removeprefix("no "): "no reason"} if "no " in fault else {}
        answer(**about, checkpoint=STATE, workers=2, lacks=lacks)
        return
    with np.load(job["data"]) as file:
        x, y, x_test, y_test = (file[one] for one in ("x", "y", "x_test", "y_test"))
    if job["task"] == "evaluate":
        loss, accuracy = score(job["folder"], x_test, y_test, job["batch_size"], fault)
        answer(loss=loss, accuracy=accuracy)
        return
    rates, gate = {}, Path(job["gate"])

    def on_update(step, rate):
        rates[step] = rate
        if step == job["wait_at"]:
            gate.touch()
            while gate.exists():
                time.sleep(0.01)

    names = {field.name for field in dataclasses.fields(Trainer)} & {*job}
    given = {name: job[name] for name in names}
    trainer = Trainer(**given, on_update=on_update, fault=fault)
    weights, step, best = trainer.fit(x, y, x_test, y_test)
    answer(weights, step=step, best=best, rates=rates)


if __name__ == "__main__":
    main()
