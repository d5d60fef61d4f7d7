"""Decodes pictures once, by several threads, into files of records.

Each list of pictures has its own folder, which is named after the list, so that nothing
that another process reads is ever changed. The folder is complete once it has a
manifest. A process that is killed leaves a folder without one, and the next process
continues where the folder's journal ends (`journal.py`).

Where the list has changed, the pictures in it that are the same as in an earlier folder
are copied from there. That folder is removed once the new one is complete. A lock lets
one process at a time prepare; any other waits and finds the work done.
"""

import contextlib
import errno
import hashlib
import itertools
import json
import os
import shutil
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Self

import rich.console
import rich.progress

from cifar10.config import regular_files
from cifar10.errors import UsageError, printable, reason, say
from cifar10.input.pictures import decoding, earlier, journal, shards
from cifar10.input.pictures.earlier import Record
from cifar10.input.pictures.journal import Batch
from cifar10.input.pictures.listing import Listing
from cifar10.input.pictures.shards import Prepared

# Threads besides one for each core, for when one waits for the disk. More only wait for
# Python's lock: four were a sixth slower (`docs/lab-notes.md`).
_MORE_THREADS = 1
# So that no thread waits until a batch of large pictures before its own is written.
_BATCHES_PER_THREAD = 2

_LOCK = ".lock"
_WAITING = "Waiting for another process to prepare the pictures ..."
# The folder of a list whose pictures have to be looked at again.
_OUTDATED = ".outdated"

_LOG_SECONDS = 10.0  # Between two lines where the output is no terminal.
_SHOWN = 5  # Bad pictures in a message.

# Yields functions that read each picture's content, from a place in the list onwards.
Contents = Callable[[int], Iterable[Callable[[], bytes]]]


def folder_for(cache: Path, name: str, *identity: object) -> Path:
    """Returns the folder in the cache for all that is prepared from one source."""
    content = json.dumps([shards.FORMAT, *identity]).encode()
    plain = "".join(c if c.isascii() and c.isalnum() else "-" for c in name)[:40]
    return cache / "pictures" / f"{plain}-{hashlib.sha256(content).hexdigest()[:16]}"


def prepare(
    home: Path,
    listing: Listing,
    contents: Contents,
    *,
    image_size: int,
    is_readable: Callable[[int], bool] = lambda _: False,
    announce: Callable[[], None] = lambda: None,
) -> Prepared:
    """Returns the pictures of a list, prepared in a folder within `home`.

    Args:
        home: From `folder_for`, with all that changes how a picture is decoded.
        listing: The pictures.
        contents: Reads them. It is called for those that have to be decoded.
        image_size: Height and width of the results.
        is_readable: Whether a picture that was not readable earlier, by its place in
            the list, is now.
        announce: Is called before anything is decoded.
    """
    folder = home / listing.name()
    with explained(home):
        found = shards.load(folder)
        if found is None or any(map(is_readable, found.unreadable)):
            with regular_files.locked(home / _LOCK, _WAITING):
                found = shards.load(folder)
                if found and any(map(is_readable, found.unreadable)):
                    outdated = folder.with_name(folder.name + _OUTDATED)
                    shutil.rmtree(outdated, ignore_errors=True)
                    folder.rename(outdated)
                    found = None
                if found is None:
                    announce()
                    found = _Preparation(folder, listing, contents, image_size).run()
                _remove_others(found)
    return found


def _remove_others(kept: Prepared) -> None:
    """Removes the folders of lists of other pictures, which a new one has replaced.

    Those with the same pictures in other parts stay: other trainings may read them.
    """
    for other in kept.folder.parent.iterdir():
        if other.is_dir() and other != kept.folder:
            there = shards.load(other)
            if (
                there is None
                or other.suffix == _OUTDATED
                or sorted(there.listing.keys()) != sorted(kept.listing.keys())
            ):
                shutil.rmtree(other, ignore_errors=True)


def check(prepared: Prepared, max_bad_images: float, where: str) -> str:
    """Returns a sentence on the pictures that were left out, empty if there are none.

    More than `max_bad_images` of all is an error, and so is a part without pictures.
    """
    total, bad = len(prepared.listing), prepared.bad
    shown = [printable(bad[place]) for place in sorted(bad)[:_SHOWN]]
    if len(bad) > len(shown):
        shown.append(f"and {len(bad) - len(shown):,} more.")
    names = "".join(f"\n    {line}" for line in shown)
    share = f"{len(bad):,} of {total:,} pictures in {printable(where)}"
    if len(bad) > max_bad_images * total:
        raise UsageError(
            f"{share} cannot be used, which is more than --max_bad_images "
            f"{max_bad_images:g} allows:{names}\nRepair or remove them, or allow more."
        )
    for part, flag in (("train", "lower"), ("test", "raise")):
        if part == "train" or prepared.listing.tests < total:
            count = len(prepared.places("train" if part == "train" else "test"))
            if not count:
                raise UsageError(
                    f"None of the {total:,} pictures in {printable(where)} is left for "
                    f"the {part} part. Add pictures, or {flag} --validation_fraction."
                )
    return f"{share} are left out:{names}" if bad else ""


class _Preparation:
    """One list's way from files to records."""

    def __init__(
        self, folder: Path, listing: Listing, contents: Contents, image_size: int
    ) -> None:
        self._folder = folder
        self._listing = listing
        self._contents = contents
        self._size = image_size
        self._record_bytes = image_size**2 * 3
        self._batches = journal.batches(listing, self._record_bytes)
        self._bad: dict[int, str] = {}
        self._unreadable: list[int] = []

    def run(self) -> Prepared:
        """Prepares what is not prepared yet, and makes the folder complete."""
        home = self._folder.parent
        others = [p for p in home.iterdir() if p.is_dir() and p != self._folder]
        copies = earlier.find(others, self._record_bytes)
        journal.begin(self._folder, self._listing)
        writer = journal.Writer(self._folder, self._record_bytes)
        done = 0
        for batch in journal.believed(self._folder, self._listing, self._record_bytes):
            writer.append(batch, is_there=True)
            self._add(batch)
            done += 1
        left = self._batches[done:]
        first = left[0].start if left else len(self._listing)
        with (
            journal.continued(self._folder, done) as log,
            _Progress(len(self._listing), first) as progress,
            contextlib.closing(writer),
        ):
            for places, batch in zip(left, self._decoded(left, copies), strict=True):
                writer.append(batch)
                log.write(batch.line())
                log.flush()
                self._add(batch)
                progress.report(places.stop)
        writer.finish()
        prepared = Prepared(
            folder=self._folder,
            image_size=self._size,
            listing=self._listing,
            bad=self._bad,
            unreadable=self._unreadable,
            digests=writer.digests,
        )
        manifest = self._folder / shards.MANIFEST
        regular_files.write_atomically(manifest, prepared.manifest())
        regular_files.sync(self._folder)
        journal.end(self._folder)
        return prepared

    def _add(self, batch: Batch) -> None:
        self._bad |= batch.bad
        self._unreadable += batch.unreadable

    def _decoded(
        self, batches: list[range], copies: Mapping[earlier.Key, Record | str]
    ) -> Iterator[Batch]:
        """Yields the pictures of some batches, in order."""
        if not batches:
            return
        threads = len(os.sched_getaffinity(0)) + _MORE_THREADS
        keys = self._listing.keys()
        contents = iter(self._contents(batches[0].start))
        running: deque[Future[Batch]] = deque()
        pool = ThreadPoolExecutor(threads)
        # Pillow warns of odd data beside the pixels without saying in which file.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                for places in batches:
                    reads = list(itertools.islice(contents, len(places)))
                    known = [copies.get(keys[place]) for place in places]
                    running.append(pool.submit(self._decode, places, reads, known))
                    if len(running) >= threads * _BATCHES_PER_THREAD:
                        yield running.popleft().result()
                while running:
                    yield running.popleft().result()
            finally:  # After a full disk or Ctrl-C, nothing more is begun.
                pool.shutdown(cancel_futures=True)

    def _decode(
        self,
        places: range,
        reads: list[Callable[[], bytes]],
        known: list[Record | str | None],
    ) -> Batch:
        records: list[bytes] = []
        bad: dict[int, str] = {}
        unreadable: list[int] = []
        for place, read, found in zip(places, reads, known, strict=True):
            if isinstance(found, str):
                bad[place] = found
                continue
            try:
                name = self._listing.path[place]
                records.append(found.read() if found else self._record(read(), name))
            except decoding.PictureError as error:
                bad[place] = str(error)
                if isinstance(error, decoding.UnreadableError):
                    unreadable.append(place)
        split = self._listing.split(places.start)
        return Batch(split, b"".join(records), bad, unreadable)

    def _record(self, content: bytes, name: str) -> bytes:
        if not content:
            raise decoding.PictureError(f"{name} is empty.")
        return decoding.decode(content, name, self._size, self._size).tobytes()


class _Progress:
    """Shows how many pictures are prepared: a bar, or a line now and then."""

    def __init__(self, total: int, first: int) -> None:
        console = rich.console.Console(stderr=True)
        self._is_terminal = console.is_terminal
        self._bar = rich.progress.Progress(
            rich.progress.TextColumn("preparing pictures"),
            rich.progress.BarColumn(bar_width=None),  # What the numbers leave.
            rich.progress.MofNCompleteColumn(),
            rich.progress.TextColumn("{task.fields[rate]}"),
            rich.progress.TimeRemainingColumn(),
            rich.progress.TextColumn("left"),
            console=console,
            disable=not self._is_terminal,
            transient=True,
            expand=True,
        )
        self._task = self._bar.add_task("", total=total, completed=first, rate="")
        self._total, self._first = total, first
        self._began = self._said = time.monotonic()

    def report(self, done: int) -> None:
        """Shows that so many are done."""
        now = time.monotonic()
        rate = (done - self._first) / max(now - self._began, 1e-3)
        self._bar.update(self._task, completed=done, rate=f"{rate:,.0f}/s")
        if not self._is_terminal and now - self._said >= _LOG_SECONDS:
            self._said = now
            seconds = (self._total - done) / max(rate, 1e-3)
            say(
                f"Prepared {done:,} of {self._total:,} pictures, {rate:,.0f}/s, "
                f"{seconds:,.0f} s left"
            )

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *unused: object) -> None:
        self._bar.stop()


@contextlib.contextmanager
def explained(home: Path) -> Iterator[None]:
    """Turns an error of the operating system into a `UsageError`."""
    try:
        yield
    except OSError as error:
        place = printable(str(error.filename or home))
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UsageError(
                f"The disk of {place} is full.\nWhat is prepared is kept: free some "
                "space and start again to continue, or have it prepared elsewhere: set "
                "CIFAR10_DATA_DIR to a folder with room."
            ) from error
        raise UsageError(
            f"The prepared pictures in {place} cannot be read or written: "
            f"{reason(error)}.\nChange the permissions, or set CIFAR10_DATA_DIR to "
            "another folder."
        ) from error
