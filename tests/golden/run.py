"""Compares what fixed trainings compute with what they did when it was last written.

    python tests/golden/run.py [NAMES]           compares; ends with 1 if any differs
    python tests/golden/run.py --write [NAMES]   writes tests/golden/NAME.txt anew

The trainings of `trainings.toml` compute in float64, without oneDNN, on two threads.
How Eigen cuts a product into blocks depends on the processor's caches, so last digits
may differ between processors; a training's bound, `close`, is above that. A line of a
file is a step; the last ones score the model and add up, with unequal weights, what
each part of the checkpoint holds: variables, averages, optimizer. A commit that only
moves or shortens code leaves all files as they are; one that changes what is computed
says why.
"""

import json
import multiprocessing
import os
import sys
import tempfile
import tomllib
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
_ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "-1",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "TF_ENABLE_ONEDNN_OPTS": "0",
    # The order in which numbers are added may depend on how many threads do it.
    "TF_NUM_INTRAOP_THREADS": "2",
    "TF_NUM_INTEROP_THREADS": "2",
    # XLA compiles for the processor; every one that TensorFlow runs on has AVX.
    "XLA_FLAGS": "--xla_cpu_max_isa=AVX",
}
_PROCESSES = 2
_WRITTEN_WITH = "2.21."  # The version of TensorFlow.
_STEPS = ("total_loss", "gradient_norm", "learning_rate")
_SCORES = ("precision @ 1", "cross_entropy")


def read() -> dict[str, dict[str, Any]]:
    """Returns the arguments of each training by its name."""
    trainings = tomllib.loads((HERE / "trainings.toml").read_text())
    of_all = trainings.pop("all")
    named = {name: of_all | given for name, given in trainings.items()}
    for training in named.values():
        training.setdefault("close_elsewhere", training["close"])
    return named


def expected(name: str) -> str:
    """Returns what a training computed when it was last written."""
    return (HERE / f"{name}.txt").read_text()


def computed(name: str) -> str:
    """Returns what a training computes, in a process of its own.

    Raises:
        RuntimeError: It failed; the message is what it printed.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tensorflow", "keras"])
    with tempfile.TemporaryDirectory(prefix="golden-") as folder:
        process = context.Process(target=_compute, args=(name, folder))
        process.start()
        process.join()
        if process.exitcode:
            output = (Path(folder) / "output").read_text(errors="replace")
            raise RuntimeError(f"{name} ended with {process.exitcode}:\n{output}")
        return (Path(folder) / "result").read_text()


def difference(name: str, found: str) -> str:
    """Returns the first difference to what was written; empty if there is none."""
    training = read()[name]
    written_with_this = metadata.version("tensorflow").startswith(_WRITTEN_WITH)
    close = training["close" if written_with_this else "close_elsewhere"]
    lines, wanted = found.splitlines(), expected(name).splitlines()
    if len(lines) != len(wanted):
        return f"{len(lines)} lines instead of {len(wanted)}"
    for line, other in zip(lines, wanted, strict=True):
        if line != other and not _are_close(line, other, close):
            return f"{line}\ninstead of\n{other}"
    return ""


def _are_close(line: str, other: str, close: float) -> bool:
    words, others = line.split(), other.split()
    return words[::2] == others[::2] and np.allclose(
        np.array(words[1::2], float),
        np.array(others[1::2], float),
        rtol=close,
        atol=close,
    )


def _compute(name: str, folder: str) -> None:
    """Trains and scores in the folder, and writes the result there."""
    os.chdir(folder)
    output = os.open("output", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ |= {"XDG_CACHE_HOME": folder, "XDG_STATE_HOME": folder, **_ENVIRONMENT}
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(HERE)])
    sys.path[:0] = [str(ROOT), str(HERE)]
    np.savez("data.npz", **_arrays())
    _write_pictures(Path("classes"))
    trainings = read()
    given = trainings[name]
    if begin := given.get("initial_weights"):
        _train(trainings[begin], begin)
        given |= {"initial_weights": f"{folder}/{begin}"}
    _train(given, name)
    Path("result").write_text(_result(Path(name)))


def _train(given: dict[str, Any], train_dir: str) -> None:
    """Trains; several workers with the command, which starts them."""
    values = {"data": "data.npz", "train_dir": train_dir, **given}
    del values["close"], values["close_elsewhere"]
    if "local_workers" in values:
        import runpy

        values["deterministic"] = ""
        words = [word for key, value in values.items() for word in (f"--{key}", value)]
        sys.argv = ["train_multi_gpu.py", *(str(word) for word in words if word != "")]
        runpy.run_path(str(ROOT / "train_multi_gpu.py"), run_name="__main__")
        return
    from cifar10 import Config, train

    train(Config(**values))


def _result(train_dir: Path) -> str:
    """Returns the steps of a run, its score, and sums of its last checkpoint."""
    import tensorflow as tf

    from cifar10 import evaluate

    lines = []
    for text in (train_dir / "metrics.jsonl").read_text().splitlines():
        metrics = json.loads(text)
        numbers = (f"{key} {metrics[key]!r}" for key in _STEPS)
        lines.append(f"step {metrics['step']} {' '.join(numbers)}")
    scores = evaluate(train_dir)
    lines += [f"{key.replace(' ', '')} {scores[key]!r}" for key in _SCORES]
    folder = max((train_dir / "checkpoints").glob("step-*"))
    reader = tf.train.load_checkpoint(str(folder / "state"))
    parts: dict[str, list[np.ndarray]] = {}
    for key in sorted(reader.get_variable_to_shape_map()):
        if not key.startswith("_CHECKPOINTABLE"):
            values = reader.get_tensor(key).astype(np.float64).ravel()
            parts.setdefault(key.partition("/")[0], []).append(values)
    for part, tensors in parts.items():
        values = np.concatenate(tensors)
        lines.append(f"{part} {float(np.cos(np.arange(values.size)) @ values)!r}")
    return "\n".join(lines) + "\n"


def _arrays() -> dict[str, np.ndarray]:
    """Returns unequal classes that can be told apart; integers, equal everywhere."""
    random = np.random.default_rng(0)
    arrays = {}
    for split, count in (("train", 200), ("test", 40)):
        labels = np.minimum(random.integers(0, 12, count), 9).astype(np.uint8)
        noise = random.integers(0, 200, (count, 32, 32, 3), np.uint8)
        noise[..., 0] += labels[:, None, None] * np.uint8(5)
        arrays |= {f"x_{split}": noise, f"y_{split}": labels}
    return arrays


def _write_pictures(folder: Path) -> None:
    from PIL import Image

    arrays = _arrays()
    for number, (image, label) in enumerate(
        zip(arrays["x_train"], arrays["y_train"] % 3, strict=True)
    ):
        path = folder / f"class{label}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(path)


def main(words: list[str]) -> int:
    """Compares or writes; returns the exit code."""
    writes = "--write" in words
    names = [word for word in words if word != "--write"] or list(read())
    if unknown := sorted(set(names) - read().keys()):
        print(f"{unknown[0]}: trainings are {', '.join(read())}.", file=sys.stderr)
        return 2
    os.environ.update(_ENVIRONMENT)  # For what TensorFlow reads when it is imported.
    with ThreadPoolExecutor(_PROCESSES) as pool:
        results = list(pool.map(computed, names))
    wrong = 0
    for name, result in zip(names, results, strict=True):
        if writes:
            (HERE / f"{name}.txt").write_text(result)
            continue
        why = difference(name, result)
        wrong += bool(why)
        print(f"{name}: {why or 'as before'}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
