"""Windows of a stream, and speedups and shares in them, by hand and by brute force."""

import numpy as np
import pytest

from spanlab.analyses.decay import WINDOWS, Stream, decay_of


def make_stream(seed: int) -> Stream:
    draw = np.random.default_rng(seed)
    mixed = draw.permutation(np.repeat([True, False], [20, 80]))
    return Stream(draw.permutation(110), np.append(np.zeros(10, bool), mixed))


def make_run(stream: Stream, ttft_by_id, reused_by_id) -> dict[str, np.ndarray]:
    """Records in the order in which requests finished, which differs from the order of arrival."""
    ids = np.random.default_rng(1).permutation(stream.ids)
    arrived = ids * 0.5
    return {
        "request_id": ids,
        "arrived_s": arrived,
        "first_token_s": arrived + ttft_by_id[ids],
        "prompt_tokens": 10 + ids,
        "reused_tokens": reused_by_id[ids],
        "lost_never_seen": 9 + ids - reused_by_id[ids],
    }


def test_windows_hold_as_many_novel_requests_each():
    stream = make_stream(0)
    windows = stream.windows
    first = int(np.argmax(stream.novel))
    assert set(windows[: first // 2]) == {-1}
    assert set(windows[first // 2 : first]) == {0}
    assert [int((stream.novel & (windows == window)).sum()) for window in range(WINDOWS + 1)] == [0, *[2] * WINDOWS]
    assert (np.diff(windows) >= 0).all()


def test_numbers_of_windows_equal_brute_force():
    streams, draw = [make_stream(seed) for seed in range(3)], np.random.default_rng(7)
    base, faster = ([draw.uniform(1, 2, 110) for _ in streams] for _ in range(2))
    reused = [draw.integers(0, 9, 110) for _ in streams]
    runs = [make_run(*arguments) for arguments in zip(streams, faster, reused, strict=True)]
    decay = decay_of(streams, runs, [make_run(*arguments) for arguments in zip(streams, base, reused, strict=True)])
    for window in range(WINDOWS + 1):
        ratios, overall, shares = [], [], []
        for stream, slow, fast, tokens in zip(streams, base, faster, reused, strict=True):
            every = stream.ids[stream.windows == window]
            known = stream.ids[(stream.windows == window) & ~stream.novel]
            ratios.append(slow[known].sum() / fast[known].sum())
            overall.append(slow[every].sum() / fast[every].sum())
            shares.append(tokens[known].sum() / (10 + known).sum())
        assert decay.speedup[window].mean == pytest.approx(np.exp(np.log(ratios).mean()))
        assert decay.overall[window].mean == pytest.approx(np.exp(np.log(overall).mean()))
        assert decay.reused[window].mean == pytest.approx(np.mean(shares))
        assert decay.speedup[window].low < decay.speedup[window].mean < decay.speedup[window].high
    assert decay.novel == [0.0, *np.arange(2.0, 21.0, 2.0)]


def test_a_gain_falls_after_its_first_low_window():
    stream = make_stream(0)
    late = stream.windows >= 4
    ttft = np.empty(110)
    ttft[stream.ids] = np.where(late, 1.0, 0.5)
    nothing = np.zeros(110, int)
    base = make_run(stream, np.ones(110), nothing)
    decay = decay_of([stream], [make_run(stream, ttft, nothing)], [base])
    assert decay.falls_after == 8
    assert decay.speedup[3].mean == pytest.approx(2)
    assert decay.speedup[0].low is None
    assert decay_of([stream], [make_run(stream, np.full(110, 0.5), nothing)], [base]).falls_after is None
    assert decay_of([stream], [base], [base]).falls_after == 0


def test_a_window_without_known_requests_is_refused():
    make_stream(0).check(0)
    alternating = np.append([False], np.repeat([True, False], [20, 80]))
    with pytest.raises(ValueError, match=r"^analyses=decay with 20 novel of 101 requests under seed 3: expected known"):
        Stream(np.arange(101), alternating).check(3)
    with pytest.raises(ValueError, match=r"^analyses=decay with 5 novel of 60 requests under seed 0: expected known"):
        Stream(np.arange(60), np.arange(60) % 12 == 11).check(0)


def test_changes_of_loss_are_means_over_known_requests():
    streams, draw = [make_stream(seed) for seed in range(3)], np.random.default_rng(3)
    ones, zeros = np.ones(110), np.zeros(110, np.int64)
    runs = [make_run(stream, ones, zeros) for stream in streams]
    changes = [draw.normal(size=110) for _ in streams]
    decay = decay_of(streams, runs, runs, changes)
    for window in range(WINDOWS + 1):
        means = []
        for stream, change in zip(streams, changes, strict=True):
            known_changes = [
                value
                for value, index, novel in zip(change, stream.windows, stream.novel, strict=True)
                if index == window and not novel
            ]
            means.append(np.mean(known_changes))
        assert decay.change[window].mean == pytest.approx(np.mean(means))
    assert decay_of(streams, runs, runs).change == []
