"""Data-parallel training with NumPy and allreduced, on scikit-learn's handwritten digits. Made to be copied.

Every rank holds the same network and trains it on its share of each mini-batch; the gradients are averaged over all
ranks with one ``all_reduce_many`` each step. Any launcher will do:

    allreduced run --nodes 3 --ranks-per-node 2 -- python -m allreduced.cli.demo_training
    torchrun --nproc-per-node 4 -m allreduced.cli.demo_training

What is special about data-parallel training is in :func:`train`; the rest is a small network, and three checks of what
came out (:func:`check`).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from allreduced.client import Communicator, connect

Floats: TypeAlias = NDArray[np.float64]
Integers: TypeAlias = NDArray[np.int64]
Average: TypeAlias = Callable[[list[Floats]], list[Floats]]

LEAST_ACCURACY = 0.95
LARGEST_DIFFERENCE = 1e-5


@dataclass(frozen=True, slots=True)
class Plan:
    """What is trained and how. ``batch``: samples of one step over all ranks, at most; all get equal shares."""

    epochs: int = 30
    batch: int = 120
    hidden: int = 128
    rate: float = 0.1
    momentum: float = 0.9
    seed: int = 7


@dataclass(frozen=True, slots=True)
class Digits:
    """Images as rows of 64 numbers from 0 to 1, labels 0 to 9, and a part of both that is held out of training."""

    images: Floats
    labels: Integers
    held_out_images: Floats
    held_out_labels: Integers


@dataclass(frozen=True, slots=True)
class Epoch:
    """How an epoch went. ``loss``: mean over its steps and all ranks. ``reduced``: bytes all-reduced by each rank."""

    epoch: int
    epochs: int
    loss: float
    accuracy: float
    steps_per_second: float
    reduced: int
    algbw: float


@dataclass(frozen=True, slots=True)
class Check:
    """A check of the outcome: what was found, in words, and whether it is right."""

    text: str
    passed: bool


def load_digits(seed: int) -> Digits:
    """Return the data set, shuffled; a fifth is held out."""
    from sklearn.datasets import load_digits as load

    images, labels = load(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(labels))
    images, labels = images[order] / 16.0, labels[order].astype(np.int64)
    cut = len(labels) // 5
    return Digits(images[cut:], labels[cut:], images[:cut], labels[:cut])


class Network:
    """64 inputs, one hidden layer with ReLU, softmax over 10 classes; ``parameters`` are four arrays of float64."""

    def __init__(self, hidden: int, seed: int) -> None:
        random = np.random.default_rng(seed)
        self.parameters: list[Floats] = [
            random.normal(0.0, np.sqrt(2.0 / 64), (64, hidden)),
            np.zeros(hidden),
            random.normal(0.0, np.sqrt(1.0 / hidden), (hidden, 10)),
            np.zeros(10),
        ]

    def loss_and_gradients(self, images: Floats, labels: Integers) -> tuple[float, list[Floats]]:
        """Return the mean cross-entropy over the samples, and its gradients in the order of ``parameters``."""
        hidden, probabilities = self._forward(images)
        rows = np.arange(len(labels))
        loss = -float(np.mean(np.log(probabilities[rows, labels])))
        error = probabilities
        error[rows, labels] -= 1.0
        error /= len(labels)
        back = (error @ self.parameters[2].T) * (hidden > 0.0)
        return loss, [images.T @ back, back.sum(axis=0), hidden.T @ error, error.sum(axis=0)]

    def accuracy(self, images: Floats, labels: Integers) -> float:
        """Return the share of samples that the network gets right."""
        _, probabilities = self._forward(images)
        return float(np.mean(probabilities.argmax(axis=1) == labels))

    def _forward(self, images: Floats) -> tuple[Floats, Floats]:
        weights, bias, out_weights, out_bias = self.parameters
        hidden = np.maximum(images @ weights + bias, 0.0)
        scores = hidden @ out_weights + out_bias
        exponentials = np.exp(scores - scores.max(axis=1, keepdims=True))
        return hidden, exponentials / exponentials.sum(axis=1, keepdims=True)


def batches(plan: Plan, samples: int, epoch: int, size: int) -> Iterator[Integers]:
    """Yield the sample numbers of each mini-batch of an epoch, the same on all ranks and divisible by ``size``."""
    order = np.random.default_rng((plan.seed, epoch)).permutation(samples)
    batch = max(1, plan.batch // size) * size
    for start in range(0, samples - batch + 1, batch):
        yield order[start : start + batch]


def train(comm: Communicator, data: Digits, plan: Plan, report: Callable[[Epoch], None]) -> Network:
    """Train over all ranks of ``comm``; every rank returns the same network."""
    # Only rank 0's first parameters count: whatever the others drew is overwritten.
    network = Network(plan.hidden, plan.seed + comm.rank)
    network.parameters = [comm.broadcast(parameter, root=0) for parameter in network.parameters]
    optimizer = Momentum(network, plan)
    for epoch in range(1, plan.epochs + 1):
        losses, reduced, in_all_reduce, begin = [], 0, 0.0, time.perf_counter()
        for batch in batches(plan, len(data.labels), epoch, comm.size):
            mine = batch[comm.rank :: comm.size]
            loss, gradients = network.loss_and_gradients(data.images[mine], data.labels[mine])
            # The loss rides along. All shares are of one size, so the mean of the ranks is that of the batch.
            tensors = [*gradients, np.array([loss])]
            start = time.perf_counter()
            *gradients, mean_loss = comm.all_reduce_many(tensors, op="mean")
            in_all_reduce += time.perf_counter() - start
            optimizer.step(gradients)
            losses.append(float(mean_loss[0]))
            reduced += sum(tensor.nbytes for tensor in tensors)
        if comm.rank == 0:
            report(
                Epoch(
                    epoch=epoch,
                    epochs=plan.epochs,
                    loss=float(np.mean(losses)),
                    accuracy=network.accuracy(data.held_out_images, data.held_out_labels),
                    steps_per_second=len(losses) / (time.perf_counter() - begin),
                    reduced=reduced,
                    algbw=reduced / in_all_reduce,
                )
            )
    return network


def train_alone(data: Digits, plan: Plan, size: int) -> Network:
    """Train in this process only, over the same batches as ``size`` ranks together."""
    network = Network(plan.hidden, plan.seed)
    optimizer = Momentum(network, plan)
    for epoch in range(1, plan.epochs + 1):
        for batch in batches(plan, len(data.labels), epoch, size):
            _, gradients = network.loss_and_gradients(data.images[batch], data.labels[batch])
            optimizer.step(gradients)
    return network


class Momentum:
    """Stochastic gradient descent with momentum, on the parameters of a network."""

    def __init__(self, network: Network, plan: Plan) -> None:
        self._network = network
        self._plan = plan
        self._speed = [np.zeros_like(parameter) for parameter in network.parameters]

    def step(self, gradients: Sequence[Floats]) -> None:
        """Move the parameters against the gradients."""
        parameters = self._network.parameters
        for index, (speed, gradient) in enumerate(zip(self._speed, gradients, strict=True)):
            speed *= self._plan.momentum
            speed -= self._plan.rate * gradient
            parameters[index] = parameters[index] + speed


def digest(parameters: Sequence[Floats]) -> Integers:
    """Return SHA-256 of all bits of the parameters, as four words."""
    bits = b"".join(np.ascontiguousarray(parameter).tobytes() for parameter in parameters)
    return np.frombuffer(hashlib.sha256(bits).digest(), np.int64).copy()


def gather_digests(comm: Communicator, parameters: Sequence[Floats]) -> Integers:
    """Return the digests of all ranks, a row each: the sum of tables in which each rank filled in its row."""
    table = np.zeros((comm.size, 4), np.int64)
    table[comm.rank] = digest(parameters)
    return comm.all_reduce(table, op="sum")


def check(digests: Integers, network: Network, alone: Network, data: Digits) -> list[Check]:
    """Return the three checks: identical on all ranks, equal to a single process, and good at its task."""
    names = [hashlib.sha256(row.tobytes()).hexdigest()[:12] for row in digests]
    identical = len(set(names)) == 1
    difference = max(
        float(np.abs(mine - other).max()) for mine, other in zip(network.parameters, alone.parameters, strict=True)
    )
    accuracy = network.accuracy(data.held_out_images, data.held_out_labels)
    return [
        Check(
            f"parameters are bit-identical on all {len(names)} ranks: "
            + (f"digest {names[0]}" if identical else ", ".join(f"rank {i} {name}" for i, name in enumerate(names))),
            identical,
        ),
        Check(
            f"largest difference to a single process over the same batches: {difference:.1e}"
            f" (at most {LARGEST_DIFFERENCE:g})",
            difference <= LARGEST_DIFFERENCE,
        ),
        Check(
            f"accuracy on {len(data.held_out_labels)} held-out digits: {accuracy:.4f} (at least {LEAST_ACCURACY})",
            accuracy >= LEAST_ACCURACY,
        ),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Train as one rank of a job; rank 0 reports and checks. Return 1 where a check fails, on all ranks."""
    parser = argparse.ArgumentParser(description="Train a small network on scikit-learn's digits, data-parallel.")
    parser.add_argument("--epochs", type=int, default=Plan().epochs, help="passes over the data (default: %(default)s)")
    plan = Plan(epochs=parser.parse_args(argv).epochs)
    report = Report()
    data = load_digits(plan.seed)
    with connect() as comm:
        network = train(comm, data, plan, report.epoch)
        digests = gather_digests(comm, network.parameters)
        passed = np.array([True])
        if comm.rank == 0:
            checks = check(digests, network, train_alone(data, plan, comm.size), data)
            for item in checks:
                report.check(item)
            passed[0] = all(item.passed for item in checks)
        passed = comm.broadcast(passed, root=0)
    return 0 if passed[0] else 1


class Report:
    """Says how it goes: as JSON lines to the channel that `allreduced demo` listens on, else as plain text."""

    def __init__(self) -> None:
        self._channel = int(os.environ.get("ALLREDUCED_CHANNEL", "-1"))

    def epoch(self, epoch: Epoch) -> None:
        """Report an epoch."""
        self._say("epoch", asdict(epoch), epoch_text(epoch))

    def check(self, check: Check) -> None:
        """Report a check."""
        self._say("check", asdict(check), check_text(check))

    def _say(self, kind: str, facts: dict[str, object], text: str) -> None:
        if self._channel >= 0:
            os.write(self._channel, json.dumps({kind: facts}).encode() + b"\n")
        else:
            sys.stdout.write(text + "\n")
            sys.stdout.flush()


def epoch_text(epoch: Epoch) -> str:
    """Return an epoch as a line of text."""
    return (
        f"epoch {epoch.epoch:3}/{epoch.epochs}  loss {epoch.loss:.4f}  accuracy {epoch.accuracy:.4f}"
        f"  {epoch.steps_per_second:7.1f} steps/s  {epoch.reduced / 1e6:6.2f} MB reduced"
        f"  algbw {epoch.algbw / 1e6:7.2f} MB/s"
    )


def check_text(check: Check) -> str:
    """Return a check as a line of text."""
    return f"{'ok  ' if check.passed else 'FAIL'}  {check.text}"


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends all ranks without a traceback of each
    sys.exit(main())
