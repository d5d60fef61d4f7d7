"""The wording of important messages, and their exit codes, as messages.txt holds them.

Other tests assert a key word at most. After a change that is meant, look at what
differs and write the file anew:

    UPDATE_MESSAGES=1 python -m pytest tests/project/test_messages.py

Paths are placeholders there: {tmp}, {data} or {root}; and {flags}, those of a run.
"""

import os
import re
import shlex
import shutil
from pathlib import Path

import runs
from cifar10.input import cifar
from cifar10.run_directory.lock import RunLock

LINES = re.MULTILINE | re.DOTALL
MESSAGES = Path(__file__).with_name("messages.txt")

FLAGS = (
    f"--model {runs.SMALL} --batch_size 8 --max_steps 2 --precision float32 "
    "--data synthetic --data_dir {data} --train_dir {tmp}"
)
# What each does comes before those that need it.
COMMANDS = """
train_multi_gpu.py --num_gpus 2 {flags}/run
train_multi_gpu.py --num_gpus 2 {flags}/run
train.py --learning_rat 1
train.py --class_weights balanced
train.py --num_gpus 4
train_multi_gpu.py --num_gpus 65
train_multi_gpu.py --learning_rate nan
train_multi_gpu.py --batch_size 4 --global_batch_size 8
train_multi_gpu.py --num_gpus 4 --global_batch_size 130 --data synthetic
train_multi_gpu.py --num_gpus 2 --variable_device gpu {flags}/new
train.py {flags}/new --batch_size 10001
train.py {flags}/new --memory_limit 1
train.py {flags}/new --model small_model:three_layers
train.py {flags}/new --model no_such_module:function
train.py {flags}/new --data cifar01
train.py {flags}/new --data cifar10 --data_dir {tmp}/incomplete
train.py {flags}/new --data cifar10 --data_dir {tmp}/mislabelled
train.py {flags}/file
train.py {flags}/files
train.py {flags}/locked
train.py {flags}/run
train.py --resume {tmp}/files
train.py --resume {tmp}/run --fresh
train.py --resume {tmp}/run --learning_rate 0.5
train.py --resume {tmp}/damaged --max_steps 4
eval.py --run_once --train_dir {tmp}/damaged
eval.py --run_once --train_dir {tmp}/new
eval.py --run_once --train_dir {tmp}/run --device gpu:7
eval.py --run_once --train_dir {tmp}/run --num_examples 2001
eval.py --step 1 --train_dir {tmp}/run
"""


def prepare(folder):
    """Makes what the commands after the first one find."""
    (folder / "file").touch()
    (folder / "files").mkdir()
    (folder / "files" / "notes.txt").touch()
    names = cifar.FORMATS["cifar10"].train_files + cifar.FORMATS["cifar10"].test_files
    for data in ("incomplete", "mislabelled"):
        (folder / data).mkdir()
        for name in names:
            (folder / data / name).touch()
            os.truncate(folder / data / name, 10_000 * 3073)
    (folder / "incomplete" / "data_batch_3.bin").unlink()
    with (folder / "mislabelled" / "data_batch_3.bin").open("r+b") as file:
        file.seek(17 * 3073)
        file.write(bytes([200]))
    shutil.copytree(folder / "run", folder / "damaged")
    for path in (folder / "damaged" / "checkpoints").glob("*/state.data*"):
        path.write_bytes(path.read_bytes()[:-1])


def said(done):
    """Returns the messages of a command, without the steps between first and last."""
    text = re.sub(r"(^New run in .*?\n).*(?=^Done)", r"\1", done.stdout, flags=LINES)
    # The usage is Python's work, which differs from version to version.
    errors = re.sub(r"^usage: .*?\n(?=\S.*: error: )", "", done.stderr, flags=LINES)
    # Why there is no GPU depends on the machine.
    errors = re.sub(r"^(NOTE|PROBLEM): .*?\n", "", errors, flags=LINES)
    # How a line is broken depends on the paths in it.
    text = (text + errors).replace("\n        ", " ")
    return re.sub(r"process \d+ on \S+?(?=\. )", "process PID on HOST", text)


def contents(folder):
    changing = {"damaged", ".lock"}
    files = (path for path in folder.rglob("*.*") if not changing & {*path.parts})
    return {path: path.stat().st_mtime_ns for path in files}


def test_messages_match_the_recorded_file(tmp_path, stand_in_dir, monkeypatch):
    monkeypatch.chdir(runs.ROOT)
    places = {"tmp": tmp_path, "data": stand_in_dir, "root": runs.ROOT}
    flags = FLAGS.format(**places)
    lines, before = [], {}
    with RunLock(tmp_path / "locked"):
        for command in COMMANDS.strip().splitlines():
            done = runs.call(*shlex.split(command.format(flags=flags, **places)))
            text = said(done)
            for name, path in places.items():
                text = text.replace(str(path), f"{{{name}}}")
            lines.append(f"$ {command}\n{text.rstrip()}\n[{done.returncode}]\n")
            if not before:
                prepare(tmp_path)
                before = contents(tmp_path)
        assert contents(tmp_path) == before, "a refused command changed something"
    found = "\n".join(lines)
    if os.environ.get("UPDATE_MESSAGES"):
        MESSAGES.write_text(found)
    expected = MESSAGES.read_text() if MESSAGES.exists() else ""
    assert found.splitlines() == expected.splitlines()
