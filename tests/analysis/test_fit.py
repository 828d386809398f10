"""Prices fitted to synthetic steps: known prices are found, also with noise and with kinds of work that never occur."""

from dataclasses import replace

import numpy as np
import pytest

from spanlab.analyses.fit_profile import Point, StepId, cross_validation_errors, fit, hull
from spanlab.core.step import StepFeatures
from spanlab_sim.timings import TERMS

TRUE = dict.fromkeys(TERMS, 0.0) | {
    "step": 2e6,
    "chunk": 3e5,
    "prefill_token": 9e4,
    "prefill_pair": 70.0,
    "decode": 5e5,
    "decode_context": 800.0,
    "captured_state_byte": 1.5,
}


def steps(shapes: int = 20, each: int = 5) -> list[StepFeatures]:
    rng = np.random.default_rng(0)
    features = []
    for _ in range(shapes * each):
        tokens, chunks, decodes = (int(rng.integers(0, most)) for most in (2000, 4, 8))
        context, states = int(rng.integers(1, 4000)) * decodes, int(rng.integers(0, 3))
        pairs = tokens * (tokens + 1) // 2
        features.append(
            StepFeatures(tokens, pairs, chunks, decodes, context, captured_state_bytes=states * 10_000, num_forwards=1)
        )
    return features


def points(prices: dict[str, float], noise=lambda number: (1.0,), each: int = 5) -> list[Point]:
    measured = []
    for number, features in enumerate(steps(each=each)):
        cost = sum(prices[name] * term(features) for name, term in TERMS.items())
        cycles = tuple(round(cost * factor) for factor in noise(number))
        measured.append(Point(StepId(number // each, number % each), "toy", features, cycles))
    return measured


def test_known_prices_come_back():
    fitted = fit(points(TRUE))
    for name, price in TRUE.items():
        assert fitted[name] == pytest.approx(price, rel=1e-6, abs=1e-6), name


def test_steps_of_shapes_left_out_are_then_predicted_exactly():
    assert np.abs(cross_validation_errors(points(TRUE))).max() < 1e-8


def test_a_left_out_shape_does_not_change_its_prediction():
    """Predictions of shape 3, (1 + error) · its times, are those of a fit to all others, whatever its own times."""
    noisy = points(TRUE, lambda number: (1 + 0.2 * np.sin(number),))
    changed = [
        replace(point, cycles_ns=(2 ** (2 + point.step_id.step) * point.cycles_ns[0],))
        if point.step_id.shape == 3
        else point
        for point in noisy
    ]
    for others in (noisy, changed):
        of_others = fit([point for point in others if point.step_id.shape != 3])
        errors = cross_validation_errors(others)[15:20]
        predicted = [sum(of_others[name] * term(point.features) for name, term in TERMS.items()) for point in others]
        measured = [point.mean_ns for point in others[15:20]]
        np.testing.assert_allclose((1 + errors) * measured, predicted[15:20], rtol=1e-12)


def test_a_disturbed_repeat_is_spread_evenly_over_prices():
    disturbed = points(TRUE, lambda number: (1.0, 40.0 if number == 17 else 1.0, 1.0))
    fitted, calm = fit(disturbed), fit(points(TRUE))
    stretched = sum(sum(point.cycles_ns) / 3 for point in disturbed) / sum(point.cycles_ns[0] for point in disturbed)
    assert stretched > 1.01
    assert fitted == pytest.approx({name: price * stretched for name, price in calm.items()}, rel=1e-6)


def test_a_bias_of_one_shape_shows_where_it_is_left_out():
    errors = cross_validation_errors(points(TRUE, lambda number: (1.25 if number < 5 else 1.0,)))
    assert errors[:5] == pytest.approx(-0.2, abs=1e-6)


def test_prices_are_not_negative_and_unobserved_ones_zero():
    fitted = fit(points(TRUE, lambda number: (1 + 0.3 * np.sin(number),)))
    assert min(fitted.values()) >= 0
    assert {fitted[name] for name in ("turned_key", "copied_token", "further_forward")} == {0.0}


def test_the_hull_holds_every_step_and_no_more():
    measured = points(TRUE)
    for name, (low, high) in hull(measured).items():
        values = [getattr(point.features, name) for point in measured]
        assert (low, high) == (min(values), max(values))
