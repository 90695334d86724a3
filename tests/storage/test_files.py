"""Files of the cache: known by name and first bytes, written whole or not at all, remembered for one machine."""

import json
import os
import stat
from pathlib import Path

import numpy as np
import pytest

from edgedec.drafters.suffix.learned_file import Learned, LearnedSource, learned_path
from edgedec.load_options import LoadOptions
from edgedec.storage import cache_files, probe_cache
from edgedec.storage.cache_files import is_ours, sort_out
from edgedec.storage.probe_cache import machine_key, quietly
from edgedec.storage.whole_file import remove_temporaries, write_atomically
from edgedec_apps.cli.chat.line_editor import TypedHistory
from edgedec_apps.learning import write_learned
from edgedec_models.draft_heads import remember_head
from edgedec_runtimes.shared.block_files import BlockFiles

KEY = "0123456789abcdef"
TILES, BLOCK, LEARNED = b"edgedec tiles\r\n\0", b"edgedec block 1\n", b"edgedec learned files 1\n"


def link(path: Path, target: Path) -> None:
    """Make a symbolic link; skip the rest of the test where the system makes none that is known as one, as wine."""
    path.symlink_to(target, target_is_directory=target.is_dir())
    if not path.is_symlink():
        pytest.skip("symbolic links can't be told from what they lead to here")


def test_what_is_written_is_known(tmp_path: Path) -> None:
    """Every writer's own files, so that a new form of a name or a header can't be forgotten."""
    values: tuple[object, ...] = ({}, [1], "text", 1.5, -1, True, None)
    for value in values:
        probe_cache.put(tmp_path, "common-text", json.dumps(value), value)
    blocks = BlockFiles(tmp_path / "prompts/m-01234567", 1 << 30, lambda _: 0, n_queued=9)
    blocks.write("a1.kv", np.zeros(1000, np.uint8), 1e9)
    blocks.close()
    source = LearnedSource("/a", np.arange(9, dtype=np.int32))
    write_learned(Learned(learned_path(tmp_path, bytes(16)), ("m",), (source,)))
    remember_head(tmp_path / "head", tmp_path)
    TypedHistory(tmp_path / "chat-history").store_string("hi")
    for kind, n_files in (("probes", 7), ("prompts", 1), ("learned", 1), ("heads", 1)):
        ours, others = sort_out(tmp_path / kind, kind)
        assert (len(ours), others) == (n_files, []), kind
    assert is_ours(tmp_path / "chat-history", tmp_path, "")


@pytest.mark.parametrize(
    ("kind", "name", "data", "ours"),
    [
        ("tiles", f"{KEY}.{KEY}.tiles", TILES, True),
        ("tiles", f"{KEY}.{KEY}.tiles", TILES[:5], True),
        ("tiles", f"{KEY}.{KEY}.tiles", b"GGUF", False),
        ("tiles", f"{KEY}.tiles", TILES, False),
        ("tiles", f"{KEY.upper()}.{KEY}.tiles", TILES, False),
        ("tiles", f"{KEY}.{KEY}.json.12-3.tmp", b"{", True),  # of an earlier release
        ("tiles", f"{KEY}.{KEY}.json.{KEY}.tmp", b"", True),
        ("tiles", f"notes.json.{KEY}.tmp", b"{", False),
        ("tiles", f"{KEY}.lock", b"", True),
        ("tiles", f"{KEY}.lock", b"12345", False),
        ("prompts", "m-01234567/1.kv", BLOCK, True),
        ("prompts", f"m-01234567/1.head-{KEY}", BLOCK, True),  # what a draft head knows of the block
        ("prompts", "m-01234567/1.kv", b"KV", False),
        ("prompts", "m-01234567/1 (copy).kv", BLOCK, False),
        ("prompts", f"m-01234567/1.kv.{KEY}.tmp", BLOCK[:3], True),
        ("prompts", f"m-01234567/1.kv.{KEY}.tmp", b"draft", False),
        ("prompts", "1.kv", BLOCK, False),
        ("prompts", "m-01234567/deep/1.kv", BLOCK, False),
        ("heads", f"{KEY}.path", b"/home/a/head", True),
        ("heads", f"{KEY}.path", b"C:\\head", True),
        ("heads", f"{KEY}.path", b"notes", False),
        ("heads", "mine.gguf", b"GGUF", False),  # a head that the user put there
        ("learned", f"{KEY}{KEY}.learned", LEARNED, True),
        ("learned", f"{KEY}{KEY}.learned", b"edgedec learnt", False),
        ("learned", "mine.learned", LEARNED, False),
        ("answers", f"{KEY}{KEY}.answers", b"edgedec draft store 1\n", True),
        ("answers", f"{KEY}{KEY}.answers", b"edgedec learned", False),
        ("answers", f"{KEY}{KEY}.learning/lessons/lessons-000000-9-{KEY}.npz", b"PK", True),
        ("answers", "mine/notes.txt", b"x", False),
        ("probes", f"curve-{KEY}{KEY}.json", b"{}", True),
        ("probes", f"read rate-{KEY}{KEY}.json", b"[1.5]", True),
        ("probes", f"curve-{KEY}{KEY}.json", b"<xml>", False),
        ("probes", "settings.json", b"{}", False),
        ("npu", f"{KEY}{KEY}/graph.onnx", b"x", True),
        ("npu", f".{KEY}{KEY}-01234567.part/graph_qnn.bin", b"x", True),
        ("npu", f"{KEY}{KEY}/notes.txt", b"x", False),
        ("graphs", f"a-b-{KEY[:12]}-{KEY[:12]}/model.onnx.data", b"x", True),
        ("graphs", f"a-b-{KEY[:12]}-{KEY[:12]}/photo.jpg", b"x", False),
        ("graphs", "mine/model.onnx", b"x", False),
        ("optimum", f"{KEY}/pyvenv.cfg", b"home = /usr/bin", True),
        ("optimum", "mine/pyvenv.cfg", b"home = /usr/bin", False),
    ],
)
def test_form_and_first_bytes_decide(tmp_path: Path, kind: str, name: str, data: bytes, ours: bool) -> None:
    """And no link leads to the file: neither the file itself, nor a folder, nor the folder of its kind."""
    path = tmp_path / kind / name
    path.parent.mkdir(parents=True)
    path.write_bytes(data)
    assert is_ours(path, tmp_path / kind, kind) is ours
    link(tmp_path / "linked", tmp_path / kind)
    assert not is_ours(tmp_path / "linked" / name, tmp_path / "linked", kind)
    assert sort_out(tmp_path / "linked", kind) == ([], [tmp_path / "linked"])
    elsewhere = path.rename(tmp_path / "elsewhere")
    link(path, elsewhere)
    assert not is_ours(path, tmp_path / kind, kind)
    path.unlink()
    if path.parent != tmp_path / kind:
        path.parent.rmdir()
        (tmp_path / "folder").mkdir()
        link(path.parent, tmp_path / "folder")
        elsewhere.rename(path)
        assert not is_ours(path, tmp_path / kind, kind)
        assert sort_out(tmp_path / kind, kind)[0] == []


def test_deleting_leaves_what_is_beside(tmp_path: Path) -> None:
    """Folders go where they are empty, up to the folder of the kind, and never above it."""
    root = tmp_path / "npu"
    for name in ("1" * 32, "2" * 32):
        (root / name).mkdir(parents=True)
        (root / name / "graph.onnx").write_bytes(b"x")
    (root / ("2" * 32) / "mine").write_bytes(b"x")
    for name in ("1" * 32, "2" * 32):
        cache_files.delete_folder(root / name, "npu")
    assert [path.relative_to(root).as_posix() for path in root.rglob("*")] == ["2" * 32, f"{'2' * 32}/mine"]
    history = tmp_path / "cache" / "chat-history"
    history.parent.mkdir()
    history.write_bytes(b'"hi"')
    cache_files.delete(history, history)
    assert list(history.parent.iterdir()) == []


@pytest.mark.parametrize("sync", [False, True])
def test_a_file_is_replaced_by_its_new_contents(tmp_path: Path, *, sync: bool) -> None:
    """The pieces stand there one after another, and nothing else stays in the folder."""
    path = tmp_path / "a.json"
    path.write_bytes(b"the old contents, which are longer")
    write_atomically(path, b"the ", b"new", sync=sync)
    assert path.read_bytes() == b"the new"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.skipif(os.name != "posix", reason="modes of POSIX")
def test_a_private_file_is_for_its_owner(tmp_path: Path) -> None:
    """Also where the file that it replaces was for everybody."""
    path = tmp_path / "a"
    write_atomically(path, b"1")
    path.chmod(0o644)
    write_atomically(path, b"2", private=True)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_what_can_not_be_renamed_leaves_nothing(tmp_path: Path) -> None:
    """A folder of the file's name stays as it is, and the temporary file is deleted."""
    path = tmp_path / "folder"
    (path / "inside").mkdir(parents=True)
    with pytest.raises(OSError, match="folder"):
        write_atomically(path, b"1")
    assert list(tmp_path.rglob("*")) == [path, path / "inside"]


def test_what_killed_processes_left_is_removed(tmp_path: Path) -> None:
    """Temporary files go, and no others; a folder that does not exist has none."""
    write_atomically(tmp_path / "a.json", b"1")
    (tmp_path / "a.json.0123456789abcdef.tmp").write_bytes(b"part")
    (tmp_path / "mine.tmp").write_bytes(b"2")
    remove_temporaries(tmp_path)
    remove_temporaries(tmp_path / "none")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "mine.tmp"]


def test_another_cpu_is_another_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """A home folder that moves to another machine brings no times along."""
    here = machine_key(LoadOptions())
    assert machine_key(LoadOptions()) == here
    assert machine_key(LoadOptions(runtime_options={"huge_pages": "on"})) != here
    monkeypatch.setattr("edgedec.processor.cpu_name", lambda: "Another CPU")
    assert machine_key(LoadOptions()) != here


@pytest.mark.parametrize(("waited_s", "is_quiet"), [(0.02, True), (0.04, False)])
def test_a_machine_is_busy_where_others_take_the_processor(
    monkeypatch: pytest.MonkeyPatch, waited_s: float, is_quiet: bool
) -> None:
    """What was measured then is not kept; the system itself takes the processor now and then."""
    counts = [7.0, 7.0 + waited_s]
    monkeypatch.setattr(probe_cache, "_waited_s", lambda: counts.pop(0))
    monkeypatch.setattr(probe_cache, "perf_counter", iter((1.0, 1.05)).__next__)
    assert quietly(lambda: "found") == ("found", is_quiet)
