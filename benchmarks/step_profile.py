"""Shows where the time of a training step goes on the CPU, for each stage of a recipe.

    python -m benchmarks.step_profile --recipe fast
    python -m benchmarks.step_profile --towers 4 --batch_size 32 --precision float32

TensorFlow's profiler records each operation of some steps. The time in which at least
one operation of a step runs is divided in proportion to the operations' own times; the
rest of a step is Python, and waiting. What the input computes meanwhile, for later
steps, is shown as a part of all cores' time.
"""

from __future__ import annotations

import collections
import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import machine, report
from cifar10.config.config import Config
from cifar10.input import datasets
from cifar10.process import entry_point

if TYPE_CHECKING:
    from cifar10.training.assembly import Training

# The first pattern found in an operation's name and type is its kind.
_KINDS = {
    "update": r"^update/",
    "average of towers": r"^average/",
    "convolutions": r"Conv2D\w*$|conv2d_transpose",
    "matrix products": r"MatMul(V2)?$",
    "casts": r"Cast$",
    "pooling": r"Pool\w*$",
    "batch norm": r"BatchNorm\w*$",
    "fused by XLA": r"^CpuExecutable",  # Such as the activation of airbench.
    "other elementwise": r"",
}
_REST = "Python, waiting"
_OPERATION = re.compile(r"[^:]+:\w+$|CpuExecutable::Execute")
_INPUT = "tf_data"  # Names of its threads begin so.
_UNTIMED_STEPS = 3


def profile_stage(training: Training, step: int, steps: int) -> dict[str, float]:
    """Profiles some steps from the first one of a stage on.

    Returns the milliseconds of a step, the part of each kind of operation, and that of
    the input, by name.
    """
    import tensorflow as tf

    def run(count: int) -> None:
        for _ in range(count):
            numbers = training.towers.step(batches.get()).numbers
        numbers.numpy()

    training.towers.freeze(training.config.stage(step).frozen)
    with (
        training.open_batches(step, step) as batches,
        tempfile.TemporaryDirectory() as to,
    ):
        run(_UNTIMED_STEPS)
        with tf.profiler.experimental.Profile(to):
            run(steps)
        [found] = Path(to).rglob("*.xplane.pb")
        return summarize(found.read_bytes(), steps)


def summarize(recorded: bytes, steps: int) -> dict[str, float]:
    """Sums up what was recorded of some steps, as `profile_stage` returns it."""
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    times: collections.Counter[str] = collections.Counter()
    spans, of_input = [], 0
    for plane in xplane_pb2.XSpace.FromString(recorded).planes:
        for line in plane.lines:
            last = 0  # Operations within another one count to that.
            for event in sorted(line.events, key=lambda one: one.offset_ps):
                name = plane.event_metadata[event.metadata_id].name
                start, end = event.offset_ps, event.offset_ps + event.duration_ps
                if end <= last or not _OPERATION.match(name):
                    continue
                last = end
                if line.name.startswith(_INPUT):
                    of_input += end - start
                else:
                    spans.append((line.timestamp_ns * 1000 + start, end - start))
                    times[kind_of(name)] += end - start
    busy, reached = 0, 0
    spans.sort()
    for start, duration in spans:
        busy += max(0, start + duration - max(start, reached))
        reached = max(reached, start + duration)
    whole = reached - spans[0][0]
    parts = {kind: times[kind] / times.total() * busy / whole for kind in _KINDS}
    return {
        "ms a step": whole / steps / 1e9,
        **parts,
        _REST: 1 - busy / whole,
        "input, of all cores": of_input / whole / machine.cores(),
    }


def kind_of(name: str) -> str:
    """Returns the kind of an operation, whose name is as in TensorFlow's profile."""
    return next(kind for kind, found in _KINDS.items() if re.search(found, name))


def markdown(training: Training, steps: int) -> str:
    """Profiles every stage of a run; returns a table with a column for each."""
    config, begin = training.config, 0
    titles, columns = [], []
    for stage in config.all_stages:
        size = f"{stage.image_size} pixels" if stage.image_size else "whole images"
        titles.append(f"{size}, from step {begin:,}")
        columns.append(profile_stage(training, begin, steps))
        begin = stage.end
    lines = [
        [
            name,
            *(
                f"{column[name]:.1f}" if name == "ms a step" else f"{column[name]:.1%}"
                for column in columns
            ),
        ]
        for name in columns[0]
    ]
    shape = f"{len(training.placement.devices)} x {config.batch.batch_size}"
    return report.table([f"{shape}, {config.network.precision}", *titles], lines)


def main() -> None:
    """Profiles a recipe, and prints a table."""
    parser = report.build_parser("step_profile", __doc__, has_rows=False)
    add = parser.add_argument
    add("--recipe", default="tutorial", help="a name or a file")
    add("--towers", type=int, default=1)
    add("--batch_size", type=int, help="images of each tower; else the recipe's")
    add("--precision", default="auto")
    add("--steps", type=int, default=20, help="steps of each stage to profile")
    flags = parser.parse_args()
    report.check_at_least(1, flags, "towers", "batch_size", "steps")
    entry_point.import_tensorflow()
    from cifar10.training import assembly

    given: dict[str, Any] = {"recipe": flags.recipe, "num_gpus": flags.towers}
    if flags.batch_size:
        given |= {"batch_size": flags.batch_size, "global_batch_size": None}
    config = Config(**given, precision=flags.precision)
    training = assembly.assemble(config, datasets.find("cifar10", flags.data_dir))
    conditions = report.describe_conditions(machine.describe())
    print(f"{conditions}\n\n{markdown(training, flags.steps)}")


if __name__ == "__main__":
    entry_point.run_program(main)
