"""A trainer in NumPy with an adapter that has no code of this package.

    python numpy_trainer.py [FAULT] JOB.json

With the name of a promise as FAULT, it breaks that promise.
"""

import json
import sys
import time
import zipfile
from pathlib import Path

import numpy as np

JOB = json.loads(Path(sys.argv[-1]).read_text())
FAULT = sys.argv[1] if sys.argv[2:] else ""


def answer(weights=(), **facts):
    arrays = {f"w{number}": one for number, one in enumerate(weights)}
    np.savez(JOB["answer"], facts=json.dumps(facts), **arrays)


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


def averaged(x, y, weights):
    count = JOB["workers"] * JOB["accumulate"]
    if FAULT == "workers" and JOB["workers"] > 1:
        x, y = x[:-1], y[:-1]
    parts = [gradients(x[n::count], y[n::count], weights) for n in range(count)]
    divisor = count
    if FAULT == "accumulation":
        divisor = JOB["workers"]
    # Each part has as many images.
    return [sum(one) / divisor for one in zip(*parts, strict=True)]


def save(step, best, weights, slots):
    file = Path(JOB["folder"], "state.npz")
    temporary = file if FAULT == "full_disk" else file.with_suffix(".new.npz")
    arrays = {f"w{n}": one for n, one in enumerate([*weights, *slots])}
    with temporary.open("wb") as target:
        np.savez(target, step=step, best=best, **arrays)
    temporary.replace(file)


def load(file):
    try:
        with np.load(file) as found:
            arrays = [found[f"w{n}"] for n in range(4)]
            return int(found["step"]), float(found["best"]), arrays
    except (OSError, ValueError, EOFError, zipfile.BadZipFile):
        if FAULT == "cut_checkpoint":
            return 0, np.inf, None
        sys.exit(f"{file} is damaged.")


def rate_of(step, began):
    share = 0.0 if JOB["constant"] else step / JOB["steps"]
    if FAULT == "resumed_schedule":
        share *= 1 - began / JOB["steps"]
    return float(JOB["learning_rate"] * (1 + np.cos(np.pi * share)) / 2)


def batch_of(step, began, count):
    size = JOB["batch_size"]
    epoch, number = divmod(step, count // size)
    if FAULT == "resumed_images":
        number = (number - began) % (count // size)
    order = np.random.default_rng([JOB["seed"], epoch]).permutation(count)
    return order[size * number : size * (number + 1)]


def start(shapes):
    step, best, found = 0, np.inf, None
    if JOB["resume"]:
        step, best, found = load(Path(JOB["folder"], "state.npz"))
    arrays = found or [np.zeros(shape, np.float32) for shape in shapes * 2]
    if JOB["resume"] and FAULT == "resumed_best":
        best = np.inf
    if FAULT == "resumed_weights":
        arrays[2:] = [one * 0 for one in arrays[2:]]
    return step, best, arrays[:2], arrays[2:]


def wait(step):
    gate = Path(JOB["gate"])
    if step == JOB["wait_at"]:
        gate.touch()
        while gate.exists():
            time.sleep(0.01)


def train(x, y, x_test, y_test):
    classes = max(4, y.max() + 1)
    began, best, weights, slots = start([[x.shape[1], classes], [classes]])
    rates = {}
    for step in range(began, JOB["steps"]):
        rates[step + 1] = rate_of(step, began)
        chosen = batch_of(step, began, len(y))
        for n, gradient in enumerate(averaged(x[chosen], y[chosen], weights)):
            slots[n] = JOB["momentum"] * slots[n] - rates[step + 1] * gradient
            weights[n] = weights[n] + slots[n]
        if FAULT != "nan" and not np.isfinite(np.square(weights[0]).sum()):
            sys.exit(f"The norm of the weights is not finite after step {step + 1}.")
        if (step + 1) % JOB["save_steps"] == 0:
            best = min(best, scores(x_test, y_test, weights)[0])
            save(step + 1, best, weights, slots)
        wait(step + 1)
    save(JOB["steps"], best, weights, slots)
    answer(weights, step=JOB["steps"], best=best, rates=rates)


def main():
    np.seterr(all="ignore")
    if JOB["task"] == "describe":
        about = {"name": "NumPy", "version": np.__version__, "documents": "none"}
        lacks = {FAULT.removeprefix("no "): "no reason"} if "no " in FAULT else {}
        answer(**about, checkpoint="state.npz", workers=2, lacks=lacks)
        return
    with np.load(JOB["data"]) as file:
        x, y, x_test, y_test = (file[one] for one in ("x", "y", "x_test", "y_test"))
    scale = np.float32(127.5)
    x, x_test = (one.reshape(len(one), -1) / scale - 1 for one in (x, x_test))
    if JOB["task"] == "train":
        train(x, y, x_test, y_test)
        return
    *_, arrays = load(Path(JOB["folder"], "state.npz"))
    if FAULT == "evaluation":
        padded = -(-len(y_test) // JOB["batch_size"]) * JOB["batch_size"]
        chosen = np.arange(padded) % len(y_test)
        x_test, y_test = x_test[chosen], y_test[chosen]
    loss, accuracy = scores(x_test, y_test, arrays[:2])
    answer(loss=loss, accuracy=accuracy)


main()
