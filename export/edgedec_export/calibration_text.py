"""The text that activations are measured on where the user gives no other: prose, code and lists, some 1,500 words."""

from pathlib import Path


def bundled_text() -> str:
    """Return the text of calibration_text.txt beside this file."""
    return Path(__file__).with_suffix(".txt").read_text(encoding="utf-8")
