"""A picture is encoded once while its rows are kept, in a process that may end without the application.

libmtmd with a stub in place of the text model makes the rows and the layout that it makes with the model itself.
"""

import ctypes
import io
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.models.picture_models import MARKS, picture_file, picture_model
from support.models.tiny_models import N_VOCAB
from support.models.tiny_projectors import KINDS, M_ROPE_KINDS, tiny_projector

from edgedec.errors import CancelledError, ModelFormatError, RequestError, RuntimeLostError
from edgedec.progress import CancelToken, Progress
from edgedec_runtimes.pictures.child import PictureChild
from edgedec_runtimes.pictures.contract import Picture, by_first_id
from edgedec_runtimes.pictures.header import opening, read_projector
from edgedec_runtimes.pictures.opened import open_reader
from edgedec_runtimes.pictures.reader import MarkedPicture, PictureReader

pytest.importorskip("llama_cpp")


pytestmark = pytest.mark.slow


Image = pytest.importorskip("PIL.Image")
ONE, TWO = picture_file(), picture_file(seed=1)


def opened_reader(model: Path) -> PictureReader:
    return open_reader(model, model.with_name("mmproj-tiny-f16.gguf"), 1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return picture_model(tmp_path_factory.mktemp("pictures"))


@pytest.fixture(scope="module")
def shared(model: Path) -> Iterator[PictureReader]:
    reader = opened_reader(model)
    yield reader
    reader.close()


def test_a_picture_that_comes_again_is_not_encoded_again(shared: PictureReader) -> None:
    told: list[Progress] = []
    new = picture_file(seed=2)  # none of those that other tests have had encoded
    first = shared.rows([shared.measure(new)], on_progress=told.append)
    assert [(one.done, one.detail) for one in told if one.phase == "reading picture"] == [(0, "1 of 1"), (1, "1 of 1")]
    told.clear()
    again = shared.rows([shared.measure(new), shared.measure(new)], on_progress=told.append)
    assert not told
    assert all(again[key] is first[key] for key in first)
    assert by_first_id(first.values()) == first


def test_ids_are_known_before_rows_and_two_pictures_of_one_size_share_none(shared: PictureReader) -> None:
    one, two = shared.measure(ONE), shared.measure(TWO)
    assert one.layout == two.layout
    ids = [i for block in one.ids for i in block]
    assert len(one.ids) > 1
    assert len(set(ids)) == one.n_rows
    assert shared.measure(ONE).ids == one.ids
    assert not set(ids) & {i for block in two.ids for i in block}
    rows = shared.rows([two])
    assert tuple(block.ids for block in rows.values()) == two.ids
    assert [len(block.rows) for block in rows.values()] == [block.n_rows for block in two.layout.blocks]


def test_a_path_and_an_image_and_bytes_are_taken(shared: PictureReader, tmp_path: Path) -> None:
    path = tmp_path / "one.png"
    path.write_bytes(ONE)
    given = [shared.measure(what) for what in (ONE, path, str(path), Image.open(io.BytesIO(ONE)))]
    assert [one.name for one in given] == ["the picture", "one.png", "one.png", "the picture"]
    assert given[0].ids == given[1].ids == given[2].ids != given[3].ids
    by_file, by_pixels = (list(shared.rows([one]).values()) for one in (given[0], given[3]))
    assert [block.rows.tobytes() for block in by_file] == [block.rows.tobytes() for block in by_pixels]


@pytest.mark.parametrize("given", [b"", b"no picture", 7, "no-such-file.png", ONE[:400]])
def test_what_is_no_picture_is_refused(shared: PictureReader, given: object) -> None:
    with pytest.raises(RequestError):
        shared.rows([shared.measure(given)])
    assert shared.rows([shared.measure(ONE)])


def test_the_child_may_end_and_the_next_call_starts_it_again(tmp_path: Path) -> None:
    reader = opened_reader(picture_model(tmp_path, "internvl"))  # a kind that libmtmd encodes, in the child
    one = reader.measure(ONE)
    os.kill(reader.processes[0], signal.SIGSTOP)
    asking = threading.Timer(0.3, os.kill, (reader.processes[0], signal.SIGKILL))
    asking.start()
    with pytest.raises(RuntimeLostError, match="the process that reads pictures was lost"):
        reader.rows([one])
    asking.join()
    assert reader.rows([one])
    cancel = CancelToken()
    os.kill(reader.processes[0], signal.SIGSTOP)
    threading.Timer(0.3, cancel.cancel).start()
    with pytest.raises(CancelledError):
        reader.rows([reader.measure(ONE), replaced(reader, TWO, one)], cancel)
    assert reader.rows([reader.measure(TWO)])
    os.kill(reader.processes[0], signal.SIGSTOP)
    threading.Timer(0.3, os.kill, (reader.processes[0], signal.SIGKILL)).start()  # as another client's picture may
    assert reader.measure(picture_file(seed=2)).width > 0
    reader.close()
    assert reader.processes == ()
    with pytest.raises(RuntimeLostError, match="closed"):
        reader.measure(picture_file(seed=3))


def replaced(reader: PictureReader, data: bytes, like: MarkedPicture) -> MarkedPicture:
    """A picture of another file, without asking the child, which is stopped."""
    from dataclasses import replace

    from edgedec_runtimes.pictures.reader import source_of

    ids = tuple(tuple(i - 1 for i in block) for block in like.ids)
    return replace(like, source=source_of(data, "two", reader.limits), ids=ids)


def test_the_child_ends_when_it_has_rested() -> None:
    child = PictureChild(idle_s=0.05)
    assert child.ask("decoder").startswith("Pillow")
    for _ in range(200):
        if not child.processes:
            break
        time.sleep(0.05)
    assert child.processes == ()
    assert child.ask("decoder").startswith("Pillow")
    child.close()


def test_callers_take_turns_in_their_order(shared: PictureReader) -> None:
    """One that has more pictures waits behind those who came meanwhile; one that is cancelled is skipped."""
    order, cancel = list[str](), CancelToken()

    def wait(name: str, token: CancelToken | None = None) -> threading.Thread:
        def take() -> None:
            with suppress(CancelledError), shared._turn(shared._encoding, token):
                order.append(name)

        thread, n_waiting = threading.Thread(target=take), len(shared._encoding)
        thread.start()
        while len(shared._encoding) == n_waiting:
            time.sleep(0.005)
        return thread

    with shared._turn(shared._encoding, None):
        waiting = [wait("two"), wait("gone", cancel), wait("three"), wait("one again")]
        cancel.cancel()
        waiting[1].join()
    for thread in waiting:
        thread.join()
    assert order == ["two", "three", "one again"]


def test_rows_beyond_the_limit_are_forgotten_the_oldest_first(model: Path) -> None:
    reader = opened_reader(model)
    one, two = reader.measure(ONE), reader.measure(TWO)
    kept = PictureReader(reader._encoder, reader._child, b"", reader.limits, 64 * 4 * one.n_rows)
    first, _ = kept.rows([one]), kept.rows([two])
    key = one.ids[0][0]
    again = kept.rows([one])
    assert again[key] is kept.rows([one])[key] is not first[key]
    reader.close()


ARCHITECTURES = {"gemma3": "gemma3", "gemma4v": "gemma4", "lfm2": "lfm2", "qwen3vl_merger": "qwen3vl"}
ARCHITECTURES |= dict.fromkeys(("qwen2vl_merger", "qwen2.5vl_merger"), "qwen2vl")
SIZES = ((200, 150), (33, 100))


def noise(width: int, height: int) -> Picture:
    draw = np.random.default_rng(width)
    return Picture(width, height, draw.integers(0, 256, width * height * 3, dtype=np.uint8).tobytes())


def opened(path: Path, kind: str, max_tokens: int | None = None, n_threads: int = 1) -> Any:
    from edgedec_runtimes.pictures.mtmd import Mtmd

    return Mtmd(opening(read_projector(path), ARCHITECTURES.get(kind, "llama"), n_threads, max_tokens))


class InAProcess:
    """An encoder in a process of its own, where the product has it; and where memory that was not written is zero.

    libmtmd's graph of pixtral makes rows of unwritten memory times 0, which are no numbers where that memory has none:
    in the process of the tests, rows of two encoders differed then.
    """

    def __init__(self, path: Path, kind: str, n_threads: int = 1) -> None:
        self.child = PictureChild()
        self.opening = opening(read_projector(path), ARCHITECTURES.get(kind, "llama"), n_threads, None)
        self.close = self.child.close

    def encode(self, picture: Picture, on_block: Any) -> Any:
        return self.child.ask("encode", self.opening, picture)

    def layout(self, width: int, height: int) -> Any:
        return self.child.ask("layout", self.opening, width, height)


@pytest.mark.parametrize("kind", [*KINDS, *M_ROPE_KINDS])
def test_the_layout_is_known_before_a_pixel_is_and_rows_are_the_same_each_time(tmp_path: Path, kind: str) -> None:
    made = InAProcess if kind == "pixtral" else opened
    encoder = made(tiny_projector(tmp_path / "mmproj.gguf", kind), kind)
    again = made(tmp_path / "mmproj.gguf", kind, n_threads=2)
    for width, height in SIZES:
        layout, rows = encoder.encode(noise(width, height), lambda done, total: None)
        assert layout == encoder.layout(width, height)
        assert [len(found) for found in rows] == [block.n_rows for block in layout.blocks]
        assert all(found.shape[1] == 64 * (2 if kind == "qwen3vl_merger" else 1) for found in rows)
        assert all(block.n_x * block.n_y == block.n_rows for block in layout.blocks)
        assert all((block.n_y > 1) == (kind in M_ROPE_KINDS) for block in layout.blocks if width == 200)
        _, others = again.encode(noise(width, height), lambda done, total: None)
        assert [found.tobytes() for found in rows] == [found.tobytes() for found in others]
    encoder.close()
    again.close()


@pytest.mark.skipif(sys.platform != "linux", reason="the setting is glibc's")
def test_memory_that_the_encoder_is_handed_is_zero() -> None:
    child = PictureChild()
    child.ask("decoder")
    assert b"MALLOC_PERTURB_=255\0" in Path(f"/proc/{child.processes[0]}/environ").read_bytes()
    child.close()


@pytest.mark.parametrize("kind", ["idefics3", "gemma3"])
def test_rows_and_marks_are_those_of_libmtmd_with_the_text_model(tmp_path: Path, kind: str) -> None:
    from llama_cpp import llama_cpp, mtmd_cpp

    picture_model(tmp_path, kind)
    encoder = opened(tmp_path / "mmproj-tiny-f16.gguf", kind)
    picture = noise(150, 90)
    layout, rows = encoder.encode(picture, lambda done, total: None)
    params = llama_cpp.llama_model_default_params()
    model = llama_cpp.llama_model_load_from_file(str(tmp_path / "tiny-f32.gguf").encode(), params)
    settings = mtmd_cpp.mtmd_context_params_default()
    settings.use_gpu, settings.warmup, settings.print_timings, settings.flash_attn_type = False, False, False, 1
    context = mtmd_cpp.mtmd_init_from_file(str(tmp_path / "mmproj-tiny-f16.gguf").encode(), model, settings)
    pixels = (ctypes.c_uint8 * len(picture.rgb)).from_buffer_copy(picture.rgb)
    bitmap, chunks = mtmd_cpp.mtmd_bitmap_init(150, 90, pixels), mtmd_cpp.mtmd_input_chunks_init()
    text = mtmd_cpp.mtmd_input_text()
    text.text, text.text_len, text.add_special, text.parse_special = b"<__media__>", 11, False, True
    assert not mtmd_cpp.mtmd_tokenize(context, chunks, ctypes.byref(text), (ctypes.c_void_p * 1)(bitmap), 1)
    parts: list[str | int] = []
    for i in range(mtmd_cpp.mtmd_input_chunks_size(chunks)):
        chunk = mtmd_cpp.mtmd_input_chunks_get(chunks, i)
        if mtmd_cpp.mtmd_input_chunk_get_type(chunk) == 0:
            n = ctypes.c_size_t()
            ids = mtmd_cpp.mtmd_input_chunk_get_tokens_text(chunk, ctypes.byref(n))[: n.value]
            parts.append("".join(MARKS[k - N_VOCAB] if k >= N_VOCAB else chr(k - 4) for k in ids))
            continue
        assert not mtmd_cpp.mtmd_encode_chunk(context, chunk)
        found = np.ctypeslib.as_array(mtmd_cpp.mtmd_get_output_embd(context), rows[len(parts) and _n(parts)].shape)
        assert found.tobytes() == rows[_n(parts)].tobytes()
        parts.append(_n(parts))
    assert tuple(parts) == layout.parts
    mtmd_cpp.mtmd_input_chunks_free(chunks)
    mtmd_cpp.mtmd_bitmap_free(bitmap)
    mtmd_cpp.mtmd_free(context)
    llama_cpp.llama_model_free(model)
    encoder.close()


def _n(parts: list[str | int]) -> int:
    return sum(isinstance(part, int) for part in parts)


def test_the_marks_around_rows_are_the_models_own(tmp_path: Path) -> None:
    expected = {
        "gemma3": ("<start_of_image>", 0, "<end_of_image>"),
        "lfm2": ("<|image_start|>", 0, "<|image_end|>"),
        "qwen3vl_merger": ("<|vision_start|>", 0, "<|vision_end|>"),
        "pixtral": (0, "[IMG_END]"),
    }
    for kind, parts in expected.items():
        encoder = opened(tiny_projector(tmp_path / f"{kind}.gguf", kind), kind)
        assert encoder.layout(64, 64).parts == parts
        encoder.close()


def test_a_limit_of_rows_makes_fewer_of_a_large_picture(tmp_path: Path) -> None:
    path = tiny_projector(tmp_path / "mmproj.gguf", "qwen3vl_merger")
    n_rows = [opened(path, "qwen3vl_merger", most).layout(2000, 1500).n_rows for most in (None, 64)]
    assert 900 < n_rows[0] <= 1024
    assert 48 < n_rows[1] <= 64


def test_a_file_that_libmtmd_refuses_is_named(tmp_path: Path) -> None:
    path = tiny_projector(tmp_path / "mmproj.gguf", "idefics3", without=("v.blk.1.attn_out.weight",))
    with pytest.raises(ModelFormatError, match=r"mmproj\.gguf: libmtmd does not load"):
        opened(path, "idefics3")
