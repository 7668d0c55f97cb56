"""The numbers of live, by hand and by definition."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import pytest
import torch

from kvreplay.live import texts
from kvreplay.live.metrics import Value, drifted, predicted, slope
from kvreplay.live.passes import Trajectory
from kvreplay.live_metrics import METRICS


def by_name(values: Iterable[Value]) -> dict[tuple[str, str, int | None], float]:
    return {(one.metric, one.variant, one.layer): one.value for one in values}


def logs(*rows: list[float]) -> torch.Tensor:
    return torch.tensor([list(rows)], dtype=torch.float64).log()


def test_predictions_by_hand() -> None:
    p = logs([0.5, 0.25, 0.25], [0.8, 0.1, 0.1], [0.2, 0.3, 0.5])
    q = logs([0.25, 0.5, 0.25], [0.8, 0.1, 0.1], [0.1, 0.1, 0.8])
    found = by_name(
        predicted(Trajectory(log_probabilities=p), Trajectory(log_probabilities=q), 0, torch.tensor([0, 1]))
    )
    first = 0.5 * math.log(2) - 0.25 * math.log(2)
    last = 0.2 * math.log(2) + 0.3 * math.log(3) + 0.5 * math.log(0.625)
    assert found["kld", "", None] == pytest.approx((first + last) / 3)
    assert found["kld", "median", None] == pytest.approx(sorted([first, 0, last])[1])
    assert found["kld", "p99", None] == pytest.approx(np.percentile([first, 0, last], 99))
    assert found["same_top_p", "", None] == pytest.approx(2 / 3)
    assert found["rms_dp", "", None] == pytest.approx(math.sqrt((0.25**2 + 0) / 2))
    assert found["nll_increase", "", None] == pytest.approx(math.log(2) / 2)
    assert found["perplexity_ratio", "", None] == pytest.approx(math.sqrt(2))


def test_one_token_has_no_true_next_one() -> None:
    one = Trajectory(log_probabilities=logs([0.5, 0.5]))
    found = by_name(predicted(one, one, 0, torch.tensor([], dtype=torch.long)))
    assert found["kld", "", None] == 0 and found["same_top_p", "", None] == 1
    assert math.isnan(found["nll_increase", "", None]) and math.isnan(found["rms_dp", "", None])


def test_drift_by_hand() -> None:
    """Two layers, two tokens, one head; the head of the first token gives 0 in layer 7."""
    reference = Trajectory(
        hidden=[torch.tensor([[[3.0, 4], [0, 2]]]), torch.tensor([[[1.0, 0], [0, 1]]])],
        attention={7: torch.tensor([[[[0.0, 0]], [[2.0, 0]]]]), 9: torch.tensor([[[[1.0, 0]], [[0.0, 5]]]])},
    )
    cell = Trajectory(
        hidden=[torch.tensor([[[3.0, 4.5], [0, 2.2]]]), torch.tensor([[[1.0, 0.2], [0.4, 1]]])],
        attention={7: torch.tensor([[[[1.0, 1]], [[1.0, 0]]]]), 9: torch.tensor([[[[1.0, 1]], [[0.0, 5]]]])},
    )
    found = by_name(drifted(reference, cell, 0))
    assert found["hidden_drift", "", 7] == pytest.approx(0.1) and found["hidden_drift", "", 9] == pytest.approx(0.3)
    assert found["hidden_drift", "", None] == pytest.approx(0.2)
    assert found["live_output_error", "", 7] == pytest.approx(0.5)
    assert found["live_output_error", "", 9] == pytest.approx(0.5)
    assert found["error_growth", "layers", None] == pytest.approx(math.log(3), rel=1e-6)
    assert found["error_growth", "steps", None] == pytest.approx(math.log(2), rel=1e-6)


def test_slopes() -> None:
    assert slope(np.exp(0.25 * np.arange(5) - 3)) == pytest.approx(0.25)
    assert math.isnan(slope(np.array([1.0]))) and math.isnan(slope(np.array([1.0, 0])))


def test_texts() -> None:
    assert texts.normalised("  The cat, a HAT  and an Owl!") == "cat hat and owl"
    answers = ["the blue house", "Rome"]
    found = by_name(texts.answered("It is The Blue House.", answers))
    assert found["exact_match", "", None] == 0 and found["contains", "", None] == 0.5
    assert found["f1", "", None] == pytest.approx(2 * 2 / (4 + 2))
    assert found["rouge_l", "", None] == pytest.approx(2 * 0.6 * 1 / 1.6)
    assert by_name(texts.answered("rome!", answers))["exact_match", "", None] == 1
    assert texts.repetition([1, 2, 3, 4, 1, 2, 3, 4]) == pytest.approx(1 / 5)
    assert math.isnan(texts.repetition([1, 2, 3]))
    assert texts.same_tokens([1, 2, 3], [1, 2, 4]) == 2 and texts.same_tokens([1, 2], [1, 2, 3]) == 2


def test_every_number_has_a_card() -> None:
    cards = {(metric.name, variant) for metric in METRICS for variant in metric.variants}
    one = Trajectory([torch.ones(1, 2, 2)] * 2, {0: torch.ones(1, 2, 1, 2), 1: torch.ones(1, 2, 1, 2)},
                     logs([0.5, 0.5], [0.5, 0.5]))  # fmt: skip
    values = [*predicted(one, one, 0, torch.tensor([1])), *drifted(one, one, 0), *texts.answered("a", ["a"]),
              *texts.written([1], [1])]  # fmt: skip
    assert {(value.metric, value.variant) for value in values} == cards
