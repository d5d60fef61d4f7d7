"""Helpers: event files, read back as TensorBoard reads them."""

import types

import tensorflow as tf
from tensorboard.backend.event_processing import (
    event_accumulator,
    plugin_event_accumulator,
)

from cifar10.run_directory import event_files
from cifar10.training import not_finite

_EVERYTHING = {event_accumulator.TENSORS: 0}


def read(events):
    """Returns everything in a folder of event files."""
    accumulator = event_accumulator.EventAccumulator(str(events), _EVERYTHING)
    return accumulator.Reload()


def read_as_the_server(events):
    """Returns the same without what a later start of the run has taken back."""
    accumulator = plugin_event_accumulator.EventAccumulator(str(events), _EVERYTHING)
    accumulator.Reload()
    return accumulator


def tensors(accumulator, tag):
    """Returns (step, value) of all events of a tag."""
    return [
        (event.step, tf.make_ndarray(event.tensor_proto))
        for event in accumulator.Tensors(tag)
    ]


def do_not_wait(patch):
    """Lets a second pass whenever a resume or a rollback waits for the next one.

    The names of event files are out of order then.
    """
    now = [1e9]

    def pass_time(*_):
        now[0] += 1.0
        return now[0]

    clock = types.SimpleNamespace(time=pass_time, sleep=pass_time)
    for module in (event_files, not_finite):
        patch.setattr(module, "time", clock)
