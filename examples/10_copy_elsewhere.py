"""Copies a run to another place after each checkpoint, and resumes from the copy.

python examples/10_copy_elsewhere.py [STEPS] [COMMAND ...]

COMMAND copies the folder {run}; it is started after each checkpoint:

    rsync -a --delete {run}/ backup.example.org:runs/mine/
    rclone copy {run} bucket:runs/mine
    aws s3 sync {run} s3://bucket/runs/mine
    cp -r {run}/. /mnt/backup/mine          (the default, to runs/copied.copy)

Training does not wait for a copy: stderr reports a command that fails or hangs, and the
next checkpoint starts another. Only at the end does it wait, for at most a minute, for
the last copy. To resume on any machine, copy the folder back, and then

    python train.py --resume FOLDER

A copy of a checkpoint that was cut off does not matter: it differs from the SHA-256 in
its manifest, and the run resumes from the one before.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading

from cifar10 import Config, train
from cifar10.errors import StoppedError


class CopyElsewhere:
    """Runs a command after each checkpoint, beside the training.

    Args:
        command: The command's words; {run} stands for the run's directory.
        timeout: Seconds after which a copy is ended.
        patience: Seconds to wait for the last copy at the end of the training.
    """

    def __init__(self, command, timeout=600.0, patience=60.0):
        self._command, self._timeout, self._patience = command, timeout, patience
        self._is_due, self._is_over = threading.Event(), False
        self._thread = None

    def on_start(self, run):
        if self._thread is None:  # It continues after a rollback.
            run_dir = str(run.train_dir)
            words = [word.replace("{run}", run_dir) for word in self._command]
            self._thread = threading.Thread(
                target=self._copy, args=(words,), daemon=True
            )
            self._thread.start()

    def on_checkpoint(self, step, path):
        self._is_due.set()  # One copy takes all checkpoints since the last.

    def on_end(self, step, why):
        self._is_over = True
        self._is_due.set()
        self._thread.join(self._patience)
        if self._thread.is_alive():
            _tell(f"the last copy has not ended after {self._patience:g} s")

    def _copy(self, words):
        is_last = False
        while not is_last:
            self._is_due.wait()
            self._is_due.clear()
            is_last = self._is_over
            try:
                _run(words, self._timeout)
            except (OSError, subprocess.SubprocessError) as error:
                _tell(str(error))


def _run(words, timeout):
    """Runs a command; ends it and its child processes after some seconds."""
    with subprocess.Popen(  # noqa: S603 - the command that the user names.
        words,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        try:
            _, said = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise
    if process.returncode:
        last = said.decode(errors="replace").strip().rpartition("\n")[2]
        raise subprocess.SubprocessError(f"exit code {process.returncode}: {last}")


def _tell(what):
    print(f"Copying elsewhere: {what}.", file=sys.stderr, flush=True)


def main():
    steps = int(sys.argv[1]) if sys.argv[1:] else 1_000
    command = sys.argv[2:] or ["cp", "-r", "{run}/.", "runs/copied.copy"]
    config = Config(max_steps=steps, checkpoint_steps=100, train_dir="runs/copied")
    try:
        train(config, hooks=[CopyElsewhere(command)])
    except StoppedError as stopped:  # By a signal; the same command resumes.
        sys.exit(stopped.exit_code)


if __name__ == "__main__":
    main()
