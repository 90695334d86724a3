"""A prompt that is much too long is refused within the cap: it is not tokenized, and hardly copied."""

import subprocess
import sys
from pathlib import Path

import pytest

MB = 1_000_000
CAP_MB = 260
# Runs a command and tells the most that the process has held; a child's own count would have its parent's in it.
_RUN = """
import re, sys
from pathlib import Path
from edgedec_apps.cli import main
try:
    main()
except SystemExit as ended:
    print(ended.code, re.search(r"VmHWM:\\s+([0-9]+) kB", Path("/proc/self/status").read_text())[1])
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.model,
    pytest.mark.skipif(sys.platform != "linux", reason="the system's count of memory"),
]


@pytest.mark.parametrize(
    ("runtime", "text", "code", "words"),
    [
        ("cpu", "a b c d " * 500_000, "41", "the prompt takes about "),
        ("llamacpp", "中" * 1_300_000, "41", "the prompt takes about "),
        (
            "cpu",
            "中" * 21_000_000,
            "40",
            "holds more than 4062500 bytes; give a shorter text, or allow more memory (--memory)",
        ),
    ],
    ids=["many words", "one word", "a file larger than what is read"],
)
def test_a_long_file_is_refused_within_the_cap(
    smollm_path: Path, tmp_path: Path, runtime: str, text: str, code: str, words: str
) -> None:
    """`run --memory 260MB -f FILE` with 4 or 63 MB of text holds less than its cap, and says how long the text is."""
    file = tmp_path / "prompt.txt"
    file.write_text(text, encoding="utf-8")
    options = ("-c", "1024", "--memory", f"{CAP_MB}MB", "--runtime", runtime, "-q")
    child = subprocess.run(
        [sys.executable, "-c", _RUN, "run", smollm_path, "-f", file, *options],
        capture_output=True,
        text=True,
        check=True,
    )
    ended, peak_kb = child.stdout.split()
    assert (ended, words in child.stderr) == (code, True), child.stderr
    assert int(peak_kb) * 1024 < CAP_MB * MB
