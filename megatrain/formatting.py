"""Formats byte sizes, durations, rates and counts as people read them."""

from __future__ import annotations

SECONDS_PER_DAY = 86_400.0


def rate(number: float) -> str:
    """About three digits, with thousands separators: `2,034`, `10.4`."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.1f}" if number >= 10 else f"{number:.2f}"


def _scaled(number: float, units: tuple[tuple[float, str], ...]) -> str:
    size, unit = next(((size, unit) for size, unit in units if number >= size * 0.9995), units[-1])
    return f"{rate(number / size)} {unit}"


def amount(nbytes: float) -> str:
    """Bytes in words: `1.47 TB`."""
    if nbytes < 1000:
        return f"{nbytes:,.0f} B"
    return _scaled(nbytes, ((1e15, "PB"), (1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")))


def at_least(nbytes: int) -> str:
    """An amount that is needed, rounded up: a limit of what this says is enough."""
    return amount(-(-nbytes // _third_digit(nbytes)) * _third_digit(nbytes))


def at_most(nbytes: int) -> str:
    """An amount that is available, rounded down."""
    return amount(nbytes - nbytes % _third_digit(nbytes))


def _third_digit(number: int) -> int:
    """The value of a one in the third digit: 100,000,000 for 21 billion."""
    return int(10 ** max(0, len(str(number)) - 3))


def duration(seconds: float) -> str:
    """`7.28 s`, `94.0 s`, `41.0 days`: in the largest unit of which there are at least two."""
    for size, unit in ((31_557_600.0, "years"), (SECONDS_PER_DAY, "days"), (3_600.0, "hours"), (60.0, "minutes")):
        if seconds >= 2 * size:
            return f"{rate(seconds / size)} {unit}"
    return _scaled(seconds, ((1.0, "s"), (1e-3, "ms")))


def clock(seconds: float) -> str:
    """`0:07`, `3:41`, `2:03:15`, `4 d 2:03:15`: for a time that changes while it is shown."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    text = f"{hour}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
    return f"{days} d {text}" if days else text


def tokens(count: float) -> str:
    """A number of tokens: `1T`, `65,536`."""
    for size, unit in ((1e12, "T"), (1e9, "B")):
        if count >= size:
            return f"{count / size:,.4g}{unit}"
    return f"{count:,.0f}"


def flops(per_second: float) -> str:
    """Floating-point operations per second: `153 TFLOP/s`."""
    return _scaled(per_second, ((1e12, "TFLOP/s"), (1e9, "GFLOP/s"), (1e6, "MFLOP/s")))


def counted(number: int, noun: str) -> str:
    """`1 token`, `2,000 micro-batches`."""
    ending = "" if number == 1 else "es" if noun.endswith("ch") else "s"
    return f"{number:,} {noun}{ending}"


def counted_epochs(number: float, digits: int = 3) -> str:
    """Passes over the data: `1 epoch`, `2.5 epochs`."""
    text = f"{float(f'{number:.{digits}g}'):,g}"
    return f"{text} epoch{'' if text == '1' else 's'}"


def metric(number: float) -> str:
    """A count with three significant digits: 950, 12.3k, 1.50M, 70.6B, 2.00T."""
    power = 0
    while abs(number) >= 999.5 and power < 4:
        number /= 1000
        power += 1
    digits = 0 if power == 0 or abs(number) >= 99.95 else 1 if abs(number) >= 9.995 else 2
    return f"{number:.{digits}f}{' kMBT'[power].strip()}"
