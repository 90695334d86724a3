"""Weights in huge pages: the same bits, no more memory than planned, and no copy where there is no room for one."""

import json
import logging
import mmap
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.models.tiny_models import tiny_llama

from edgedec.errors import CancelledError, OptionError, StorageError
from edgedec.load_options import LoadOptions
from edgedec.memory import system
from edgedec.progress import CancelToken, Progress
from edgedec_runtimes.cpu.runtime import Cpu
from edgedec_runtimes.cpu.tiles import build, huge_pages, placing
from edgedec_runtimes.cpu.tiles.file import MAPPED, MAPPED_HUGE, PRIVATE, PRIVATE_HUGE
from edgedec_runtimes.cpu.tiles.huge_pages import HugePages

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing is asked of the system"),
]

N_VOCAB = 20_000  # × 256 × 4 bytes: 20.5 MB each for the embedding, of which rows are read, and the head
TOKENS = np.arange(300, 19_900, 97, dtype=np.int32)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a head of its own."""
    folder = tmp_path_factory.mktemp("huge_pages")
    return tiny_llama(folder / "untied.gguf", n_embd=256, n_vocab=N_VOCAB, n_layer=1, n_ctx_train=4096)


@pytest.fixture
def small_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """A system whose cache never holds a file in huge pages, but gives them for private memory."""
    monkeypatch.setattr(huge_pages, "read_in_huge_pages", lambda *_: False)
    monkeypatch.setattr(huge_pages, "huge_pages", lambda: HugePages(2 << 20, "madvise"))


def loaded(path: Path, cache: Path, **options: Any) -> tuple[bytes, str]:
    """Return the bits of a prompt's logits, and what the memory plan says of the weights' pages."""
    with Cpu().load(path, LoadOptions(n_ctx=4096, cache_dir=cache, **options)) as model:
        rows = model.session(4096).forward(TOKENS, n_past=0, rows="all").logits.tobytes()
        return rows, weights_of(model.memory(4096, 16)).detail


def weights_of(terms: Any) -> Any:
    return next(term for term in terms if term.name == "weights (tiles)")


def test_bits_do_not_depend_on_pages(path: Path, tmp_path: Path, small_file: None) -> None:
    """Mapped and copied, asked for and not, logits are the same."""
    plain, detail = loaded(path, tmp_path, runtime_options={"huge_pages": "off"})
    assert detail == MAPPED
    assert loaded(path, tmp_path, runtime_options={"huge_pages": "auto"}) == (plain, MAPPED)
    assert loaded(path, tmp_path, runtime_options={"huge_pages": "on"}) == (plain, PRIVATE_HUGE)
    for mode in ("off", "auto", "on"):
        assert loaded(path, tmp_path, runtime_options={"huge_pages": mode, "mmap": False}) == (plain, PRIVATE)


def test_files_in_huge_pages_are_shared(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the cache can hold the file in huge pages, nothing is copied."""
    monkeypatch.setattr(huge_pages, "share_of", lambda *_: 0.95)
    plain, _ = loaded(path, tmp_path, runtime_options={"huge_pages": "off"})
    assert loaded(path, tmp_path, runtime_options={"huge_pages": "on"}) == (plain, MAPPED_HUGE)


# A process that has read the weights: what the plan counts for them, and what it holds beside what it held before.
HELD = """
import json, sys
from pathlib import Path
import numpy as np
from edgedec.memory.system import resident_bytes
from edgedec.load_options import LoadOptions
from edgedec_runtimes.cpu.runtime import Cpu
from edgedec_runtimes.cpu.tiles import huge_pages
path, cache, mode, copies = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4] == "copies"
if copies:
    huge_pages.read_in_huge_pages = lambda *_: False
options = LoadOptions(n_ctx=256, max_rows=1, cache_dir=cache, runtime_options={"huge_pages": mode})
planned = Cpu().plan(path, options)
with Cpu().load(path, options) as model:
    model.session(256).forward(np.arange(200, dtype=np.int32), n_past=0)
    held = resident_bytes()
    terms = model.memory(256, 1)
lines = Path("/proc/self/status").read_text().splitlines()
print(json.dumps({
    "planned": [(t.name, t.n_bytes) for t in planned if not t.base],
    "terms": [(t.name, t.n_bytes) for t in terms if not t.base],
    "total": sum(t.n_bytes for t in terms), "held": held, "detail": terms[1].detail,
}))
"""


@pytest.mark.parametrize("seed", range(8))
def test_aligned_pieces_make_the_same_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Writes of any length and place give the bytes of a plain file; what is written in between ends with a piece."""
    monkeypatch.setattr(build, "_ALIGNED_BYTES", 64)
    rng = np.random.default_rng(seed)
    path, expected, end = tmp_path / "partial", bytearray(4096), 0
    with build.PartialFile(path) as partial:
        for _ in range(20):
            end += int(rng.choice([0, 0, 5, 40, 100]))
            data = rng.bytes(int(rng.choice([1, 63, 64, 65, 130])))
            partial.seek(end)
            gap = path.stat().st_size
            partial.write(data)
            written = path.stat().st_size
            assert written % 64 == 0 or written == gap
            expected[end : end + len(data)] = data
            end += len(data)
        partial.seek(0)
        partial.write(b"head")
        partial.flush()
        expected[:4] = b"head"
        assert path.read_bytes() == bytes(expected[:end])


@pytest.mark.model
@pytest.mark.parametrize(("mode", "way"), [("off", "maps"), ("auto", "maps"), ("on", "maps"), ("on", "copies")])
def test_memory_is_as_planned(smollm_path: Path, tmp_path_factory: pytest.TempPathFactory, mode: str, way: str) -> None:
    """The plan before loading, the terms after it and the resident bytes agree, also where weights are copied."""
    cache = tmp_path_factory.getbasetemp() / "huge_pages_cache"
    cache.mkdir(exist_ok=True)
    args = [sys.executable, "-c", HELD, str(smollm_path), str(cache), mode, way]
    result = subprocess.run(args, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["planned"] == found["terms"]
    assert abs(found["held"] - found["total"]) <= max(16_000_000, found["total"] * 0.05), found
    pages = huge_pages.huge_pages()
    if way == "copies" and pages is not None and pages.private != "never":
        assert found["detail"] == PRIVATE_HUGE


def test_the_plan_tells_the_price(path: Path, tmp_path: Path, small_file: None) -> None:
    """Only with "on" is the plan's sentence longer; its bytes are the same, and so are those of the loaded model."""
    loaded(path, tmp_path)
    options = {
        mode: LoadOptions(runtime_options={"huge_pages": mode}, cache_dir=tmp_path) for mode in ("off", "auto", "on")
    }
    terms = {mode: weights_of(Cpu().plan(path, each)) for mode, each in options.items()}
    assert terms["off"] == terms["auto"]
    assert terms["off"].detail == MAPPED
    assert terms["on"].n_bytes == terms["off"].n_bytes
    assert "copied at each start" in terms["on"].detail
    assert "no other process shares" in terms["on"].detail
    with Cpu().load(path, options["on"]) as model:
        assert weights_of(model.memory(4096, 16)).n_bytes == terms["on"].n_bytes


@pytest.mark.parametrize(
    ("pages", "free", "reason"),
    [
        (None, 1 << 40, "the system gives no huge pages"),
        (HugePages(2 << 20, "never"), 1 << 40, "the system gives no huge pages"),
        (HugePages(2 << 20, "always"), 10_000_000, "would be copied, and 10.0 MB are free"),
    ],
    ids=["no huge pages", "never", "no room"],
)
def test_no_copy_without_room(
    path: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    pages: HugePages | None,
    free: int,
    reason: str,
) -> None:
    """The weights stay mapped, with the same bits; the plan says why before, and the log when it happens."""
    plain, _ = loaded(path, tmp_path, runtime_options={"huge_pages": "off"})
    monkeypatch.setattr(huge_pages, "read_in_huge_pages", lambda *_: False)
    monkeypatch.setattr(huge_pages, "huge_pages", lambda: pages)
    monkeypatch.setattr(system, "available_bytes", lambda: free)
    with caplog.at_level(logging.INFO, "edgedec.tiles"):
        assert loaded(path, tmp_path, runtime_options={"huge_pages": "on"}) == (plain, MAPPED)
    assert [reason in record.message for record in caplog.records if getattr(record, "tell", False)] == [True]
    options = LoadOptions(runtime_options={"huge_pages": "on"}, cache_dir=tmp_path)
    assert reason in weights_of(Cpu().plan(path, options)).detail


@pytest.mark.model
def test_streamed_weights_are_not_copied(
    smollm_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_file: None
) -> None:
    """Under a cap that does not hold all weights, "on" changes nothing: no byte more than the cap's share is held."""
    monkeypatch.setattr(placing, "_copy", lambda *_: pytest.fail("weights were copied under a cap that they break"))
    options = LoadOptions(n_ctx=64, runtime_options={"huge_pages": "on"}, cache_dir=tmp_path, resident_bytes=60_000_000)
    (planned,) = (term for term in Cpu().plan(smollm_path, options) if term.name.startswith("weights"))
    with Cpu().load(smollm_path, options) as model:
        (held,) = (term for term in model.memory(64, 16) if term.name.startswith("weights"))
    assert held.name == planned.name == "weights (streamed)"
    assert held.n_bytes == planned.n_bytes <= 60_000_000


def test_a_file_that_can_not_be_read_is_made_anew(path: Path, tmp_path: Path, small_file: None) -> None:
    """Cut short just before it is copied, the tile file is deleted and written again; the bits are the same."""
    plain, _ = loaded(path, tmp_path, runtime_options={"huge_pages": "off"})
    (tile_file,) = tmp_path.glob("tiles/*.tiles")
    n_bytes, copied = tile_file.stat().st_size, list[int]()

    def cut(progress: Progress) -> None:
        if progress.phase == "load" and "to huge pages" in progress.detail and not copied:
            copied.append(progress.done)
            os.truncate(tile_file, 20_000_000)

    assert loaded(path, tmp_path, runtime_options={"huge_pages": "on"}, on_progress=cut) == (plain, PRIVATE_HUGE)
    assert copied == [16 << 20]
    (tile_file,) = tmp_path.glob("tiles/*.tiles")
    assert tile_file.stat().st_size == n_bytes


def test_a_changed_file_is_noticed_after_the_copy(path: Path, tmp_path: Path, small_file: None) -> None:
    """Rows of the embedding are still read from the file, so a change of it is an error of the next forward."""
    options = LoadOptions(n_ctx=64, runtime_options={"huge_pages": "on"}, cache_dir=tmp_path)
    with Cpu().load(path, options) as model:
        session = model.session(64)
        session.forward(TOKENS[:4], n_past=0)
        (tile_file,) = tmp_path.glob("tiles/*.tiles")
        os.truncate(tile_file, 1_000_000)
        with pytest.raises(StorageError, match="changed while they were in use"):
            session.forward(TOKENS[4:5], n_past=4)


def test_copying_is_cancelled(path: Path, tmp_path: Path, small_file: None) -> None:
    """Between two blocks; the tile file stays, and the next load takes it."""
    plain, _ = loaded(path, tmp_path)
    cancel = CancelToken()

    def stop(progress: Progress) -> None:
        if "to huge pages" in progress.detail:
            cancel.cancel()

    with pytest.raises(CancelledError):
        loaded(path, tmp_path, runtime_options={"huge_pages": "on"}, on_progress=stop, cancel=cancel)
    assert loaded(path, tmp_path, runtime_options={"huge_pages": "on"})[0] == plain


def test_other_words_are_refused(path: Path) -> None:
    with pytest.raises(OptionError, match=r"huge_pages is 'yes'; it must be auto, on or off"):
        Cpu().load(path, LoadOptions(runtime_options={"huge_pages": "yes"}))


def test_the_share_is_read_from_the_systems_list(tmp_path: Path) -> None:
    """Of the mappings that overlap with the range, and of no others; 0 where the system tells nothing."""
    text = """7f0000000000-7f0000400000 r--s 00000000 fe:00 2605265    /tiles
Rss:                4096 kB
AnonHugePages:         0 kB
FilePmdMapped:      2048 kB
7f0000400000-7f0000600000 r--s 00400000 fe:00 2605265    /tiles
Rss:                2048 kB
AnonHugePages:         0 kB
FilePmdMapped:      2048 kB
7f0000600000-7f0000a00000 rw-p 00000000 00:00 0
Rss:                4096 kB
AnonHugePages:      4096 kB
7f0000a00000-7f0000b00000 rw-p 00000000 00:00 0
Rss:                   0 kB
"""
    smaps = tmp_path / "smaps"
    smaps.write_text(text)
    start = 0x7F0000000000
    assert huge_pages.share_of(start, 1, smaps) == 0.5
    assert huge_pages.share_of(start, 6 << 20, smaps) == pytest.approx(4096 / 6144)
    assert huge_pages.share_of(start + (6 << 20), 4 << 20, smaps) == 1.0
    assert huge_pages.share_of(start + (10 << 20), 1 << 20, smaps) == 0.0
    assert huge_pages.share_of(start, 6 << 20, tmp_path / "none") == 0.0


def test_what_can_not_be_huge_is_not_left_in_memory(tmp_path: Path) -> None:
    """A file whose pages another mapping holds, or that is empty of pages, is no page of this mapping afterwards."""
    file = tmp_path / "file"
    file.write_bytes(bytes(3 << 20))
    never = tmp_path / "smaps"
    never.write_text("")
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as memory:
        done: list[int] = []
        spans = [(0, 1 << 20), (2 << 20, 1 << 20)]
        assert not huge_pages.read_in_huge_pages(memory, opened.fileno(), spans, done.append, never)
        assert done in ([1 << 20, 2 << 20], [])  # none by a kernel before Linux 5.14
        assert memory[:] == bytes(3 << 20)


def test_a_pages_file_that_was_cut_short_is_no_crash(tmp_path: Path) -> None:
    """Reading beyond the file's end is an error of the system's call, and no signal."""
    file = tmp_path / "file"
    file.write_bytes(bytes(3 << 20))
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as memory:
        os.truncate(file, 1 << 20)
        assert not huge_pages.read_in_huge_pages(memory, opened.fileno(), [(0, 3 << 20)], lambda _: None)
