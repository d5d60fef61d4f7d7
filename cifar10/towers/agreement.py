"""How processes that train together agree on their next action."""

import contextlib
from collections.abc import Iterator, Sequence

from cifar10.errors import StoppedError


class Agreement:
    """The agreement of a single process; `ReplicaBuilder` serves several."""

    def agree(self, wishes: Sequence[bool]) -> list[bool]:
        """Returns for each wish to end the run whether all processes fulfil it now."""
        return [*wishes]

    def share(self, numbers: Sequence[int], *, variables: bool = False) -> list[int]:
        """Returns the `numbers` that process 0 passes. Every process must call this.

        With `variables`, also copies those of the first replica to all replicas.
        """
        del variables  # Here is one replica.
        return [*numbers]

    @contextlib.contextmanager
    def barrier_at_end(self) -> Iterator[None]:
        """Waits for all processes when the block ends, even if a signal ends it."""
        try:
            yield
        except StoppedError:
            self.share([0])
            raise
        self.share([0])
