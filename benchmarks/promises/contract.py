"""The promises, each of which a trainer keeps, breaks, or does not offer.

Nothing here knows a trainer: it is run by its adapter's command, and judged by its
weights, scores, exit codes and words.
"""

from __future__ import annotations

import dataclasses
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.promises import trials
from benchmarks.promises.adapters.protocol import Trainer
from benchmarks.promises.trials import Outcome

KEPT, BROKEN, NOT_OFFERED = "kept", "broken", "not offered"

# Two orders of the same float32 sums differ by less, other images by far more.
_TOLERANCE = 1e-5
_IMAGES, _BATCH_SIZE, _STEPS = 96, 8, 48  # Four epochs of twelve updates.
_WAITS_AT = 29  # In the third.
# Divides by neither the batch of a worker nor that of all.
_SCORED, _SCORED_BATCH_SIZE = 45, 16
_CLASSES = 4
# Small files of PyTorch, when cut, have other errors than files of usual sizes.
_SHAPE = (32, 32, 3)
_TINY_RATE = 1e-5
_DAMAGE = ("truncat", "corrupt", "damage", "incomplete", "not complete", "unreadable")
_OF_NAN = r"\bnan\b|not finite|non-finite|\binf\b|infinite"
_OF_DISK = r"no space left|disk is full|disk full|file too large|errno 2[78]"


@dataclasses.dataclass(frozen=True)
class Cell:
    """How a trainer stands to a promise.

    Attributes:
        verdict: `KEPT`, `BROKEN` or `NOT_OFFERED`.
        said: How exactly, by how much, or why not.
        times: How often that was seen.
    """

    verdict: str
    said: str
    times: int = 1

    def __str__(self) -> str:
        return f"{self.verdict}: {self.said}" if self.said else self.verdict


class NotInstalledError(Exception):
    """The adapter could not describe its trainer."""


class Contract:
    """The promises, tried on one trainer.

    Args:
        command: The command of the trainer's adapter.
        folder: For everything that the trials write; it can be removed afterwards.

    Attributes:
        trainer: Who it is.

    Raises:
        NotInstalledError: The adapter does not start.
    """

    def __init__(self, command: Sequence[str], folder: Path) -> None:
        self._trials = trials.Trials(command, folder)
        names = [field.name for field in dataclasses.fields(Trainer)]
        try:
            said = self._trials.do("describe", "", "")
            if not said.is_done:
                raise NotInstalledError(said.last_line)
            facts = _done(said, *names).facts
        except (OSError, _FailedError) as error:  # No such program, or no answer.
            raise NotInstalledError(str(error)) from error
        self.trainer = Trainer(**{name: facts[name] for name in names})
        if wrong := sorted({*self.trainer.lacks} - {*PROMISES}):
            known = ", ".join(PROMISES)
            raise NotInstalledError(f"lacks: {wrong[0]} is none of {known}")
        self.data = _write_data(folder)
        # What several promises look at, trained once for each repetition.
        self._shared: dict[str, Any] = {}

    def check(self, promise: str) -> Cell:
        """Tries a promise of `PROMISES`; twice, if it is broken."""
        if promise in self.trainer.lacks:
            return Cell(NOT_OFFERED, self.trainer.lacks[promise])
        first = self._try(promise)
        if first.verdict != BROKEN:
            return first
        self._shared.clear()
        again = self._try(promise)
        if again.verdict != BROKEN:
            return Cell(BROKEN, f"{first.said}; {again} when tried again")
        return dataclasses.replace(again, times=2)

    def _try(self, promise: str) -> Cell:
        try:
            return getattr(self, promise)()
        except trials.NotWaitingError as error:
            return Cell(BROKEN, f"training ends early: {error}")
        except (_FailedError, trials.NoCheckpointError) as error:
            return Cell(BROKEN, f"fails: {error}")

    def _train(self, name: str, **given: Any) -> Outcome:
        """Trains straight on in a new folder, once; returns the outcome."""
        if name not in self._shared:
            folder = self._trials.new_folder()
            given = {"workers": self.trainer.workers, **given}
            outcome = self._trials.do("train", folder, self.data["network"], **given)
            self._shared[name] = _done(outcome), folder
        return self._shared[name][0]

    def _killed(self, data: str = "network", **given: Any) -> Path:
        """Returns the folder of a run that was killed within an epoch."""
        name = f"killed {data}"
        if name not in self._shared:
            folder = self._trials.new_folder()
            given |= {"workers": self.trainer.workers, "wait_at": _WAITS_AT}
            self._trials.kill(folder, self.data[data], **given)
            self._shared[name] = folder
            shutil.copytree(folder, f"{folder}-killed", symlinks=True)
        # In its own place: trainers note paths.
        folder = self._shared[name]
        shutil.rmtree(folder)
        shutil.copytree(f"{folder}-killed", folder, symlinks=True)
        return folder

    def _resume(self, folder: Path, data: str = "network", **given: Any) -> Outcome:
        given = {"workers": self.trainer.workers, "resume": True, **given}
        return self._trials.do("train", folder, self.data[data], **given)

    def _resumed(self) -> Outcome:
        if "resumed" not in self._shared:
            self._shared["resumed"] = _done(self._resume(self._killed()))
        return self._shared["resumed"]

    def _evaluate(self, folder: Path, **given: Any) -> dict[str, Any]:
        """Returns the scores of a run, by default of whole batches on one worker."""
        given = {"batch_size": _SCORED // 5, **given}
        outcome = self._trials.do("evaluate", folder, self.data["scored"], **given)
        return _done(outcome, "loss", "accuracy").facts

    def workers(self) -> Cell:
        """Two workers equal one, with the same global batch."""
        one = self._train("one worker", workers=1)
        return _compare(self._train("straight").weights, one.weights)

    def accumulation(self) -> Cell:
        """Accumulated gradients equal those of the large batch."""
        # Constant, since schedules may count batches or updates, as documented.
        large = self._train("constant", constant=True)
        several = self._train("accumulated", accumulate=2, constant=True)
        return _compare(several.weights, large.weights)

    def resumed_weights(self) -> Cell:
        """Killed within an epoch and resumed, training ends with the same weights."""
        straight, resumed = self._train("straight"), self._resumed()
        cell = _compare(resumed.weights, straight.weights)
        return dataclasses.replace(
            cell, said=f"{cell.said}, from update {resumed.began} of {_WAITS_AT}"
        )

    def resumed_images(self) -> Cell:
        """A killed and resumed run sees each image once in each epoch."""
        # Each image is a class of its own, all begin equally likely and the rate is
        # tiny: an image's visits are proportional to what its bias has gained.
        given = {"learning_rate": _TINY_RATE, "momentum": 0.0, "constant": True}
        folder = self._killed("own classes", **given)
        resumed = _done(self._resume(folder, "own classes", **given))
        biases = [one for one in resumed.weights if one.shape == (_IMAGES,)]
        if len(biases) != 1 or not np.isfinite(biases[0]).all():
            raise _FailedError(
                f"{len(biases)} finite biases of {_IMAGES} classes, not 1"
            )
        [bias] = biases
        gained = bias.astype(np.float64) * _BATCH_SIZE / _TINY_RATE
        visits = np.rint(gained + _STEPS * _BATCH_SIZE / _IMAGES).astype(int)
        epochs = _STEPS * _BATCH_SIZE // _IMAGES
        if (visits == epochs).all():
            return Cell(KEPT, f"each of {_IMAGES} images {epochs} times")
        counts = [f"{(visits == n).sum()} {n} times" for n in np.unique(visits)]
        return Cell(
            BROKEN, f"of {_IMAGES} images in {epochs} epochs {', '.join(counts)}"
        )

    def resumed_schedule(self) -> Cell:
        """A resumed run's learning rates are those of the straight one."""
        both = self._train("straight"), self._resumed()
        straight, resumed = (_done(one, "step").facts for one in both)
        if resumed["step"] != _STEPS:
            return Cell(BROKEN, f"ends at update {resumed['step']}, not {_STEPS}")
        rates = resumed["rates"]
        pairs = [
            (rate, straight["rates"].get(step, np.nan)) for step, rate in rates.items()
        ]
        wrong = [pair for pair in pairs if not np.isclose(*pair, rtol=1e-5)]
        if not wrong:
            return Cell(KEPT, "")
        return Cell(BROKEN, f"{len(wrong)} of {len(pairs)} rates differ")

    def resumed_best(self) -> Cell:
        """A resumed run knows the best score of before."""
        # The labels scored are wrong ones, so the first score stays the best.
        both = self._train("straight"), self._resumed()
        pair = [_done(one, "best").facts["best"] for one in both]
        if np.isclose(*pair, rtol=1e-4):
            return Cell(KEPT, f"{pair[0]:.4f}")
        return Cell(BROKEN, f"{pair[1]:.4f} for {pair[0]:.4f}")

    def evaluation(self) -> Cell:
        """Evaluation counts each image once, where the set does not divide."""
        self._train("straight")
        _, folder = self._shared["straight"]
        expected = self._evaluate(folder)
        workers = self.trainer.workers
        found = self._evaluate(folder, workers=workers, batch_size=_SCORED_BATCH_SIZE)
        off = [
            f"{name} {found[name]:.4f} for {expected[name]:.4f}"
            for name in ("accuracy", "loss")
            if not np.isclose(found[name], expected[name], rtol=_TOLERANCE)
        ]
        if off:
            return Cell(BROKEN, ", ".join(off))
        right = round(expected["accuracy"] * _SCORED)
        return Cell(KEPT, f"{right} of {_SCORED} right")

    def nan(self) -> Cell:
        """A loss that is not finite is named, and training ends."""
        folder = self._trials.new_folder()
        outcome = self._trials.do(
            "train", folder, self.data["network"],
            workers=self.trainer.workers, learning_rate=1e30,
        )  # fmt: skip
        names = re.search(_OF_NAN, outcome.output, re.IGNORECASE)
        step = outcome.facts.get("step", _STEPS)
        code = f"exit code {outcome.code}"
        if outcome.code is None:
            return Cell(BROKEN, "hangs")
        if outcome.code and names:
            return Cell(KEPT, f"says so, {code}")
        if names and step < _STEPS:
            return Cell(KEPT, f"says so and ends after update {step}, {code}")
        if outcome.code:
            return Cell(BROKEN, f"{code}, {outcome.last_line!r}")
        shown = "shows nan" if names else "says nothing"
        end = "to the end" if step == _STEPS else f"to update {step}"
        return Cell(BROKEN, f"{shown}, trains {end}, {code}")

    def cut_checkpoint(self) -> Cell:
        """A truncated checkpoint is noticed."""
        folder = self._killed()
        cut = trials.newest(folder, self.trainer.checkpoint)
        with cut.open("r+b") as file:
            file.truncate(cut.stat().st_size // 2)
        outcome = self._resume(folder)
        words = outcome.output.lower()
        names = cut.name.lower() in words or any(one in words for one in _DAMAGE)
        if outcome.code is None:
            return Cell(BROKEN, "hangs")
        if outcome.is_done and outcome.began:
            said = "" if names else ", silently"
            return Cell(KEPT, f"goes on from update {outcome.began}{said}")
        if outcome.is_done:
            said = "says so" if names else "silently"
            return Cell(KEPT if names else BROKEN, f"starts from scratch, {said}")
        verdict = KEPT if names else BROKEN
        return Cell(verdict, f"refuses: {_short(outcome.last_line)!r}")

    def full_disk(self) -> Cell:
        """A full disk loses nothing that was saved."""
        folder = self._trials.new_folder()
        with trials.small_disk(folder) as is_small:
            cell = self._fill(folder) if is_small else None
        if cell and cell.verdict == BROKEN:
            return cell
        in_middle = self._fill(self._trials.new_folder(), self.trainer.checkpoint)
        if in_middle.verdict == BROKEN:
            said = f"full in the middle of a file: {in_middle.said}"
            return Cell(BROKEN, said)
        return cell or in_middle

    def _fill(self, folder: Path, pattern: str = "") -> Cell:
        given = {"workers": self.trainer.workers, "wait_at": _WAITS_AT}
        data = self.data["network"]
        full = self._trials.fill_disk(folder, data, pattern, **given)
        names = re.search(_OF_DISK, full.output, re.IGNORECASE)
        said = "says so" if names else "does not say why"
        if full.is_done:
            return self._trained_on_full_disk(folder, said)
        if full.code is None:
            said = "hangs"
        after = self._resume(folder)
        if not after.is_done:
            return Cell(BROKEN, f"{said}; resuming, {_short(after.last_line)!r}")
        if after.began < (saved := self._resumed().began):
            lost = f"goes on from update {after.began}, though {saved} was saved"
            return Cell(BROKEN, f"{said}; {lost}")
        return Cell(KEPT, f"{said}, goes on from update {after.began}")

    def _trained_on_full_disk(self, folder: Path, said: str) -> Cell:
        """Judges a run that came to its end, by what it left there."""
        self._train("straight")
        left = self._evaluate(folder)
        expected = self._evaluate(self._shared["straight"][1])
        if np.isclose(left["loss"], expected["loss"], rtol=1e-3):
            return Cell(KEPT, "finds room and trains to the end")
        return Cell(BROKEN, f"trains to the end, {said}, and its weights are lost")


# For people, by the method that tries it, which is also the name that adapters use.
PROMISES = {
    "workers": "two workers equal one",
    "accumulation": "accumulated gradients equal the large batch",
    "resumed_weights": "killed and resumed: same weights",
    "resumed_images": "killed and resumed: each image once an epoch",
    "resumed_schedule": "killed and resumed: same learning rates",
    "resumed_best": "killed and resumed: knows the best score",
    "evaluation": "evaluation counts each image once",
    "nan": "a NaN is named, and ends the training",
    "cut_checkpoint": "a cut checkpoint is noticed",
    "full_disk": "a full disk loses nothing saved",
}


class _FailedError(Exception):
    """A job that has to be done was not."""


def _done(outcome: Outcome, *needed: str) -> Outcome:
    if not outcome.is_done:
        code = "hangs" if outcome.code is None else f"exit code {outcome.code}"
        raise _FailedError(f"{code}, {_short(outcome.last_line)!r}")
    for name in needed:
        if outcome.facts.get(name) is None:
            raise _FailedError(f"the adapter's answer has no {name}")
    return outcome


def _short(text: str) -> str:
    return text if len(text) <= 160 else f"{text[:157]}..."


def _compare(found: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> Cell:
    """Returns the largest difference, relative to the largest value of its array."""
    shapes = [[one.shape for one in weights] for weights in (found, expected)]
    if not found or shapes[0] != shapes[1]:
        return Cell(BROKEN, f"weights of shapes {shapes[0]} for {shapes[1]}")
    if not all(np.isfinite(one).all() for one in (*found, *expected)):
        return Cell(BROKEN, "the weights are not finite")
    worst = 0.0
    for one, other in zip(found, expected, strict=True):
        largest = np.abs(other).max()
        worst = max(worst, float(np.abs(one - other).max() / (largest or 1.0)))
    if worst == 0:
        return Cell(KEPT, "bit for bit")
    verdict = KEPT if worst < _TOLERANCE else BROKEN
    return Cell(verdict, f"by {worst:.1g}" if verdict == BROKEN else f"to {worst:.0e}")


def _write_data(folder: Path) -> dict[str, Path]:
    """Writes archives of x, y, x_test and y_test; returns their files by name."""
    random = np.random.default_rng(0)
    patterns = random.integers(64, 192, [_CLASSES, *_SHAPE])

    def images(labels: np.ndarray) -> np.ndarray:
        noise = random.integers(-48, 49, [len(labels), *_SHAPE])
        return (patterns[labels] + noise).astype(np.uint8)

    y, y_test = np.arange(_IMAGES) % _CLASSES, np.arange(_SCORED) % _CLASSES
    x, x_test = images(y), images(y_test)
    wrong = (y_test + 1) % _CLASSES
    some = np.where(np.arange(_SCORED) % 3 == 0, wrong, y_test)
    labels = {
        "network": (y, wrong),
        "scored": (y, some),
        "own classes": (np.arange(_IMAGES), y_test),
    }
    files = {name: folder / f"{name}.npz" for name in labels}
    for name, (trained, scored) in labels.items():
        np.savez(files[name], x=x, y=trained, x_test=x_test, y_test=scored)
    return files
