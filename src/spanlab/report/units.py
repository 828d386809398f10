"""Numbers as short text."""

from __future__ import annotations

import math

MISSING = "–"


def percent(rate: float | None) -> str:
    """A share in percent: 63.1 %."""
    return MISSING if rate is None else f"{100 * rate:.1f} %"


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


def seconds(value: float | None, half: float | None = None) -> str:
    """A duration, with `half` as its ± where there is one: 412 ms, 1.52 ± 0.08 s."""
    if value is None:
        return MISSING
    scale, unit = (1e3, "ms") if abs(value) < 1 else (1.0, "s")
    return f"{_with_half(value * scale, None if half is None else half * scale)} {unit}"


def ratio(value: float | None, half: float | None = None) -> str:
    """A factor, with `half` as its ± where there is one: 3.41 ± 0.12 ×."""
    if value is None:
        return MISSING
    return f"{_with_half(value, half)} ×"


def significant(value: float) -> str:
    """Three significant digits, trailing zeros kept, never an exponent: 0.0420, 4.20, 42.0, 420."""
    return f"{value:.{_decimals(value)}f}"


def _with_half(value: float, half: float | None) -> str:
    # both with the decimals of the value: 97.7 ± 7.2
    return significant(value) if half is None else f"{significant(value)} ± {half:.{_decimals(value)}f}"


def _decimals(value: float) -> int:
    if value == 0:
        return 0
    # rounded first, so that 9.999 counts as 10.0
    return min(max(2 - math.floor(math.log10(float(f"{abs(value):.2e}"))), 0), 6)
