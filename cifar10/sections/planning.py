"""Plans where to cut a model into sections, and estimates the memory of a step."""

import bisect
import contextlib
import ctypes
import dataclasses
import functools
import itertools
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence

import keras
import tensorflow as tf

from cifar10 import hardware
from cifar10.config.fields import Memory
from cifar10.errors import UsageError
from cifar10.layers import NewSection
from cifar10.models.layer_tree import is_graph, same_but_number
from cifar10.sections import cutting
from cifar10.sections.sectioned_tower import SectionedTower
from cifar10.towers import devices
from cifar10.towers.devices import Placement
from cifar10.towers.towers import Tower
from cifar10.towers.update import TrainState

# Measured on CPUs (dev/LOG.md).
_CONVOLUTION_BYTES = 1_500_000  # For each compiled convolution.
_XLA_BYTES = 60_000_000  # For XLA, if it compiles a part of the step.
_PADDING = 1.2  # oneDNN's padding of its workspace.
_COPIES = 7  # Copies of the trainable variables held during an update.
# The tensors that one layer's gradient needs at once: input, output and its gradient.
_OF_ONE_LAYER = 3

# Operations that return their input under another name or shape, and operations that
# return memory of the caller: an argument or a constant.
_ALIASES = {"ExpandDims", "Identity", "Reshape", "Squeeze", "StopGradient"}
_FOREIGN = {"Const", "Placeholder"}

# A plan with more sections must use less than this fraction of the best plan's memory.
_CLEARLY_LESS = 0.97
# Stop after this many counts without such a saving.
_PATIENCE = 3

# The largest section may exceed the optimum by 5 % if that recomputes less.
_ROOM = 1.05

# Fraction of free memory for steps. The rest is for the input and checkpoints.
_PART_FOR_STEPS = 0.85


@dataclasses.dataclass(frozen=True)
class SectionPlan:
    """A model's division into sections, and the memory that a step then needs."""

    starts: tuple[int, ...]  # For `cutting.cut`; empty if the model is not cut.
    cuts: tuple[str, ...]  # Names of the layers before which the model is cut.
    # Peak memory of a tower's step without variables: tensors, batches, workspace.
    tower_bytes: int
    # Peak memory of each GPU, or of the CPU for all towers together, with variables.
    total_bytes: int


@dataclasses.dataclass(frozen=True, eq=False)
class Planner:
    """Plans the sections of a training step."""

    state: TrainState  # The variables that the step updates.
    tower: Tower  # The function that each tower computes, not yet cut into sections.
    devices: Sequence[str]  # The device name of each tower of this process.
    images: tf.TensorSpec  # The shape and dtype of one batch of a tower: [batch, ...].
    accumulate: int = 1  # Number of batches that a tower computes before an update.
    replicas: int = 1  # Number of copies of the variables in this process.

    def choose(self, requested: str | None, limit: float = math.inf) -> SectionPlan:
        """Plans the requested sections.

        Args:
            requested: The value of `--sections`: a number, names of layers to cut
                before, or `auto`. None selects the sections marked in the model's code.
            limit: The largest `SectionPlan.total_bytes` that `auto` may choose.

        Raises:
            UsageError: The model cannot be cut as requested, or no division fits.
        """
        if requested == "auto":
            return self._fitting(limit)
        if requested and requested.isdecimal():
            return self.into(int(requested))
        # If a layer is called several times, the first call counts.
        indices = reversed(self._boundaries)
        known = {self._calls[index].operation.name: index for index in indices}
        at = {0: 0}
        for name in self.marks if requested is None else requested.split(","):
            # Keras numbers layers throughout a process: a second model has others.
            similar = [one for one in known if same_but_number(name.strip(), one)]
            if not similar:
                raise UsageError(
                    f"--sections: no section can begin with layer {name}.\nThe model's "
                    "summary() lists layers. One with a mask cannot begin a section."
                )
            index = known[name.strip() if name.strip() in known else similar[-1]]
            at[index] = self._boundaries[index]
        return self._plan(at, len(at))

    def into(self, count: int) -> SectionPlan:
        """Plans `count` sections, balanced to keep the largest one small."""
        if count > len(self._boundaries):
            model, why = self.state.model, ""
            if not is_graph(model):
                why = (
                    f" A model of class {type(model).__name__} counts as one layer; "
                    "keras.Sequential and keras.Model(inputs, output) can be cut."
                )
            raise UsageError(
                f"--sections {count}: model {model.name} has {len(self._boundaries)} "
                f"layers, and each section needs one.\nGive a smaller number.{why}"
            )
        return self._plan(self._boundaries, count)

    @functools.cached_property
    def plain(self) -> SectionPlan:
        """The plan of a step without sections."""
        return self.into(1)

    def all(self) -> Iterator[SectionPlan]:
        """Yields plans with more and more sections and less and less memory."""
        smallest = self.plain
        yield smallest
        for count in range(2, len(self._boundaries) + 1):
            plan = self.into(count)
            if plan.tower_bytes < _CLEARLY_LESS * smallest.tower_bytes:
                smallest = plan
                yield smallest
            elif count > len(smallest.cuts) + _PATIENCE:
                return

    def largest_batch(self, count: int, limit: float, most: int) -> int:
        """Returns the largest batch of a tower that fits in `count` sections.

        The batch has at most `most` images and is rounded down, from 16 images on to
        four binary digits. It is 0 if no batch fits.
        """
        batch = bisect.bisect_right(
            range(1, most + 1),
            limit,
            key=lambda size: self._resized(size).into(count).total_bytes,
        )
        return batch - batch % 2 ** max(batch.bit_length() - 4, batch > 1)

    def _with_batch(self, size: int) -> "Planner":
        images = tf.TensorSpec([size, *self.images.shape[1:]], self.images.dtype)
        return dataclasses.replace(self, images=images)

    @functools.cached_property
    def _doubled(self) -> "Planner":
        return self._with_batch(2 * self.images.shape[0])

    def _resized(self, size: int) -> "Planner":
        """Returns the planner for another batch size; extrapolates costs linearly."""
        images, planner = self.images.shape[0], self._with_batch(size)
        pairs = zip(self.costs, self._doubled.costs, strict=True)
        costs = [one + (two - one) * (size - images) // images for one, two in pairs]
        vars(planner)["costs"] = costs  # Where `cached_property` keeps them.
        return planner

    def _fitting(self, limit: float) -> SectionPlan:
        for plan in self.all():
            if plan.total_bytes <= limit:
                return plan
        self.into(len(plan.cuts) + 2)  # Raises the reason if the model cannot be cut.
        raise UsageError(
            f"--sections auto: {len(plan.cuts) + 1} sections still need "
            f"{_gigabytes(plan.total_bytes)}, and the limit is {_gigabytes(limit)}.\n"
            "Give a smaller --batch_size, and a larger --accumulate to compensate."
        )

    @property
    def marks(self) -> list[str]:
        """Names of the layers at which the model's code marks new sections."""
        layers = self.state.model.layers if is_graph(self.state.model) else []
        return [one.name for one in layers if isinstance(one, NewSection)]

    @property
    def variable_bytes(self) -> int:
        """The bytes of one copy of the variables, averages and optimizer state."""
        return _bytes(self.state.variables())

    @property
    def bytes_so_far(self) -> int:
        """What existing variables already take of `SectionPlan.total_bytes`."""
        if self._on_cpu:
            return self.replicas * self.variable_bytes
        return self.variable_bytes if self.state.device in self.devices else 0

    @property
    def _on_cpu(self) -> bool:
        return self.devices[0].startswith("/cpu")

    @functools.cached_property
    def _graph(self) -> keras.Model:
        """The model, or a graph of this one layer if it cannot be cut."""
        model = self.state.model
        if is_graph(model) and len(model.outputs) == 1:
            return model
        images = keras.Input(self.images.shape[1:])
        return keras.Model(images, model(images))

    @functools.cached_property
    def _calls(self) -> list[cutting.Call]:
        return cutting.calls_of(self._graph)

    @functools.cached_property
    def _boundaries(self) -> dict[int, int]:
        """Input bytes of each possible section, by the index of its first call."""
        found, calls = {0: 0}, self._calls
        for index in range(1, len(calls)):
            tensors = cutting.crossing(self._graph, calls[:index], calls[index:])
            # A mask is an attribute of a tensor, and functions do not pass it on.
            if all(getattr(one, "_keras_mask", None) is None for one in tensors):
                of_image = (tf.TensorSpec(one.shape[1:], one.dtype) for one in tensors)
                found[index] = self.images.shape[0] * sum(map(_size, of_image))
        return found

    @functools.cached_property
    def costs(self) -> list[int]:
        """Bytes kept by each layer call, of workspace, and of compiled operations.

        Traces the model, the loss and the gradients without computing anything. A
        call keeps those of its tensors that the traced gradient function captures.
        """
        (section,) = cutting.cut(self._graph, [])
        kept = [0] * (len(self._calls) + 1)  # The last entry is for the loss.
        found: list[int] = []

        @tf.function(autograph=False)
        def compute(variables: list, start: list, images: tf.Tensor) -> None:
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch(variables)
                given = section, variables, start, [images]
                outputs, _, penalties = self.tower.inference(*given, training=True)
                labels = tf.zeros(images.shape[:1], tf.int64)
                loss = self.tower.loss(outputs[0], labels, penalties)["total_loss"]
            backward = tf.function(lambda: tape.gradient(loss, variables))
            gradients = backward.get_concrete_function()
            forward = tf.compat.v1.get_default_graph().get_operations()
            indices = {op: index for index, op in enumerate(forward)}
            owners = map(_owner, gradients.captured_inputs)
            for tensor in {id(owner): owner for owner in owners}.values():
                if tensor.op.type not in _FOREIGN:
                    call = bisect.bisect_right(section.ends, indices[tensor.op])
                    kept[call] += _size(tensor)
            operations = [*forward, *gradients.graph.get_operations()]
            written = [
                _size(op.inputs[-1]) + _size(op.outputs[0])
                for op in operations
                if op.type == "Conv2DBackpropInput" and op.outputs[0].consumers()
            ]
            found.append(int(_PADDING * max(written, default=0)))
            convolutions = sum("Conv" in op.type for op in operations)
            uses_xla = any(op.node_def.attr["_XlaMustCompile"].b for op in operations)
            found.append(_CONVOLUTION_BYTES * convolutions + _XLA_BYTES * uses_xla)

        variables = [*map(_spec, section.trainable_variables)]
        start = [*map(_spec, section.non_trainable_variables)]
        compute.get_concrete_function(variables, start, self.images)
        return [*kept[:-1], *found]

    def _plan(self, boundaries: Mapping[int, int], count: int) -> SectionPlan:
        *kept, workspace, compiled = self.costs
        gradients = _bytes(self.state.model.trainable_variables)
        tensors, indices = balanced(kept, boundaries, count)
        tensors = max(tensors, _OF_ONE_LAYER * max(self._boundaries.values()))
        # Batches stay in memory until the step ends. Accumulation doubles gradients.
        batch = _size(self.images) + self.images.shape[0] * tf.int64.size
        sums = gradients if self.accumulate == 1 else 2 * gradients
        tower_bytes = self.accumulate * batch + sums + tensors + workspace
        if self._on_cpu:
            total = compiled + _COPIES * gradients + self.bytes_so_far
            total += len(self.devices) * tower_bytes
        else:  # A GPU copies variables from elsewhere for each step.
            held = self.bytes_so_far or _bytes(self.state.model.variables)
            total = held + tower_bytes
        cuts = tuple(self._calls[index].operation.name for index in indices)
        return SectionPlan(indices, cuts, tower_bytes, total)


def _owner(tensor: tf.Tensor) -> tf.Tensor:
    """Follows aliases of a tensor back to the tensor that owns the memory."""
    while tensor.op.type in _ALIASES:
        tensor = tensor.op.inputs[0]
    return tensor


def balanced(
    kept: Sequence[int], boundaries: Mapping[int, int], count: int
) -> tuple[int, tuple[int, ...]]:
    """Chooses cuts that keep the largest section small and recompute little.

    `kept` has the bytes that each call keeps for its gradients. `boundaries` maps the
    index of each call that can begin a section to the bytes of the boundary tensors
    before the call; index 0 to 0. Returns the bytes of the largest of `count` sections,
    and the indices of the calls that begin all sections but the first.
    """
    sums = [0, *itertools.accumulate(kept)]
    total = len(kept)
    around = {**boundaries, total: 0}

    # To run backward, a section needs memory for the tensors that its calls keep, the
    # gradients of its inputs and outputs, and all earlier sections' boundary tensors.
    def section(begin: int, end: int) -> int:
        return sums[end] - sums[begin] + around[begin] + around[end]

    def smallest(begins: Sequence[int]) -> tuple[int, tuple[int, ...]]:
        # The best cuts of the calls after each boundary, into one section, two, and so
        # on. The boundary's tensors stay in memory during all of these sections.
        best: dict[int, tuple[int, tuple[int, ...]]] = {
            begin: (section(begin, total), ()) for begin in begins
        }
        for number in range(1, count):
            best = {
                begin: min(
                    (max(section(begin, end), around[end] + largest), (end, *indices))
                    for end, (largest, indices) in best.items()
                    if end > begin
                )
                for begin in begins[:-number]
            }
        return best[0]

    # The last section is not recomputed, so beginning early saves time.
    begins = sorted(boundaries)
    bound = _ROOM * smallest(begins)[0]
    fewest = bisect.bisect_left(
        range(len(begins)),
        True,
        lo=count,
        key=lambda number: smallest(begins[:number])[0] <= bound,
    )
    return smallest(begins[:fewest])


def _size(tensor: tf.Tensor | tf.TensorSpec) -> int:
    """Returns the bytes of a tensor; 0 if the shape is unknown."""
    return tensor.dtype.size * (tensor.shape.num_elements() or 0)


def _bytes(variables: Iterable[tf.Variable | keras.Variable]) -> int:
    return sum(map(_size, map(_spec, variables)))


def _spec(value: tf.Variable | keras.Variable) -> tf.TensorSpec:
    return tf.TensorSpec(value.shape, value.dtype)


def _gigabytes(count: float) -> str:
    return f"{count / 1e9:,.2f} GB"


def build_sectioned(
    requested: Memory, placement: Placement, planner: Planner
) -> tuple[Tower, str | None]:
    """Builds a tower with the sections that a flag or the model's code requests.

    Returns the tower, and a message about its sections, None if none are requested.
    """
    sections, gigabytes = requested.sections, requested.memory_limit
    if gigabytes is not None and sections != "auto":
        why = f"--memory_limit {gigabytes}: only --sections auto uses this flag"
        raise UsageError(f"{why}. Add --sections auto, or remove --memory_limit.")
    if sections == "1" or (sections is None and not planner.marks):
        return planner.tower, None
    limit = math.inf
    if sections == "auto":
        limit = memory_limit(gigabytes, placement, planner.bytes_so_far)
    plan = planner.choose(sections, limit)
    needed = _gigabytes(plan.total_bytes)
    if not plan.cuts:
        return planner.tower, f"Sections: none; a step takes about {needed} of memory"
    if sys.platform == "linux" and not placement.on_gpus:
        # Without oneDNN's allocator, tensors come from glibc, which keeps freed blocks
        # of up to 32 MB, although the gaps fit no other tensor. Make glibc return
        # freed blocks of 1 MB or more to the system.
        ctypes.CDLL(None).mallopt(-3, 2**20)  # M_MMAP_THRESHOLD in malloc.h.
    return SectionedTower(planner.tower, plan.starts), (
        f"Sections: {len(plan.cuts) + 1}, cut before {', '.join(plan.cuts)}; about "
        f"{needed} of memory instead of {_gigabytes(planner.plain.total_bytes)}"
    )


def memory_limit(gigabytes: float | None, placement: Placement, held: int) -> float:
    """Returns how many bytes a run may use: per GPU, or in total on the CPU.

    `gigabytes` is the value of `--memory_limit`. If None, the limit is what the run has
    `held` already plus 85 % of the free memory; infinity if the latter is unknown.
    """
    if gigabytes:
        return gigabytes * 1e9
    if placement.on_gpus:
        on_gpus = _free_on_gpus()
        return held + _PART_FOR_STEPS * min(on_gpus[name] for name in placement.devices)
    free = hardware.available_memory()
    return math.inf if free is None else held + _PART_FOR_STEPS * free


def _free_on_gpus() -> dict[str, float]:
    """Returns the free bytes of each logical GPU, by names such as `/gpu:0`."""
    sizes: list[float] = []
    for gpu in tf.config.get_visible_devices("GPU"):
        parts = tf.config.get_logical_device_configuration(gpu) or []
        limits = [part.memory_limit for part in parts]
        if any(limits):
            sizes += [megabytes * 2**20 for megabytes in limits]
            continue
        sizes.append(math.inf)
        with contextlib.suppress(OSError, UsageError):  # The driver does not know.
            sizes[-1] = devices.free_memory(gpu)
    return {f"/gpu:{number}": count for number, count in enumerate(sizes)}
