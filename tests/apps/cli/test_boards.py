"""The tables of what boards hold, in the documents: those that `edgedec plan` makes of headers of the same sizes."""

import json
import platform
import sys
from pathlib import Path
from typing import Any

import pytest
from support.models.real_headers import real_header
from support.models.real_models import real_model
from support.processes.command_line import run_here

ROOT = Path(__file__).parents[3]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("drafting"),
    pytest.mark.skipif(
        not (ROOT / "docs" / "which-model.md").is_file(), reason="the documents are not beside the tests"
    ),
    pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="the tables were made on x86-64"),
]


@pytest.mark.parametrize("with_llamacpp", [False, True])
def test_the_tables_of_the_documents_are_those_of_the_plans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_llamacpp: bool
) -> None:
    """Every number of a page: what is free, planned and given up, by board, model and context."""
    if with_llamacpp:
        pytest.importorskip("llama_cpp")
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "memory"))
    from board_plans import tables

    paths: dict[str, Path] = {}

    def plan(arguments: str) -> dict[str, Any]:
        words = arguments.split()
        for i, typed in enumerate(words):
            word = typed.removeprefix("model=")
            if with_llamacpp and word.startswith("qwen2.5"):  # as the page was made
                words[i] = typed.replace(word, str(real_model(f"{word}.gguf")))
            elif word.startswith(("smollm2", "qwen2.5")):
                words[i] = str(paths.setdefault(word, real_header(tmp_path, word) if word not in paths else tmp_path))
        runtime = "llamacpp" if with_llamacpp else "cpu"
        result = run_here("plan", *words, "--runtime", runtime, "--quiet", "--json")
        assert result.out, result
        found: dict[str, Any] = json.loads(result.out)
        return found

    for page, table in tables(plan, only_llamacpp=with_llamacpp):
        assert table in (ROOT / page).read_text(encoding="utf-8"), f"{page} differs:\n{table}"
    sys.modules.pop("board_plans")
