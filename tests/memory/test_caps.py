"""A cap is kept by whole processes on a real model; docs/memory.md has the figures of more models and contexts."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from support.processes.command_line import Result, run_process

MB = 1_000_000
REFUSED = 50

pytestmark = [
    pytest.mark.slow,
    pytest.mark.model,
    pytest.mark.skipif(sys.platform != "linux", reason="the system's count of memory"),
]


def run(model: Path, cap: int, out: Path, cache: Path | str) -> Result:
    """Read 128 tokens and generate 24 in a context of 512, on the cpu runtime."""
    return run_process(
        *("run", model, "river " * 128, "--raw", "--method", "ignore-end", "-n", "24", "-t", "0", "-c", "512"),
        *("--quiet", "--runtime", "cpu", "--memory", str(cap), "--json-out", out),
        env={"EDGEDEC_CACHE": str(cache)},
    )


@pytest.mark.parametrize(
    ("n_mb", "given_up"),
    [
        (130, {"weights read from storage as needed"}),
        (188, {"common text left out"}),  # the middle of the caps that give up just this
        (260, set()),
    ],
)
def test_a_process_keeps_to_its_cap(smollm_path: Path, tmp_path: Path, n_mb: int, given_up: set[str]) -> None:
    """The first run makes the tiles, the second maps or streams them: neither is over, the text is one text."""
    texts = []
    for number in range(2):
        out = tmp_path / f"{number}.json"
        result = run(smollm_path, n_mb * MB, out, tmp_path / "cache")
        assert result.code == 0, result
        document: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
        held = document["memory"]
        assert held["peak_bytes"] <= n_mb * MB
        assert held["total_bytes"] <= n_mb * MB
        assert given_up <= set(held["given_up"])
        texts.append(document["token_ids"])
    assert (texts[0], len(texts[0])) == (texts[1], 24)


def test_less_than_the_least_is_refused_before_loading(smollm_path: Path, tmp_path: Path) -> None:
    """60 MB are not enough for anything: exit code 50 and the table, no tiles made."""
    result = run(smollm_path, 60 * MB, tmp_path / "out.json", tmp_path / "cache")
    assert result.code == REFUSED
    assert "over by" in result.err
    assert "interpreter and libraries" in result.err
    assert not list((tmp_path / "cache").rglob("*.tiles*"))


def test_without_a_disk_for_tiles_they_count_as_private(smollm_path: Path, tmp_path: Path) -> None:
    """Nothing can be streamed where the cache can't be written: a cap below the weights is refused, one above kept."""
    blocked = tmp_path / "file"
    blocked.write_text("no directory", encoding="utf-8")
    assert run(smollm_path, 130 * MB, tmp_path / "out.json", blocked).code == REFUSED
    out = tmp_path / "out.json"
    assert run(smollm_path, 230 * MB, out, blocked).code == 0
    assert json.loads(out.read_text(encoding="utf-8"))["memory"]["peak_bytes"] <= 230 * MB
