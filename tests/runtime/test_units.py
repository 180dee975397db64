"""Bytes and seconds as they are printed."""

import pytest

from runtime.units import GIB, format_bytes, format_seconds


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 s"),
        (9.9e-16, "0 s"),
        (2e-6, "2e-06 s"),
        (0.534, "0.534 s"),
        (59.9, "59.9 s"),
        (125.2, "2 min 05 s"),
        (11_220, "3 h 07 min"),
    ],
)
def test_seconds(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(("num_bytes", "text"), [(512, "512 B"), (2048, "2 KiB"), (1.95 * GIB, "1.95 GiB")])
def test_bytes(num_bytes: float, text: str) -> None:
    assert format_bytes(num_bytes) == text
