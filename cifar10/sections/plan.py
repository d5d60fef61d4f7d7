"""What is planned: sections, and what a step over them takes in memory."""

from __future__ import annotations

import dataclasses

from cifar10.sections import cutting


@dataclasses.dataclass(frozen=True)
class Plan:
    """A step over some sections.

    Attributes:
        sections: They; one for a step that is not sectioned.
        begin: The names of the layers that they begin with, without the first.
        activations: Bytes that each keeps for its gradients; empty if the model is no
            graph of layers.
        tower_bytes: The most that one tower's step takes at a time, variables left out.
        twice: Part of the forward pass's multiplications that are done twice, those of
            convolutions and matrix products.
    """

    sections: tuple[cutting.Section, ...]
    begin: tuple[str, ...]
    activations: tuple[int, ...]
    tower_bytes: int
    twice: float


def gigabytes(count: float) -> str:
    """Writes down a number of bytes."""
    return f"{count / 1e9:,.2f} GB"
