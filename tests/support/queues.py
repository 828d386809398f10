"""Closed forms that a queueing simulator must meet."""


def erlang_c(servers: int, offered: float) -> float:
    """Probability that an arrival to M/M/c waits; `offered` is λ · E[S] in erlangs, below `servers`.

    By Erlang B, B(0) = 1, B(k) = a · B(k − 1) / (k + a · B(k − 1)), then C = B / (1 − ρ · (1 − B)): no factorials.
    """
    blocked = 1.0
    for k in range(1, servers + 1):
        blocked = offered * blocked / (k + offered * blocked)
    return blocked / (1 - offered / servers * (1 - blocked))


def mg1_wait(rate: float, mean_s: float, second_moment: float) -> float:
    """Mean wait in queue of M/G/1, seconds (Pollaczek-Khinchine): λ · E[S²] / (2 · (1 − λ · E[S])).

    E[S²] is mean_s² for constant service (M/D/1) and 2 · mean_s² for exponential (M/M/1).
    """
    return rate * second_moment / (2 * (1 - rate * mean_s))


def mmc_wait(rate: float, mean_s: float, servers: int) -> float:
    """Mean wait in queue of M/M/c, seconds: erlang_c(c, λ · E[S]) / (c / E[S] − λ)."""
    return erlang_c(servers, rate * mean_s) / (servers / mean_s - rate)
