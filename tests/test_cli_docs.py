"""The generated page of the command line is what the commands say."""

import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parent.parent / "docs" / "cli.md"


@pytest.mark.skipif(not PAGE.exists(), reason="the documents are not beside the tests")
def test_the_command_reference_is_up_to_date() -> None:
    """docs/cli.md equals what `python -m edgedec_apps.cli.reference` prints."""
    command = [sys.executable, "-m", "edgedec_apps.cli.reference"]
    printed = subprocess.run(command, capture_output=True, check=True).stdout.decode("utf-8")
    assert PAGE.read_text(encoding="utf-8") == printed
