from __future__ import annotations

import io
import json
import os

import numpy as np
import pytest

from allreduced.cli.demo_training import (
    Check,
    Digits,
    Epoch,
    Network,
    Plan,
    Report,
    batches,
    check,
    check_text,
    digest,
    epoch_text,
    load_digits,
    train_alone,
)


@pytest.fixture(scope="module")
def data() -> Digits:
    return load_digits(seed=7)


def test_mini_batches_are_the_same_everywhere_and_have_equal_shares() -> None:
    plan = Plan()
    for size in (1, 2, 6, 7, 200):
        found = list(batches(plan, 1438, 1, size))
        assert all(len(batch) % size == 0 for batch in found)
        assert len({int(sample) for batch in found for sample in batch}) == sum(map(len, found))
        again = list(batches(plan, 1438, 1, size))
        assert all(np.array_equal(left, right) for left, right in zip(found, again, strict=True))
    assert not np.array_equal(next(batches(plan, 1438, 1, 6)), next(batches(plan, 1438, 2, 6)))


def test_gradients_are_those_of_the_loss(data: Digits) -> None:
    network = Network(8, 1)
    images, labels = data.images[:12], data.labels[:12]
    _, gradients = network.loss_and_gradients(images, labels)
    for parameter, gradient in zip(network.parameters, gradients, strict=True):
        where = np.unravel_index(int(np.argmax(np.abs(gradient))), gradient.shape)
        before = parameter[where]
        parameter[where] = before + 1e-6
        above, _ = network.loss_and_gradients(images, labels)
        parameter[where] = before - 1e-6
        below, _ = network.loss_and_gradients(images, labels)
        parameter[where] = before
        assert (above - below) / 2e-6 == pytest.approx(gradient[where], rel=1e-4)


def test_the_mean_over_equal_shares_is_the_gradient_of_the_batch(data: Digits) -> None:
    network = Network(8, 1)
    _, whole = network.loss_and_gradients(data.images[:24], data.labels[:24])
    shares = [network.loss_and_gradients(data.images[rank:24:6], data.labels[rank:24:6])[1] for rank in range(6)]
    for index, gradient in enumerate(whole):
        np.testing.assert_allclose(np.mean([share[index] for share in shares], axis=0), gradient, atol=1e-14)


def test_a_single_process_reaches_the_accuracy_with_room_to_spare(data: Digits) -> None:
    network = train_alone(data, Plan(epochs=10), 6)
    assert network.accuracy(data.held_out_images, data.held_out_labels) >= 0.96


def test_good_outcomes_pass_all_checks(data: Digits) -> None:
    network = train_alone(data, Plan(epochs=8), 6)
    digests = np.array([digest(network.parameters)] * 6)
    found = check(digests, network, network, data)
    assert [item.passed for item in found] == [True, True, True]
    assert "on all 6 ranks" in found[0].text
    assert "0.0e+00" in found[1].text


def test_each_fault_fails_its_check(data: Digits) -> None:
    alone = train_alone(data, Plan(epochs=1), 6)
    other = Network(128, 99)  # untrained
    nearly = [parameter.copy() for parameter in alone.parameters]
    nearly[3][0] = np.nextafter(nearly[3][0], 1.0)  # a single bit
    digests = np.array([digest(alone.parameters), digest(nearly)])
    found = check(digests, other, alone, data)
    assert [item.passed for item in found] == [False, False, False]
    assert "rank 0" in found[0].text
    assert "rank 1" in found[0].text


EPOCH = Epoch(3, 30, loss=0.25, accuracy=0.9, steps_per_second=100.0, reduced=2_000_000, algbw=5e6)


def test_lines_for_people_have_all_columns() -> None:
    assert epoch_text(EPOCH) == (
        "epoch   3/30  loss 0.2500  accuracy 0.9000    100.0 steps/s    2.00 MB reduced  algbw    5.00 MB/s"
    )
    assert check_text(Check("as it should", passed=True)) == "ok    as it should"
    assert check_text(Check("not so", passed=False)) == "FAIL  not so"


def test_reports_go_to_the_channel_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    monkeypatch.setenv("ALLREDUCED_CHANNEL", str(writer))
    with os.fdopen(reader, "rb") as lines:
        report = Report()
        report.epoch(EPOCH)
        report.check(Check("x", passed=True))
        os.close(writer)
        first, second = (json.loads(line) for line in lines)
    assert Epoch(**first["epoch"]) == EPOCH
    assert second == {"check": {"text": "x", "passed": True}}


def test_reports_are_plain_lines_without_a_channel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ALLREDUCED_CHANNEL", raising=False)
    out = io.StringIO()
    monkeypatch.setattr("sys.stdout", out)
    Report().check(Check("x", passed=False))
    assert out.getvalue() == "FAIL  x\n"
