"""From a model's name to its file; the table of what drafts bring, and what is expected by it."""

import os
import re
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from support.processes.rights import as_anybody

from edgedec import plugins
from edgedec.errors import ModelNotFoundError, RequestError, StorageError
from edgedec.load_options import ResolveOptions
from edgedec.loading import comparison
from edgedec.loading.comparison import KINDS, ROWS, Kind, seconds_per_token
from edgedec.loading.resolve import resolve
from edgedec_apps.bench.recorder import Proposals

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks" / "speed"))

from draft_yields import kinds_of, source_of
from recordings import ModelSize, Recorded, Recording

_NOTHING = Proposals((), (), (), 0.0)
_CHAIN = Proposals((6, 7, 8), (-1, 0, 1), (0.9, 0.8, 0.7), 0.0)  # promises 2.4 tokens
_WRONG = Proposals((1, 2, 3), (-1, 0, 1), (0.9, 0.8, 0.7), 0.0)
_TEXT = Recorded("a", "task", (5, 6, 7, 8, 9), (_CHAIN, _WRONG, _NOTHING, _NOTHING), n_prompt_tokens=10)


def test_positions_are_counted_by_what_drafts_promised_there() -> None:
    """Two promised nothing and brought a token each; of two that promised 2.4 one was right to its end."""
    assert kinds_of([_TEXT]) == (
        Kind(0.5, {1: 1.0, 2: 1.0, 4: 1.0, 8: 1.0}),
        Kind(0.5, {1: 1.0, 2: 1.5, 4: 2.5, 8: 2.5}),
    )


def test_a_draft_brings_no_more_than_the_rest_of_the_text() -> None:
    """The last token of a forward is the target's own, so a draft to the text's end counts for its tokens only."""
    end = Recorded("a", "task", (5, 6, 7, 8), (_CHAIN, _NOTHING, _NOTHING), n_prompt_tokens=1)
    assert kinds_of([end])[1].tokens == {1: 1.0, 2: 2.0, 4: 3.0, 8: 3.0}


def test_the_source_is_what_the_module_holds() -> None:
    """Printed in the form in which the table is committed; a recording without its prompts' lengths is refused."""
    size = ModelSize(1, 1)
    source = source_of(Recording("m", size, None, True, (_TEXT,)))
    assert source.splitlines()[0] == "PROMPT_TOKENS = 2.00"
    assert "    Kind(0.5000, {1: 1.000, 2: 1.500, 4: 2.500, 8: 2.500})," in source.splitlines()
    committed = Path(comparison.__file__).read_text(encoding="utf-8")
    assert re.search(r"^PROMPT_TOKENS = \d\.\d\d$", committed, re.M)
    assert len(
        re.findall(r"^    Kind\(0\.\d{4}, \{1: 1\.000, 2: \d\.\d{3}, 4: \d\.\d{3}, 8: \d\.\d{3}\}\),$", committed, re.M)
    )
    older = Recorded(_TEXT.id, _TEXT.task, _TEXT.token_ids, _TEXT.proposals)
    with pytest.raises(RequestError, match="record it again"):
        source_of(Recording("m", size, None, True, (older,)))


def test_the_committed_table_is_of_whole_texts() -> None:
    """Shares add up to all positions but for rounding, and more rows never bring fewer tokens."""
    assert round(sum(kind.share for kind in KINDS), 3) == 1.0
    for kind in KINDS:
        found = [kind.tokens[n] for n in ROWS]
        assert found[0] == 1.0
        assert found == sorted(found)


def test_rows_that_cost_a_step_each_bring_nothing() -> None:
    """Then the best is a plain step everywhere; where rows are free, all of them are verified."""
    assert round(seconds_per_token({n: float(n) for n in ROWS}), 9) == 1.0
    most = sum(kind.share / kind.tokens[8] for kind in KINDS) / sum(kind.share for kind in KINDS)
    assert seconds_per_token(dict.fromkeys(ROWS, 1.0)) == most


OFFLINE = ResolveOptions(offline=True)


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")
def test_a_folder_that_may_not_be_looked_into(tmp_path: Path) -> None:
    """A model there is a StorageError that names it, not one that does not exist; without a folder it is the latter."""
    options = ResolveOptions(cache_dir=tmp_path, offline=True)
    with TemporaryDirectory() as name:  # pytest's own are closed to others
        folder = Path(name) / "closed"
        folder.mkdir()
        model = folder / "m.gguf"
        model.write_bytes(b"GGUF")
        assert resolve(model, options) == model
        folder.chmod(0)
        with as_anybody():
            for path in (model, folder / "no.gguf"):
                with pytest.raises(StorageError, match=r"(m|no)\.gguf: no permission to read it \(Permission denied\)"):
                    resolve(path, options)
        folder.chmod(0o700)
        with pytest.raises(ModelNotFoundError, match="does not exist"):
            resolve(folder / "no.gguf", options)


@pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")
def test_names_are_found_from_a_folder_that_may_not_be_looked_into(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resolver's answer counts, whether or not a file of that name can be looked for here."""
    monkeypatch.setattr(plugins.Plugin, "load", lambda plugin: lambda name, options: tmp_path / name)

    def denied(path: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "stat", denied)
    assert resolve("a-name", OFFLINE) == tmp_path / "a-name"
