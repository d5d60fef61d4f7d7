"""Keller Jordan's airbench94 with Muon in PyTorch, by its published rules.

Rules and constants are those of airbench94_muon.py
(https://github.com/KellerJordan/cifar10-airbench); the code is our own. On GPUs it
computes in float16, as published. On CPUs it computes in bfloat16 where that is native,
with float32 variables, and whitens in float32, because bfloat16 has too few bits for
that. Each batch is cropped when it is due: twenty times as fast there as the published
crop of all images at the beginning of an epoch, and as random.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from benchmarks import machine
from benchmarks.rivals.common import insist_on_finite
from benchmarks.rivals.pytorch import by_our_names, full_float32, in_our_order
from cifar10 import hardware
from cifar10.input import datasets

WIDTHS = (64, 256, 256)
EPOCHS = 8
BATCH_SIZE = 2000
_MEAN = (0.4914, 0.4822, 0.4465)
_DEVIATION = (0.2470, 0.2435, 0.2616)
_LABEL_SMOOTHING = 0.2
_TRANSLATION = 2
_WHITENING_IMAGES = 5000
_LEAST_VARIANCE = 5e-4
# Of the epochs, those in which the bias of the whitening convolution is trained.
_WHITENING_PART = 3 / 8
_BIAS_RATE, _HEAD_RATE, _OTHER_MOMENTUM = 0.053, 0.67, 0.85
_DECAY = 2e-6 * BATCH_SIZE
_FILTER_RATE, _FILTER_MOMENTUM = 0.24, 0.6
_QUINTIC = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 3


def start(*, compiled: bool = False, **options: Any) -> Airbench:
    """Builds the training, in the precision that is the fastest on the device.

    Args:
        compiled: Whether the network goes through `torch.compile`.
        **options: Further arguments of `Airbench`.
    """
    torch.set_num_threads(machine.cores())
    torch.set_flush_denormal(True)  # As TensorFlow does.
    torch.backends.cudnn.benchmark = True
    precision = "bfloat16" if hardware.bfloat16_features() else "float32"
    if torch.cuda.is_available():
        precision = "float16"
    training = Airbench(precision, compiled, **options)
    training.warm_up()
    return training


class Network(nn.Module):
    """The network; its layers have our names.

    Attributes:
        activation: The published one is the exact GELU.
    """

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.activation: Callable[[torch.Tensor], torch.Tensor] = functional.gelu
        self.whitening = nn.Conv2d(3, 24, 2)
        self.whitening.weight.requires_grad_(False)
        inputs = 24
        for group, width in enumerate(WIDTHS, 1):
            for part in "ab":
                convolution = nn.Conv2d(inputs, width, 3, padding="same", bias=False)
                # PyTorch's momentum is the part that is new.
                norm = nn.BatchNorm2d(width, eps=1e-12, momentum=1 - 0.6)
                norm.weight.requires_grad_(False)
                self.add_module(f"conv{group}{part}", convolution)
                self.add_module(f"norm{group}{part}", norm)
                inputs = width
        self.head = nn.Linear(inputs, classes, bias=False)

    def forward(self, images: torch.Tensor, trains_whitening: bool) -> torch.Tensor:
        """Computes logits [batch, classes] from images [batch, 3, 32, 32]."""
        bias = self.whitening.bias
        with torch.autocast(images.device.type, enabled=False):
            net = functional.conv2d(
                images,
                self.whitening.weight,
                bias if trains_whitening else bias.detach(),
            )
        if torch.is_autocast_enabled(images.device.type):
            net = net.to(torch.get_autocast_dtype(images.device.type))
        net = self.activation(net)
        for group in range(1, len(WIDTHS) + 1):
            net = functional.max_pool2d(self.get_submodule(f"conv{group}a")(net), 2)
            net = self.activation(self.get_submodule(f"norm{group}a")(net))
            net = self.get_submodule(f"conv{group}b")(net)
            net = self.activation(self.get_submodule(f"norm{group}b")(net))
        net = functional.max_pool2d(net, 3).flatten(1)
        return self.head(net) / net.size(1)

    @torch.no_grad()
    def reset(self) -> None:
        """Draws initial values: filters begin with the identity."""
        for name, layer in self.named_children():
            layer.reset_parameters()
            if name.startswith("conv"):
                nn.init.dirac_(layer.weight[: layer.weight.size(1)])
        self.head.weight.div_(self.head.weight.std())

    @torch.no_grad()
    def whiten(self, images: torch.Tensor) -> None:
        """Sets the first filters to the principal directions of patches of images."""
        patches = images.unfold(2, 2, 1).unfold(3, 2, 1).permute(0, 2, 3, 1, 4, 5)
        flat = patches.reshape(-1, 12).float()
        variances, directions = torch.linalg.eigh(flat.T @ flat / len(flat))
        filters = (directions / (variances + _LEAST_VARIANCE).sqrt()).T
        both = torch.cat([filters, -filters])
        self.whitening.weight.copy_(both.view_as(self.whitening.weight))


class Muon(torch.optim.Optimizer):
    """Momentum made orthogonal, for filters that are kept at the norm sqrt(outputs).

    Args:
        parameters: The filters.
        orthogonalize: As `orthogonalized`.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        orthogonalize: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        super().__init__(parameters, {"lr": _FILTER_RATE})
        self._orthogonalize = orthogonalize

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # noqa: ARG002 - PyTorch's signature.
        """Updates the filters, by Nesterov's rule."""
        for group in self.param_groups:
            for filters in group["params"]:
                gradient, state = filters.grad, self.state[filters]
                if not state:
                    state["momentum"] = torch.zeros_like(gradient)
                momentum = state["momentum"].mul_(_FILTER_MOMENTUM).add_(gradient)
                direction = gradient.add(momentum, alpha=_FILTER_MOMENTUM)
                update = self._orthogonalize(direction.reshape(len(filters), -1))
                filters.mul_(len(filters) ** 0.5 / filters.norm())
                filters.sub_(update.view_as(filters).to(filters.dtype) * group["lr"])


def orthogonalized(matrix: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Brings the singular values near 1, by Newton and Schulz's iteration.

    `dtype` is the type of its products.
    """
    is_tall = matrix.size(0) > matrix.size(1)
    wide = (matrix.T if is_tall else matrix).to(dtype)
    wide = wide / (wide.norm() + 1e-7)
    first, third, fifth = _QUINTIC
    for _ in range(_ITERATIONS):
        product = wide @ wide.T
        wide = first * wide + (third * product + fifth * product @ product) @ wide
    return wide.T if is_tall else wide


class Airbench:
    """A run that can be repeated with other seeds.

    Args:
        precision: "float32"; "bfloat16" for autocast; "float16" for variables of this
            type too, as published for GPUs.
        compiled: Whether the network goes through `torch.compile`.
        dataset: What to train on and to score.
        steps: Updates in which the rates fall to zero; None for the published epochs.
        batch_size: Images in a step.
    """

    def __init__(
        self,
        precision: str,
        compiled: bool,
        *,
        dataset: datasets.Dataset,
        steps: int | None = None,
        batch_size: int = BATCH_SIZE,
    ) -> None:
        self.precision = precision
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        is_half = precision == "float16"
        self._storage = torch.float16 if is_half else torch.float32
        self._autocasts = precision == "bfloat16"
        self._products = torch.float32 if precision == "float32" else torch.bfloat16
        self._batch_size = batch_size
        self._images, self._labels = self._read(dataset, "train")
        self._test_images, self._test_labels = self._read(dataset, "test")
        self._steps = steps or EPOCHS * (len(self._images) // batch_size)
        self._network = Network(dataset.classes).to(
            self._device, self._storage, memory_format=torch.channels_last
        )
        for name, layer in self._network.named_children():
            if name.startswith("norm"):
                layer.float()
        self._called: Any = self._network
        self._orthogonalize: Any = orthogonalized
        if compiled:
            # As published for GPUs; on CPUs it would only try matrix products.
            mode = "max-autotune" if self._device == "cuda" else None
            self._called = torch.compile(self._network, mode=mode, dynamic=False)
            self._orthogonalize = torch.compile(orthogonalized, dynamic=False)

    def warm_up(self) -> None:
        """Compiles everything that the clock is not to see."""
        self._begin(seed=0)
        last = self._steps - 1
        for step, batch in zip((0, last, last), self._batches(3), strict=True):
            self._step(step, *batch)
        self._views(self._test_images[: self._batch_size])

    def run(self, seed: int) -> dict[str, float]:
        """Trains to the end and scores.

        Returns:
            `seconds`, of whitening, training and scoring the views; `accuracy` of the
            images as they are, and `accuracy_with_views`.
        """
        self._begin(seed)
        began = self._now()
        self._network.whiten(self._images[:_WHITENING_IMAGES])
        for step, batch in enumerate(self._batches(self._steps)):
            loss = self._step(step, *batch)
        seconds = self._now() - began
        insist_on_finite(float(loss))
        accuracy = self._accuracy(self._logits)
        began = self._now()
        with_views = self._accuracy(self._views)
        seconds += self._now() - began
        return {
            "seconds": seconds,
            "accuracy": accuracy,
            "accuracy_with_views": with_views,
        }

    def check(
        self, values: dict[str, np.ndarray], images: np.ndarray, labels: np.ndarray
    ) -> tuple[float, dict[str, np.ndarray], dict[str, np.ndarray]]:
        """Returns the loss, the gradients and the values after the first update.

        Everything in float32 and with our approximation of the GELU, so that the
        figures show whether network and rules are the same; the gradients are ours,
        of the mean over the batch. `values` and results have our names and shapes.
        """
        network = Network(self._network.head.out_features).to(self._device)
        network.activation = lambda net: net * torch.sigmoid(1.702 * net)
        variables = by_our_names(network)
        with torch.no_grad():
            for name, value in values.items():
                in_our_order(variables[name]).copy_(torch.from_numpy(value))
        batch = torch.from_numpy(images).permute(0, 3, 1, 2), torch.from_numpy(labels)
        on_device = [part.to(self._device) for part in batch]
        trained = {n: v for n, v in variables.items() if v.requires_grad}
        optimizers = _optimizers(
            network, lambda matrix: orthogonalized(matrix, torch.float32)
        )
        with full_float32():
            loss = self._loss(network, on_device[0], on_device[1].long(), True, False)
            loss.backward()
            # A copy: the optimizers change the values under them.
            gradients = {n: _numbers(v.grad) / BATCH_SIZE for n, v in trained.items()}
            for optimizer in optimizers:
                optimizer.step()
        updated = {name: _numbers(v) for name, v in trained.items()}
        return float(loss.detach()) / BATCH_SIZE, gradients, updated

    def _begin(self, seed: int) -> None:
        torch.manual_seed(seed)
        self._network.reset()
        self._network.zero_grad()
        self._optimizers = _optimizers(
            self._network, lambda matrix: self._orthogonalize(matrix, self._products)
        )
        self._rates = [
            (group, group["lr"])
            for optimizer in self._optimizers
            for group in optimizer.param_groups
        ]

    def _step(
        self, step: int, images: torch.Tensor, labels: torch.Tensor
    ) -> torch.Tensor:
        """Updates once; returns the loss of a mean image."""
        whitening_steps = _WHITENING_PART * self._steps
        trains_whitening = step < math.ceil(whitening_steps)
        self._network.train()
        loss = self._loss(self._called, images, labels, trains_whitening)
        loss.backward()
        for place, (group, rate) in enumerate(self._rates):
            length = self._steps if place else whitening_steps
            group["lr"] = rate * (1 - step / length)
        for optimizer in self._optimizers:
            optimizer.step()
        self._network.zero_grad()
        return loss.detach() / BATCH_SIZE

    def _loss(
        self,
        network: Callable[..., torch.Tensor],
        images: torch.Tensor,
        labels: torch.Tensor,
        trains_whitening: bool,
        autocasts: bool | None = None,
    ) -> torch.Tensor:
        """Returns the loss summed over a batch, or as if it were a whole one."""
        enabled = self._autocasts if autocasts is None else autocasts
        with torch.autocast(self._device, torch.bfloat16, enabled=enabled):
            logits = network(images, trains_whitening)
        mean = functional.cross_entropy(
            logits.float(), labels, label_smoothing=_LABEL_SMOOTHING
        )
        return mean * BATCH_SIZE

    def _batches(self, steps: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yields batches of distorted images.

        Half of the images, drawn once, are mirrored in even epochs, the others in odd
        ones. All are moved by up to two pixels.
        """
        count, size = len(self._images), self._images.size(-1)
        drawn = {"device": self._device}
        mirrored = (torch.rand(count, **drawn) < 0.5).view(-1, 1, 1, 1)
        images = torch.where(mirrored, self._images.flip(-1), self._images)
        padded = functional.pad(images, (_TRANSLATION,) * 4, "reflect")
        windows = padded.unfold(2, size, 1).unfold(3, size, 1)
        per_epoch = count // self._batch_size
        for step in range(steps):
            epoch, place = divmod(step, per_epoch)
            if not place:
                order = torch.randperm(count, **drawn)
                moved = torch.randint(2 * _TRANSLATION + 1, (2, count), **drawn)
            chosen = order[place * self._batch_size :][: self._batch_size]
            batch = windows[chosen, :, moved[0, chosen], moved[1, chosen]]
            batch = batch.flip(-1) if epoch % 2 else batch
            batch = batch.contiguous(memory_format=torch.channels_last)
            yield batch, self._labels[chosen]

    def _logits(self, images: torch.Tensor) -> torch.Tensor:
        with torch.autocast(self._device, torch.bfloat16, enabled=self._autocasts):
            logits = self._called(images, False)
        return logits.float().clone()  # A compiled network writes over its results.

    def _views(self, images: torch.Tensor) -> torch.Tensor:
        """Averages over six views: moved and mirrored, weighed as published."""
        self._network.eval()
        size = images.size(-1)
        padded = functional.pad(images, (1,) * 4, "reflect")
        moved = (padded[:, :, :size, :size], 0.25), (padded[:, :, 2:, 2:], 0.25)
        with torch.no_grad():
            return sum(
                weight
                / 2
                * self._logits(seen.contiguous(memory_format=torch.channels_last))
                for view, weight in ((images, 0.5), *moved)
                for seen in (view, view.flip(-1))
            )

    @torch.no_grad()
    def _accuracy(self, logits_of: Callable[[torch.Tensor], torch.Tensor]) -> float:
        self._network.eval()
        batches = self._test_images.split(self._batch_size)
        predictions = torch.cat([logits_of(batch).argmax(1) for batch in batches])
        return (predictions == self._test_labels).float().mean().item()

    def _read(
        self, dataset: datasets.Dataset, split: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns normalized images [count, 3, 32, 32], channels last, and labels."""
        images, labels = (torch.from_numpy(of) for of in dataset.read(split))
        scaled = images.to(self._device).to(self._storage) / 255
        normal = (scaled - scaled.new_tensor(_MEAN)) / scaled.new_tensor(_DEVIATION)
        return normal.permute(0, 3, 1, 2), labels.long().to(self._device)

    def _now(self) -> float:
        if self._device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def _optimizers(
    network: Network, orthogonalize: Callable[[torch.Tensor], torch.Tensor]
) -> list[torch.optim.Optimizer]:
    """Returns SGD for biases and head, the bias of the whitening first, and Muon."""
    kinds: dict[str, list[nn.Parameter]] = {"norm": [], "conv": []}
    for name, parameter in network.named_parameters():
        if name[:4] in kinds and parameter.requires_grad:
            kinds[name[:4]].append(parameter)
    groups = [
        {"params": parameters, "lr": rate, "weight_decay": _DECAY / rate}
        for parameters, rate in (
            ([network.whitening.bias], _BIAS_RATE),
            (kinds["norm"], _BIAS_RATE),
            ([network.head.weight], _HEAD_RATE),
        )
    ]
    others = torch.optim.SGD(
        groups, momentum=_OTHER_MOMENTUM, nesterov=True, fused=True
    )
    return [others, Muon(kinds["conv"], orthogonalize)]


def _numbers(values: torch.Tensor) -> np.ndarray:
    return in_our_order(values.detach()).cpu().numpy().copy()
