"""Operations of each recurrence, counted while it runs on small states."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from spanlab.recurrences import RECURRENCES

from ..support.models import make_model


@dataclass
class Counter:
    """Operations on numbers; a sum of products of n numbers counts 2 n, as multiply-adds."""

    operations: int = 0

    def of(self, *numbers: float) -> float:
        """One operation, whatever it computes."""
        self.operations += 1
        return sum(numbers)

    def dot(self, numbers: list[float]) -> float:
        """A sum of products."""
        self.operations += 2 * len(numbers)
        return sum(numbers)


Step = Callable[[Counter, list[list[float]]], None]


def delta(count: Counter, state: list[list[float]]) -> None:
    """GatedDeltaNet, and KDA, whose factor differs by row: rows are channels of the key, columns those of the value."""
    rows, columns = len(state), len(state[0])
    for row in range(rows):
        state[row] = [count.of(number) for number in state[row]]  # decay
    old = [count.dot([state[row][column] for row in range(rows)]) for column in range(columns)]
    new = [count.of(value) for value in old]  # value - old one, times the write strength: of the value's channels alone
    for row in range(rows):
        state[row] = [count.of(count.of(number, value)) for number, value in zip(state[row], new, strict=True)]
    for column in range(columns):
        count.dot([state[row][column] for row in range(rows)])


def mamba_2(count: Counter, state: list[list[float]]) -> None:
    """One factor for all numbers of a head: rows are numbers per channel, columns channels."""
    columns = len(state[0])
    written = [count.of(1.0) for _ in range(columns)]  # step size times input
    for row, numbers in enumerate(state):
        decayed = [count.of(number) for number in numbers]
        state[row] = [count.of(count.of(*both)) for both in zip(decayed, written, strict=True)]
    for column in range(columns):
        count.dot([numbers[column] for numbers in state])


def mamba_1(count: Counter, state: list[list[float]]) -> None:
    """As Mamba-2, with a factor of each number: the exponential of the step size times a parameter."""
    for row, numbers in enumerate(state):
        state[row] = [count.of(count.of(number)) for number in numbers]
    mamba_2(count, state)


def short_conv(count: Counter, state: list[list[float]]) -> None:
    """No state: a channel is multiplied before the convolution and behind it."""
    for _ in state[0]:
        count.of(count.of(1.0))


STEPS: dict[str, Step] = {
    "gated_delta_net": delta,
    "kda": delta,
    "mamba_2": mamba_2,
    "mamba_1": mamba_1,
    "short_conv": short_conv,
}


def counted(step: Step, rows: int, columns: int) -> int:
    """Operations of a token on a state of these sizes."""
    count = Counter()
    step(count, [[1.0] * columns for _ in range(rows)])
    return count.operations


@pytest.mark.parametrize("name", RECURRENCES)
def test_operations_per_number_are_those_of_the_recurrence(name: str):
    """What grows with both sizes is counted; what grows with one of them is left out."""
    step, rule = STEPS[name], RECURRENCES[name]
    both = counted(step, 5, 7) - counted(step, 4, 7) - counted(step, 5, 6) + counted(step, 4, 6)
    assert both == rule.per_number
    if not rule.per_number:
        assert rule.flops(0, 7) == counted(step, 1, 7)


@pytest.mark.parametrize("name", RECURRENCES)
def test_a_layer_has_the_operations_of_its_kind(name: str):
    sizes = {"recurrent_value_heads": 2, "recurrent_value_dim": 5, "conv_kernel": 4, "recurrent_layers": 3}
    sizes |= {"recurrent_key_heads": 1, "recurrent_key_dim": 3} if name != "short_conv" else {}
    model = make_model(**sizes, recurrence=name)
    of_state = RECURRENCES[name].per_number * 2 * 3 * 5 if name != "short_conv" else 2 * 2 * 5
    assert model.linear_flops_per_token - 2 * model.active_layer_parameters == 3 * of_state
    channels = 2 * 5 + (2 * 3 if name in ("gated_delta_net", "kda", "mamba_2") else 0)
    assert model.conv_state_bytes == 3 * 3 * channels * model.conv_itemsize
