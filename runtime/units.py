"""Conversion and formatting of bytes, seconds and counts."""

KIB = 1024
MIB = 1024**2
GIB = 1024**3


def gib_to_bytes(gib: float) -> int:
    return int(gib * GIB)


def format_bytes(num_bytes: float) -> str:
    """Formats bytes in binary units, with three significant digits: `1.95 GiB`, `512 B`."""
    for unit, size in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(num_bytes) >= size:
            digits = ".3g" if abs(num_bytes) < 1000 * size else ".0f"
            return f"{num_bytes / size:{digits}} {unit}"
    return f"{num_bytes:.0f} B"


def format_seconds(seconds: float) -> str:
    """Formats a duration: `0.53 s`, `2 min 05 s`, `3 h 07 min`. Less than 1 ns, a rounding error of sums, is `0 s`."""
    if seconds < 60:
        return f"{seconds if seconds >= 1e-9 else 0.0:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def format_rounded(seconds: float) -> str:
    """Formats a duration roughly: `45 s`, `2.5 min`, `31 min`, `7.5 h`, `26 h`."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    value, unit = (seconds / 60, "min") if seconds < 90 * 60 else (seconds / 3600, "h")
    return f"{round(value)} {unit}" if value >= 10 else f"{round(2 * value) / 2:g} {unit}"


def format_count(count: int, noun: str) -> str:
    """Formats a number with a noun: `1 layer`, `2,000 layers`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def round_down(value: int, multiple: int) -> int:
    return value // multiple * multiple
