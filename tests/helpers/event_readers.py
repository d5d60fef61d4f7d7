"""Helpers: event files, read back as TensorBoard reads them."""

import tensorflow as tf
from tensorboard.backend.event_processing import (
    event_accumulator,
    plugin_event_accumulator,
)

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
