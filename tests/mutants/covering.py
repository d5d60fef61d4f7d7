"""Which fast tests run which lines of the package: a run of them all, kept in build/.

    python tests/mutants/covering.py    runs the fast tests anew: several minutes
    python tests/mutants/covering.py tests/tools/test_plan.py    only those of files

What a test prepares (fixtures) may be asserted by any test of its file, so these lines
belong to all of them; those of a session's fixture belong to all tests that use it.
Lines that only other processes run, or TensorFlow's own threads, belong to none.
"""

import collections
import json
import math
import random
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
KEPT = ROOT / "build" / "mutants" / "covering.json"
_PROCESSES = 3  # As many as run the tests otherwise.


class Contexts:
    """A plugin of pytest: tells `coverage` which test runs, and takes its seconds."""

    def __init__(self, coverage):
        self.switch = coverage.switch_context
        self.seconds = collections.Counter()
        self.of = collections.defaultdict(set)  # A context's tests.
        self._setup = ""

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item):
        self._setup, _, _ = item.nodeid.partition("::")
        name = item.nodeid.partition("[")[0]
        for context in (name, self._setup, *item.fixturenames):
            self.of[context].add(name)
        self.switch(self._setup)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef):
        is_shared = fixturedef.scope == "session"
        self.switch(fixturedef.argname if is_shared else self._setup)
        try:
            return (yield)
        finally:
            self.switch(self._setup)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_call(self, item):
        self.switch(item.nodeid.partition("[")[0])

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_teardown(self):
        self.switch("")

    def pytest_runtest_logreport(self, report):
        name = report.nodeid.partition("[")[0]
        # What fails without a fault would notice any.
        self.seconds[name] += math.inf if report.failed else report.duration


def record(files=()):
    """Keeps how long each fast test takes, and the tests of each line of each file.

    With some files of tests, what was kept of the others stays.
    """
    kept = {"seconds": {}, "lines": {}}
    if files and KEPT.exists():
        kept = json.loads(KEPT.read_text())
    files = files or [str(path.relative_to(ROOT)) for path in _test_files()]
    KEPT.parent.mkdir(parents=True, exist_ok=True)
    # Shuffled, so that a room of slow tests is spread; the same each time.
    random.Random(0).shuffle(shuffled := sorted(files))
    shares = [shuffled[first::_PROCESSES] for first in range(_PROCESSES)]
    with ProcessPoolExecutor(_PROCESSES, get_context("spawn")) as pool:
        found = [*pool.map(_of_files, range(_PROCESSES), shares)]
    seconds = {n: s for n, s in kept["seconds"].items() if not _is_of(n, files)}
    lines = collections.defaultdict(lambda: collections.defaultdict(set))
    for path, of_lines in kept["lines"].items():
        for line, names in of_lines.items():
            lines[path][line] = {*names} & seconds.keys()
    for of_share, lines_of_share in found:
        seconds |= of_share
        for path, line, names in lines_of_share:
            lines[path][str(line)] |= {*names}
    KEPT.write_text(json.dumps({"seconds": seconds, "lines": lines}, default=sorted))


def _test_files():
    return (ROOT / "tests").rglob("test_*.py")


def _of_files(number, files):
    """Returns the seconds of the tests of files, and for each line which run it."""
    import coverage

    if not files:
        return {}, []
    where = {"data_file": str(KEPT.with_suffix(f".{number}.db")), "config_file": False}
    measured = coverage.Coverage(**where, source=[str(ROOT / "cifar10")])
    measured.erase()
    plugin = Contexts(measured)
    sys.path.insert(0, str(ROOT))  # As `python -m pytest` does.
    measured.start()
    code = pytest.main(["-q", "-p", "no:cacheprovider", *files], plugins=[plugin])
    measured.stop()
    if code not in (0, 1, 5):  # Passed, failed, none that is fast.
        raise SystemExit(f"The tests ended with {code}: nothing is kept.")
    seconds = {n: s for n, s in plugin.seconds.items() if s < math.inf}
    of = {context: names & seconds.keys() for context, names in plugin.of.items()}
    data, lines = measured.get_data(), []
    for path in data.measured_files():
        file = str(Path(path).relative_to(ROOT / "cifar10"))
        for line, names in data.contexts_by_lineno(path).items():
            tests = {test for name in names for test in of.get(name, ())}
            lines.append((file, line, sorted(tests)))
    return seconds, lines


def _is_of(name, files):
    return name.partition("::")[0] in files


if __name__ == "__main__":
    record(sys.argv[1:])
