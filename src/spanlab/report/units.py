"""Numbers as short text."""

from __future__ import annotations

import math
from collections.abc import Callable

MISSING = "–"
Ends = tuple[float, float]


def percent(rate: float | None, ends: Ends | None = None) -> str:
    """A share in percent, with the ends of its interval where there is one: 63.1 %, 63.1 [60.2, 65.9] %."""
    if rate is None:
        return MISSING
    between = "" if ends is None else f" [{100 * ends[0]:.1f}, {100 * ends[1]:.1f}]"
    return f"{100 * rate:.1f}{between} %"


def count(value: float) -> str:
    """A large count with four digits: 15.53 M."""
    for size, unit in ((1e12, " T"), (1e9, " G"), (1e6, " M"), (1e4, " k")):
        if abs(value) >= size:
            scale = 1e3 if unit == " k" else size
            return f"{value / scale:#.4g}{unit}".replace(". ", " ")
    return f"{value:.0f}"


def byte_size(value: float) -> str:
    """Bytes in binary units: 11.2 GiB."""
    unit = "B"
    for larger in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        if abs(value) < 999.5:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} B" if unit == "B" else f"{significant(value)} {unit}"


def seconds(value: float | None, ends: Ends | None = None) -> str:
    """A duration, with the ends of its interval where there is one: 412 ms, 1.52 [1.44, 1.61] s."""
    if value is None:
        return MISSING
    scale, unit = (1e3, "ms") if abs(value) < 1 else (1.0, "s")
    return f"{_with_ends(scale, value, ends)} {unit}"


def ratio(value: float | None, ends: Ends | None = None) -> str:
    """A factor, with the ends of its interval where there is one: 3.41 [3.29, 3.53] ×."""
    if value is None:
        return MISSING
    return f"{_with_ends(1.0, value, ends)} ×"


def nats(value: float, ends: Ends | None = None) -> str:
    """A loss with three decimals, and with the ends of its interval where there is one: 0.412 [0.398, 0.430]."""
    return f"{value:.3f}" if ends is None else f"{value:.3f} [{ends[0]:.3f}, {ends[1]:.3f}]"


def significant(value: float) -> str:
    """Three significant digits, trailing zeros kept, never an exponent: 0.0420, 4.20, 42.0, 420."""
    return f"{value:.{_decimals(value)}f}"


def rounded_up(value: float, digits: int = 5) -> float:
    """Return the value rounded up to `digits` significant digits, up to floating-point error."""
    return _rounded(value, digits, lambda units: math.ceil(units - 1e-9))


def rounded_down(value: float, digits: int = 5) -> float:
    """Return the value rounded down to `digits` significant digits, up to floating-point error."""
    return _rounded(value, digits, lambda units: math.floor(units + 1e-9))


def _rounded(value: float, digits: int, to_whole: Callable[[float], int]) -> float:
    unit = 10.0 ** (math.floor(math.log10(value)) + 1 - digits)
    return float(f"{to_whole(value / unit) * unit:.{digits}g}")


def _with_ends(scale: float, value: float, ends: Ends | None) -> str:
    # all with the decimals of the value: 97.7 [90.5, 105.1]
    if ends is None:
        return significant(scale * value)
    digits = _decimals(scale * value)
    low, high = (f"{scale * end:.{digits}f}" for end in ends)
    return f"{significant(scale * value)} [{low}, {high}]"


def _decimals(value: float) -> int:
    if value == 0:
        return 0
    # rounded first, so that 9.999 counts as 10.0
    return min(max(2 - math.floor(math.log10(float(f"{abs(value):.2e}"))), 0), 6)
