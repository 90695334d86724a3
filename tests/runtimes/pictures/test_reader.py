"""A picture is encoded once while its rows are kept, in a process that may end without the application."""

import io
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from support.models.picture_models import picture_file, picture_model

from edgedec.errors import CancelledError, RequestError, RuntimeLostError
from edgedec.progress import CancelToken, Progress
from edgedec_runtimes.pictures.child import PictureChild
from edgedec_runtimes.pictures.contract import by_first_id
from edgedec_runtimes.pictures.opened import open_reader
from edgedec_runtimes.pictures.reader import MarkedPicture, PictureReader

pytestmark = pytest.mark.slow
pytest.importorskip("llama_cpp")
Image = pytest.importorskip("PIL.Image")
ONE, TWO = picture_file(), picture_file(seed=1)


def opened(model: Path) -> PictureReader:
    return open_reader(model, model.with_name("mmproj-tiny-f16.gguf"), 1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return picture_model(tmp_path_factory.mktemp("pictures"))


@pytest.fixture(scope="module")
def shared(model: Path) -> Iterator[PictureReader]:
    reader = opened(model)
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
    reader = opened(picture_model(tmp_path, "internvl"))  # a kind that libmtmd encodes, in the child
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
    reader = opened(model)
    one, two = reader.measure(ONE), reader.measure(TWO)
    kept = PictureReader(reader._encoder, reader._child, b"", reader.limits, 64 * 4 * one.n_rows)
    first, _ = kept.rows([one]), kept.rows([two])
    key = one.ids[0][0]
    again = kept.rows([one])
    assert again[key] is kept.rows([one])[key] is not first[key]
    reader.close()
