"""Measures in fifteen minutes of one GPU what was predicted without one.

    python -m benchmarks.gpu_minutes --out gpu_minutes

Each line of the table is a process with a limit of time, in the order of what it
decides, and leaves a file of JSON. Started again, it goes on with the lines that have
none. Predictions are for one H100 whose processor needs 14 us to start a kernel; how
they were made is in dev/LOG.md. On a CPU, --steps 3 tries whether all
lines run.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import machine, report
from benchmarks.runner import select_rows, show_progress
from cifar10 import files, hardware
from cifar10.process import entry_point

ROOT = Path(__file__).parents[1]
_IMAGES = 128  # Of a step, as in the tutorial.
_PARAMETERS = 1_068_298  # Of the tutorial's network.
_ALL, _SHORT, _TIMED_CALLS = 20_000, 2_000, 8
_COMMAND_BUFFERS = "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION"
_NCCL_ON_ONE_GPU = {"CUDA_VISIBLE_DEVICES": "0,0", "NCCL_MULTI_RANK_GPU_ENABLE": "1"}

Figures = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Line:
    """One line of the table.

    Attributes:
        name: For people, for `--only` and for the file.
        seconds: After which the process ends.
        measure: Returns figures by name.
        options: Arguments of `measure`.
        environment: What is set for the process.
        predicted: What was expected, in words; empty if nothing was.
    """

    name: str
    seconds: int
    measure: Callable[..., Figures]
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    predicted: str = ""

    @property
    def title(self) -> str:
        """The name, which `--only` searches."""
        return self.name


def time_steps(
    folder: Path,
    steps: int | None,
    *,
    images: int = _IMAGES,
    call: int = 1,
    own_pooling: bool = True,
    **given: Any,
) -> Figures:
    """Times the steps of ready batches, `call` of them in each call to TensorFlow.

    Without `own_pooling`, XLA compiles TensorFlow's gradient of max pooling.
    """
    entry_point.import_tensorflow()
    from cifar10.config.config import Config
    from cifar10.input import calls
    from cifar10.towers import graphs
    from cifar10.training import assembly

    if not own_pooling:
        graphs.is_max_pooling = lambda _: False
    if steps:  # Whether it runs is seen with few images, too.
        call, images = min(call, steps), _IMAGES // 16
    config = Config(
        data="synthetic",
        batch_size=images,
        num_gpus=1,
        steps_per_call=call,
        train_dir=str(folder / "run"),
        **{"xla": False, **given},
    )
    training = assembly.assemble(config)
    with training.open_batches(0, 0) as queues:
        batches = queues.get()
    stacked = calls.stacked([batches], call)

    def run() -> float:
        began = time.perf_counter()
        results = [
            training.towers.steps(stacked, call).numbers
            if call > 1
            else training.towers.step(batches).numbers
            for _ in range(1 if steps else _TIMED_CALLS * 50 // call)
        ]
        results[-1].numpy()
        return (time.perf_counter() - began) / len(results)

    first = run()
    seconds = run() / call
    return {
        "ms a step": round(1000 * seconds, 3),
        "images/s": round(images / seconds),
        "first call, s": round(first, 1),
    }


def train(folder: Path, steps: int | None, *flags: str, of: int = _ALL) -> Figures:
    """Runs a training script; returns its rate and where its time went."""
    run = folder / "run"
    words = [*flags, "--train_dir", str(run), "--max_steps", str(steps or of)]
    words += ["--log_frequency", "1"] if steps else []
    began = time.perf_counter()
    done = _script(*words)
    wall = time.perf_counter() - began
    lines = [json.loads(line) for line in (run / "metrics.jsonl").open()]
    settings = json.loads((run / "config.json").read_text())
    images, seconds = settings["global_batch_size"], lines[-1]["seconds"]
    stepping = seconds["training"] + seconds["input"]
    return {
        "images/s after the start": round((steps or of) * images / stepping),
        "wall, s": round(wall, 1),
        "seconds by part": seconds,
        "xla": settings["xla"],
        "said": [line for line in done.splitlines() if "XLA" in line],
    }


def resume(folder: Path, steps: int | None, *flags: str) -> Figures:
    """Trains straight on and in two pieces; returns how far the variables differ."""
    entry_point.import_tensorflow()
    import tensorflow as tf

    end = steps or _SHORT
    values = []
    for name, ends in (("straight", [end]), ("resumed", [end - 1 - end // 3, end])):
        for last in ends:
            words = ["--train_dir", str(folder / name), "--max_steps", str(last)]
            _script(*flags, *words)
        newest = tf.train.load_checkpoint(
            next((folder / name / "checkpoints").glob(f"*{end}/*.index")).with_suffix(
                ""
            )
        )
        names = sorted(newest.get_variable_to_shape_map())
        values.append([newest.get_tensor(one) for one in names if "OBJECT" not in one])
    far = max(
        float(np.max(np.abs(a - b), initial=0)) for a, b in zip(*values, strict=True)
    )
    return {"largest difference": far, "equal to the bit": far == 0.0}


def time_copies(folder: Path, steps: int | None) -> Figures:
    """Times the copy of the tutorial's variables to the GPU and back."""
    del folder
    entry_point.import_tensorflow()
    import tensorflow as tf

    gpu = "/gpu:0" if tf.config.list_physical_devices("GPU") else "/cpu:0"
    figures = {}
    for name, there, back in (("to the GPU", "/cpu:0", gpu), ("back", gpu, "/cpu:0")):
        with tf.device(there):
            values = tf.zeros([_PARAMETERS])
        seconds = []
        for _ in range(steps or 50):
            began = time.perf_counter()
            with tf.device(back):
                tf.reduce_max(tf.identity(values)).numpy()
            seconds.append(time.perf_counter() - began)
        figures[f"{name}, ms"] = round(1000 * float(np.median(seconds)), 3)
    return figures


def command(
    folder: Path, steps: int | None, *words: str, short: Sequence[str]
) -> Figures:
    """Runs another benchmark, adding `short` for few steps; returns its last lines."""
    del folder
    said = _run([sys.executable, "-m", *words, *(short if steps else ())])
    return {"said": said.splitlines()[-12:]}


def _script(*flags: str) -> str:
    several = "--num_gpus" in flags or "--local_workers" in flags
    words = list(flags)
    if "--split_gpu" in words and not hardware.count_gpus():
        place = words.index("--split_gpu")  # Simulated towers on the CPU need none.
        del words[place : place + 2]
    program = "train_multi_gpu.py" if several else "train.py"
    return _run([sys.executable, program, *words])


def _run(words: Sequence[str]) -> str:
    """Returns what a program has said; raises with its last words if it fails."""
    done = subprocess.run(  # noqa: S603 - programs of this repository.
        words, cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"exit code {done.returncode}: {done.stderr[-600:]}")
    return done.stdout + done.stderr


def _program(
    name: str,
    seconds: int,
    images: int,
    predicted: str = "",
    flags: str = "",
    **more: Any,
) -> Line:
    options = {"images": images, "call": 50, "xla": True, **more}
    environment = {"XLA_FLAGS": flags} if flags else {}
    return Line(name, seconds, time_steps, options, environment, predicted)


_OWN = ("--data", "synthetic")
_FAST = {"images": 1536, "recipe": "fast"}
_PEER = {"short": ["--seeds", "1", "--steps", "20", "--images", "64"]}
LINES = [
    _program("program of 50, 128 images", 60, 128, "0.36 to 0.44 ms"),
    _program(
        "the same, TensorFlow's pooling",
        40,
        128,
        "0.40 to 0.48 ms",
        own_pooling=False,
    ),
    Line("single steps, 128 images", 40, time_steps, predicted="2.8 to 3.3 ms"),
    Line(
        "single steps, update by XLA",
        40,
        time_steps,
        {"xla_update": True},
        predicted="1.6 to 2.0 ms: 90 starts less",
    ),
    Line(
        "calls of 10, 128 images",
        40,
        time_steps,
        {"call": 10},
        predicted="2.8 to 3.3 ms",
    ),
    _program("program of 50, 32 images", 40, 32, "as with 128: bound by starts"),
    _program("program of 50, 1,024 images", 40, 1024, "0.9 to 1.2 ms"),
    _program(
        "program with larger CUDA graphs",
        40,
        128,
        "at most as long",
        flags="--xla_gpu_enable_command_buffer="
        f"{_COMMAND_BUFFERS},WHILE,CONDITIONAL --xla_gpu_graph_min_graph_size=1",
    ),
    _program(
        "program without CUDA graphs",
        40,
        128,
        flags="--xla_gpu_enable_command_buffer=",
    ),
    Line(
        "default training, 20,000 steps",
        90,
        train,
        {"flags": _OWN},
        predicted=">= 200,000 images/s",
    ),
    Line(
        "the same without XLA",
        40,
        train,
        {"flags": (*_OWN, "--no-xla"), "of": _SHORT},
        predicted="39,000 images/s",
    ),
    Line(
        "the same, a thread for the GPU",
        40,
        train,
        {"flags": (*_OWN, "--no-xla"), "of": _SHORT},
        {"TF_GPU_THREAD_MODE": "gpu_private"},
    ),
    Line(
        "resumed with XLA",
        100,
        resume,
        {"flags": (*_OWN, "--xla")},
        predicted="equal to the bit",
    ),
    Line("steps of fast", 40, time_steps, _FAST, predicted="10.8 ms: 774 starts"),
    Line(
        "steps of fast, update by XLA",
        40,
        time_steps,
        {**_FAST, "xla_update": True},
        predicted="about 5 ms: 350 starts",
    ),
    Line(
        "steps of fast, a program of 6",
        60,
        time_steps,
        {**_FAST, "call": 6, "xla": True},
        predicted="3 to 4 ms; with TensorFlow's pooling 1 ms more",
    ),
    Line(
        "fast, and airbench94 in PyTorch",
        180,
        command,
        {"words": ("benchmarks.time_to_94", "--seeds", "1"), **_PEER},
        predicted="fast: 3.2 s of training",
    ),
    Line("copies of 4.27 MB", 20, time_copies, predicted="0.45 and 0.45 ms, pageable"),
    Line(
        "two workers by NCCL on one GPU",
        60,
        train,
        {
            "flags": (*_OWN, "--local_workers", "2", "--variable_update", "mirrored"),
            "of": 200,
        },
        _NCCL_ON_ONE_GPU,
    ),
    Line(
        "four towers on one GPU",
        50,
        train,
        {
            "flags": (
                *_OWN,
                "--num_gpus",
                "4",
                "--split_gpu",
                "4",
                "--batch_size",
                "32",
            ),
            "of": 500,
        },
        predicted="17,100 images/s",
    ),
    Line(
        "resumed, deterministic",
        100,
        resume,
        {"flags": (*_OWN, "--deterministic")},
        predicted="equal to the bit",
    ),
]


def measure(line: Line, out: Path, steps: int | None) -> None:
    """Measures a line in a process of its own, and writes its file."""
    folder = out / "scratch" / line.name.replace(" ", "_")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    words = [sys.executable, "-m", "benchmarks.gpu_minutes", "--out", str(out)]
    words += ["--child", line.name, *(["--steps", str(steps)] if steps else [])]
    environment = dict(line.environment)
    if flags := environment.get("XLA_FLAGS"):  # Beside a folder of libdevice, say.
        environment["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}"
    began = time.perf_counter()
    try:
        limit = None if steps else line.seconds
        said, failed = _with_all_it_starts(words, environment, limit)
        last = said.strip().rpartition("\n")[2]
        found = {"failed": failed[-800:]} if failed is not None else json.loads(last)
    except subprocess.TimeoutExpired:
        found = {"failed": f"not done after {line.seconds} s"}
    found["seconds in all"] = round(time.perf_counter() - began, 1)
    facts = {"line": line.name, "steps": steps, "predicted": line.predicted}
    content = json.dumps({**facts, **found}).encode()
    files.write_atomically(_file(out, line, steps), content)
    shutil.rmtree(folder, ignore_errors=True)


def _with_all_it_starts(
    words: Sequence[str], environment: Mapping[str, str], limit: float | None
) -> tuple[str, str | None]:
    """Runs a program; returns what it said and, if it failed, its errors.

    However it ends, the processes that it has started end too: a run that goes on
    would slow down the next line.
    """
    with subprocess.Popen(  # noqa: S603 - this program.
        words,
        cwd=ROOT,
        env={**os.environ, **environment},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        try:
            said, errors = process.communicate(timeout=limit)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return said, errors if process.returncode else None


def table(out: Path, steps: int | None) -> str:
    """Returns the table of what was measured beside what was predicted."""
    rows = []
    for line in LINES:
        if (path := _file(out, line, steps)).exists():
            found = json.loads(path.read_text())
            hidden = {"line", "steps", "predicted", "seconds by part", "said"}
            shown = [f"{name} {of}" for name, of in found.items() if name not in hidden]
            rows.append(
                [line.name, line.predicted, "; ".join(shown).replace("\n", " ")]
            )
    return report.table(["line", "predicted", "measured"], rows)


def _file(out: Path, line: Line, steps: int | None) -> Path:
    """Returns the file of a line. That of a trial is no measurement."""
    trial = f"-{steps}-steps" if steps else ""
    return out / f"{LINES.index(line):02}{trial}.json"


def main() -> None:
    """Measures all lines, and prints the table."""
    parser = report.build_parser("gpu_minutes", __doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of results")
    parser.add_argument("--steps", type=int, help="so few steps, to try all lines")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    flags = parser.parse_args()
    report.check_at_least(1, flags, "steps")
    if flags.child:
        [line] = [line for line in LINES if line.name == flags.child]
        options = dict(line.options)
        words = [*options.pop("flags", ()), *options.pop("words", ())]
        folder = flags.out / "scratch" / line.name.replace(" ", "_")
        print(json.dumps(line.measure(folder, flags.steps, *words, **options)))
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # Ends the line, too.
    lines = select_rows(LINES, flags.only)
    flags.out.mkdir(parents=True, exist_ok=True)
    for line in lines:
        path = _file(flags.out, line, flags.steps)
        if not path.exists():
            measure(line, flags.out, flags.steps)
            show_progress(f"{line.name}: {path.read_text()[:300]}")
    print(report.describe_conditions(machine.describe()))
    print(table(flags.out, flags.steps))


if __name__ == "__main__":
    entry_point.run_program(main)
