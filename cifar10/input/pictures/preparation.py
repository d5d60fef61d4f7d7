"""Decodes pictures once, by several threads, into shards of records.

A shard that is there is taken as it is, so a process that was killed, or whose list has
changed, loses none of them. The pictures of other shards, and of the pieces that a
killed process leaves, are copied by path, size and time of change; the rest is decoded.
Once all is there, what belongs to other pictures is removed. A lock lets one process at
a time prepare; any other waits and finds the work done.
"""

import contextlib
import errno
import hashlib
import itertools
import json
import math
import os
import time
import warnings
from collections import defaultdict, deque
from collections.abc import (
    Callable,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
    Set as AbstractSet,
)
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, Self, TypeAlias

import rich.console
import rich.progress

from cifar10.errors import UsageError, printable, reason, say
from cifar10.input.pictures import cache, decoding, shards
from cifar10.input.pictures.cache import Folder
from cifar10.input.pictures.decoding import PictureError
from cifar10.input.pictures.listing import Key, Listing
from cifar10.input.pictures.shards import NewShard, Prepared, Shard
from cifar10.input.records import SPLITS, Split

# Threads besides one for each core, for when one waits for the disk. More only wait for
# Python's lock: four were a sixth slower (`docs/lab-notes.md`).
_MORE_THREADS = 1
# So that no thread waits until a batch of large pictures before its own is written.
_BATCHES_PER_THREAD = 2

# Pictures that a thread decodes at a time, and those of a piece, which a kill may cost.
BATCH = 32
PIECE = 256

_LOG_SECONDS = 10.0  # Between two lines where the output is no terminal.
_SHOWN = 5  # Bad pictures in a message.

# Yields functions that read each picture's content, from a place in the list onwards.
Contents = Callable[[int], Iterable[Callable[[], bytes]]]


def folder_for(home: Path, name: str, *identity: object) -> Path:
    """Returns the folder in the cache for all that is prepared from one source."""
    content = json.dumps([shards.FORMAT, *identity]).encode()
    plain = "".join(c if c.isascii() and c.isalnum() else "-" for c in name)[:40]
    return home / "pictures" / f"{plain}-{hashlib.sha256(content).hexdigest()[:16]}"


def prepare(
    home: Path,
    listing: Listing,
    contents: Contents,
    *,
    image_size: int,
    is_readable: Callable[[int], bool] = lambda _: False,
    announce: Callable[[], None] = lambda: None,
) -> Prepared:
    """Returns the pictures of a list, prepared in the folder `home`.

    Args:
        home: From `folder_for`, with all that changes how a picture is decoded.
        listing: The pictures.
        contents: Reads them. It is called for those that have to be decoded.
        image_size: Height and width of the results.
        is_readable: Whether a picture that was not readable earlier, by its place in
            the list, is now.
        announce: Is called before anything is decoded.
    """
    with explained(home), cache.opened(home) as folder:
        work = _Preparation(folder, listing, contents, image_size, is_readable)
        if not work.is_done:
            with folder.locked():
                work = _Preparation(folder, listing, contents, image_size, is_readable)
                if not work.is_done:
                    announce()
                    work.run()
    return Prepared(home, image_size, listing, work.shards)


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
            f"{max_bad_images:g} allows:{names}\nRepair or remove them, or allow them "
            f"with --max_bad_images {math.ceil(100 * len(bad) / total) / 100:g}."
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


class _Copy(NamedTuple):
    """Where the record of a picture is already."""

    file: str
    start: int


_Known: TypeAlias = Mapping[Key, _Copy | PictureError]


class _Preparation:
    """One list's way from files to shards.

    Attributes:
        shards: Those that are complete, of each part.
    """

    def __init__(
        self,
        folder: Folder,
        listing: Listing,
        contents: Contents,
        image_size: int,
        is_readable: Callable[[int], bool],
    ) -> None:
        self._folder = folder
        self._listing = listing
        self._contents = contents
        self._size = image_size
        self._is_readable = is_readable
        self._record_bytes = image_size**2 * 3
        self._per_shard = shards.records_per_shard(self._record_bytes)
        self._keys = listing.keys()
        self._found = dict(shards.found(folder, self._record_bytes))
        self.shards: dict[Split, list[Shard]] = {
            split: list(self._complete(listing.places(split))) for split in SPLITS
        }

    def _complete(self, places: range) -> Iterator[Shard]:
        """Yields the shards of a part that are there, up to the first that is not."""
        by_first = defaultdict(list)
        for shard in self._found.values():
            if not shard.is_piece:
                by_first[shard.keys[0]].append(shard)
        start = places.start
        while start < places.stop:
            candidates = by_first[self._keys[start]]
            fitting = [one for one in candidates if self._fits(one, start, places.stop)]
            if not fitting:
                return
            yield fitting[0]
            start += len(fitting[0].keys)

    def _fits(self, shard: Shard, start: int, stop: int) -> bool:
        """Returns whether a shard has the pictures from a place on, as they are now."""
        end = start + len(shard.keys)
        return (
            end <= stop
            and self._keys[start:end] == shard.keys
            and len(shard) <= self._per_shard
            and (end == stop or len(shard) == self._per_shard)
            and not any(self._is_readable(start + place) for place in shard.unreadable)
        )

    def _left(self, split: Split) -> range:
        """Returns the places in the list of pictures without a complete shard."""
        return self._listing.places(split)[
            sum(len(s.keys) for s in self.shards[split]) :
        ]

    @property
    def is_done(self) -> bool:
        """Whether no picture is left to prepare."""
        return not any(self._left(split) for split in SPLITS)

    def run(self) -> None:
        """Prepares what is left, and removes what belongs to other pictures."""
        self._remove(n for n in self._folder.names() if n.startswith("."))
        left = [place for split in SPLITS for place in self._left(split)]
        total, made_for = len(self._listing), self._listing.name()
        with (
            _Progress(total, total - len(left)) as progress,
            contextlib.closing(self._results(left)) as results,
        ):
            for split in SPLITS:
                writer = _Writer(self._folder, made_for, self._per_shard)
                with contextlib.closing(writer):
                    for place in self._left(split):
                        writer.add(self._keys[place], next(results))
                        progress.report_one()
                    writer.finish()
                self.shards[split] += writer.shards
        os.fsync(self._folder.descriptor)
        self._remove_others(made_for)

    def _remove_others(self, made_for: str) -> None:
        """Removes the shards of other pictures, and pieces.

        Those of the same pictures in other parts stay: other trainings may read them.
        """
        used = [shard for split in SPLITS for shard in self.shards[split]]
        kept = {
            file
            for name, shard in shards.found(self._folder, self._record_bytes)
            if shard in used or (shard.of == made_for and not shard.is_piece)
            for file in (name, shard.file)
        }
        self._remove(name for name in self._folder.names() if name not in kept)

    def _remove(self, names: Iterable[str]) -> None:
        for name in names:
            self._folder.remove(name)

    def _results(
        self, left: Sequence[int]
    ) -> Generator[bytes | PictureError, None, None]:
        """Yields the records of pictures, or why they are left out, in order."""
        known = self._known({self._keys[place] for place in left})
        threads = len(os.sched_getaffinity(0)) + _MORE_THREADS
        first = left[0]
        chosen = {*left}
        reads = (
            (place, read)
            for place, read in enumerate(self._contents(first), first)
            if place in chosen
        )
        running: deque[Future[list[bytes | PictureError]]] = deque()
        pool = ThreadPoolExecutor(threads)
        # Pillow warns of odd data beside the pixels without saying in which file.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                while batch := list(itertools.islice(reads, BATCH)):
                    running.append(pool.submit(self._decode, batch, known))
                    if len(running) >= threads * _BATCHES_PER_THREAD:
                        yield from running.popleft().result()
                while running:
                    yield from running.popleft().result()
            finally:  # After a full disk or Ctrl-C, nothing more is begun.
                pool.shutdown(cancel_futures=True)

    def _known(self, wanted: AbstractSet[Key]) -> _Known:
        """Returns what shards and pieces have of pictures, if they are undamaged."""
        known: dict[Key, _Copy | PictureError] = {}
        for shard in self._found.values():
            if wanted.isdisjoint(shard.keys) or not self._is_intact(shard):
                continue
            good = (k for place, k in enumerate(shard.keys) if place not in shard.bad)
            for row, key in enumerate(good):
                known[key] = _Copy(shard.file, row * self._record_bytes)
            for place, why in shard.bad.items():
                if place not in shard.unreadable:
                    known[shard.keys[place]] = PictureError(why)
        return known

    def _is_intact(self, shard: Shard) -> bool:
        try:
            with self._folder.open(shard.file) as file:
                digest = hashlib.file_digest(file, "sha256")
        except OSError:
            return False
        return digest.hexdigest() == shard.sha256

    def _decode(
        self, batch: Sequence[tuple[int, Callable[[], bytes]]], known: _Known
    ) -> list[bytes | PictureError]:
        results: list[bytes | PictureError] = []
        for place, read in batch:
            found = known.get(self._keys[place])
            try:
                if isinstance(found, _Copy):
                    results.append(self._copied(found))
                else:
                    name = self._listing.path[place]
                    results.append(found or self._record(read(), name))
            except PictureError as error:
                results.append(error)
        return results

    def _copied(self, copy: _Copy) -> bytes:
        with self._folder.open(copy.file, buffering=0) as file:
            file.seek(copy.start)
            return file.read(self._record_bytes)

    def _record(self, content: bytes, name: str) -> bytes:
        if not content:
            raise PictureError(f"{name} is empty.")
        return decoding.decode(content, name, self._size, self._size).tobytes()


class _Writer:
    """Writes the shards of a part, and pieces of one until it is complete.

    Attributes:
        shards: Those that are complete.
    """

    def __init__(self, folder: Folder, made_for: str, per_shard: int) -> None:
        self.shards: list[Shard] = []
        self._folder = folder
        self._made_for = made_for
        self._per_shard = per_shard
        self._begin()

    def _begin(self) -> None:
        self._shard = NewShard(self._folder, self._made_for, is_piece=False)
        self._piece = NewShard(self._folder, self._made_for, is_piece=True)
        self._pieces: list[str] = []

    def add(self, key: Key, record: bytes | PictureError) -> None:
        """Writes a record, or notes why there is none."""
        if len(self._shard) == self._per_shard and isinstance(record, bytes):
            self.finish()
            self._begin()
        self._shard.add(key, record)
        self._piece.add(key, record)
        if len(self._piece.keys) == PIECE:
            name, piece = self._piece.keep()
            self._pieces += [name, piece.file]
            self._piece = NewShard(self._folder, self._made_for, is_piece=True)

    def finish(self) -> None:
        """Completes the shard, unless nothing was added."""
        if self._shard.keys:
            self.shards.append(self._shard.keep()[1])
        self.close()
        for name in self._pieces:
            self._folder.remove(name)

    def close(self) -> None:
        """Removes what is not complete."""
        self._shard.discard()
        self._piece.discard()


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
        self._total, self._first, self._done = total, first, first
        self._began = self._said = time.monotonic()

    def report_one(self) -> None:
        """Shows that one more is done."""
        self._done += 1
        done, now = self._done, time.monotonic()
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
        place = printable(str(home / str(error.filename or "")))
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UsageError(
                f"The disk of {place} is full.\nWhat is prepared is kept: free some "
                "space and start again to continue, or have it prepared elsewhere: set "
                "XDG_CACHE_HOME to a folder with room."
            ) from error
        raise UsageError(
            f"The prepared pictures in {place} cannot be read or written: "
            f"{reason(error)}.\nMend that, or set XDG_CACHE_HOME to another folder "
            "of yours."
        ) from error
