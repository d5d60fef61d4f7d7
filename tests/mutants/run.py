"""Puts small faults into copies of the package, one at a time; tests have to notice.

    python tests/mutants/run.py                  every fault of mutants.toml
    python tests/mutants/run.py update schedule  those of two of its lists
    python tests/mutants/run.py --draw 100 --seed 1   faults drawn at random: `draw.py`

Each fault has a copy of the working tree of its own, and a process that runs the tests
named with it. These processes are forked from one that has imported TensorFlow, so that
tests of milliseconds take no seconds. The exit code is 1 if tests missed a fault, could
not be run, or fail without one, or if the text of a fault is not there exactly once.

The faults of mutants.toml are chosen by hand: what must not go wrong.
"""

import argparse
import contextlib
import functools
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
_LEFT_OUT = shutil.ignore_patterns(".git", ".venv", ".*_cache")
_LEFT_OUT_OF_ROOT = {"build", "runs", "data"}
# As tests/conftest.py sets it, before TensorFlow is imported.
_ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "-1",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "TF_ENABLE_ONEDNN_OPTS": "0",
}
# Exit codes of pytest; with any other the tests were not run.
_PASSED, _FAILED = 0, 1
_PROCESSES = 2
_SECONDS = 600  # After which the tests of a fault are taken to hang.
_SECONDS_OF_ALL = 3600  # The same for those of all faults together.
_BYTES = 5 * 2**30  # Of memory, after which they are taken to fill the machine.
_OUTPUT = "output"
_SHOWN = 2000  # Characters of the output of tests that were not run.
_WIDTH = 100  # Characters of what a test says of a fault.


class Mutant(NamedTuple):
    """A fault: what stands in a file, what a mistake would make of it, who notices."""

    file: str  # Below cifar10/.
    text: str
    fault: str
    tests: str  # Names for pytest, below tests/, between spaces.

    def __str__(self) -> str:
        return f"cifar10/{self.file}: {self.text!r} -> {self.fault!r} ({self.tests})"

    def faulty(self, text: str) -> str:
        """Returns the file's text with the fault."""
        return text.replace(self.text, self.fault)

    @property
    def names(self) -> list[str]:
        """The tests, as pytest takes them."""
        return [f"tests/{name}" for name in self.tests.split()]

    def obstacle(self) -> str:
        """Returns why the fault cannot be put in; empty if it can."""
        count = (ROOT / "cifar10" / self.file).read_text().count(self.text)
        return "" if count == 1 else f"the text is there {count} times"


def read() -> dict[str, list[Mutant]]:
    """Returns the lists of mutants.toml by name."""
    content = tomllib.loads(Path(__file__).with_name("mutants.toml").read_text())
    return {name: [Mutant(*row) for row in rows] for name, rows in content.items()}


def _left_out(folder: str, names: list[str]) -> set[str]:
    """Returns what is not copied of a folder."""
    found = _LEFT_OUT(folder, names)
    return found | _LEFT_OUT_OF_ROOT if folder == str(ROOT) else found


def run_tests(mutant: Any, names: list[str], folder: str, *options: str) -> None:
    """Ends this process as pytest ends on a copy of the tree, with a fault or without.

    The copy is made in the folder, which also takes what the tests print and write.
    """
    os.setpgrp()  # Whoever ends this process ends those of its tests, too.
    import pytest

    output = os.open(f"{folder}/{_OUTPUT}", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    tree = Path(folder) / "tree"
    shutil.copytree(ROOT, tree, ignore=_left_out, symlinks=True)
    if mutant:
        path = tree / "cifar10" / mutant.file
        path.write_text(mutant.faulty(path.read_text()))
    os.chdir(tree)
    os.environ["PYTHONPATH"] = str(tree)
    sys.path.insert(0, str(tree))
    options = ("-x", "-q", "-p", "no:cacheprovider", *options)
    code = int(pytest.main([*options, f"--basetemp={folder}/pytest", *names]))
    for process in multiprocessing.active_children():
        process.kill()  # A failed test has left it, and Python would wait for it.
    sys.exit(code)


def run_apart(
    context: Any, mutant: Any, names: list[str], seconds: int, *options: str
) -> tuple[str, str]:
    """Runs tests of a fault in a process of their own, with bounds of time and memory.

    Returns how they ended, which is empty if they passed, and what they printed.
    """
    began, ended = time.monotonic(), ""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        arguments = mutant, names, folder, *options
        process = context.Process(target=run_tests, args=arguments)
        process.start()
        while process.is_alive() and not ended:
            process.join(1.0)
            if time.monotonic() - began > seconds:
                ended = "hangs"
            elif _resident(process.pid) > _BYTES:
                ended = "fills the memory"
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # With what the tests have left.
        process.join()
        output = (Path(folder) / _OUTPUT).read_text(errors="replace")
    code = process.exitcode
    return ended or ("" if code == _PASSED else f"exit code {code}"), output


def _resident(group: int) -> int:
    """Returns the resident bytes of a group of processes."""
    pages = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # It may have ended.
            fields = path.read_text().rpartition(")")[2].split()
            pages += int(fields[21]) if int(fields[2]) == group else 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def try_out(context: Any, mutant: Mutant | None, names: list[str]) -> str:
    """Returns what is wrong with the tests of a fault, or of none; empty if nothing."""
    if mutant and (obstacle := mutant.obstacle()):
        return obstacle
    began = time.monotonic()
    most = _SECONDS if mutant else _SECONDS_OF_ALL
    ended, output = run_apart(context, mutant, names, most, "-m", "")
    wrong = ""
    if mutant and not ended:
        wrong = "MISSED"
    elif ended != (f"exit code {_FAILED}" if mutant else ""):
        wrong = f"the tests ended with {ended}:\n{output[-_SHOWN:]}"
    said = [line[1:].strip() for line in output.splitlines() if line.startswith("E ")]
    outcome = (wrong or " ".join(said) or "passed").splitlines()[0][:_WIDTH]
    seconds = time.monotonic() - began
    print(f"{seconds:5.1f} s  {mutant or 'no fault'}\n         {outcome}", flush=True)
    return wrong


def main(words: list[str]) -> int:
    """Tries out all faults, those of some or drawn ones; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("lists", nargs="*", help="of mutants.toml; all by default")
    parser.add_argument("--draw", type=int, help="how many faults to draw instead")
    parser.add_argument("--seed", type=int, default=0, help="other faults")
    parser.add_argument("--only", type=int, nargs="+", help="numbers of drawn faults")
    options = parser.parse_args(words)
    os.environ.update(_ENVIRONMENT)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tensorflow", "keras", "pytest"])
    if options.draw:
        import draw

        apart = functools.partial(run_apart, context)
        return draw.main(options.draw, options.seed, options.only, apart)
    return try_out_lists(context, options.lists)


def try_out_lists(context: Any, lists: list[str]) -> int:
    """Tries out all faults of mutants.toml, or of some lists; returns the exit code."""
    began = time.monotonic()
    every = read()
    if unknown := [name for name in lists if name not in every]:
        print(f"{unknown[0]}: lists of faults are {', '.join(every)}.", file=sys.stderr)
        return 2
    mutants = [mutant for name in lists or every for mutant in every[name]]
    all_names = dict.fromkeys(name for mutant in mutants for name in mutant.names)
    jobs = [(None, [*all_names]), *((mutant, mutant.names) for mutant in mutants)]
    with ThreadPoolExecutor(_PROCESSES) as pool:
        found = list(pool.map(lambda job: try_out(context, *job), jobs))
    wrong = [(job[0], why) for job, why in zip(jobs, found, strict=True) if why]
    for mutant, why in wrong:
        print(f"\n{mutant or 'Without a fault'}\n{why}")
    caught = len(mutants) - sum(mutant is not None for mutant, _ in wrong)
    minutes = (time.monotonic() - began) / 60
    print(f"\n{caught} of {len(mutants)} faults caught in {minutes:.1f} minutes.")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
