"""Chats with pictures: the text depends on the pixels and never on drafts, other requests or what is kept."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.forwards import evaluated
from support.models.picture_models import picture_file, picture_model
from support.models.tiny_models import tiny_llama

import edgedec
from edgedec import Engine
from edgedec.api.options import Lossy
from edgedec.errors import MemoryCapError, PromptTooLongError, RequestError
from edgedec.load_options import LoadOptions
from edgedec.model import RowGroup, Span
from edgedec.pictures import placed
from edgedec_runtimes.cpu.runtime import Cpu
from edgedec_runtimes.layer_skip.layer_sets import without

pytestmark = pytest.mark.slow
pytest.importorskip("llama_cpp")
pytest.importorskip("PIL.Image")
ONE, TWO = picture_file(), picture_file(seed=1)
DRAWS: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 1.0, "seed": 7}]


def asked(*pictures: bytes, text: str = "ab ab ab ab") -> list[dict[str, Any]]:
    return [{"role": "user", "content": text, "images": list(pictures)}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return picture_model(tmp_path_factory.mktemp("pictures"))


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[Engine]:
    with edgedec.load(model, runtime="cpu", n_threads=1, n_parallel=2, draft="suffix", n_ctx=1024) as engine:
        yield engine


@pytest.mark.parametrize("draw", DRAWS)
def test_the_text_is_the_same_with_drafts_and_differs_by_picture(engine: Engine, draw: dict[str, Any]) -> None:
    texts = [
        engine.chat(asked(picture), max_tokens=40, draft=draft, **draw)
        for picture in (ONE, TWO)
        for draft in (True, False)
    ]
    assert texts[0].token_ids == texts[1].token_ids != texts[2].token_ids
    assert texts[2].token_ids == texts[3].token_ids
    assert texts[0].stats.n_prompt_tokens == len(engine.chat_ids(asked(ONE)))


def test_what_is_kept_is_reused_for_the_same_picture_only(engine: Engine) -> None:
    engine.chat(asked(ONE, text="one"), max_tokens=2)
    n_prompt = len(engine.chat_ids(asked(ONE, text="one")))
    again = engine.chat(asked(ONE, text="two"), max_tokens=2).stats
    other = engine.chat(asked(picture_file(seed=2), text="one"), max_tokens=2).stats  # which no other test asks about
    n_rows = engine.requests.mark_pictures(asked(ONE))[1][0].n_rows
    assert again.n_reused_tokens > n_rows
    assert other.n_reused_tokens < n_prompt - n_rows


def test_the_steps_apart_write_what_chat_writes(engine: Engine) -> None:
    marked, pictures = engine.requests.mark_pictures(asked(ONE))
    ids = engine.requests.rendered_ids(engine.requests.render(marked), pictures)
    assert ids == engine.chat_ids(asked(ONE))
    text = engine.generate(ids, pictures=engine.requests.picture_rows(pictures), max_tokens=12, **DRAWS[0])
    assert text.token_ids == engine.chat(asked(ONE), max_tokens=12, **DRAWS[0]).token_ids
    with pytest.raises(RequestError, match="token"):
        engine.generate(ids, max_tokens=2)


def test_marks_in_a_users_text_stay_text(engine: Engine) -> None:
    mark = engine.tokenizer.encode("<fake_token_around_image>", add_special=False, parse_special=True)
    assert len(mark) == 1
    ids = [engine.chat_ids(asked(ONE, text=text)).count(mark[0]) for text in ("a", "a <fake_token_around_image>")]
    assert ids[0] == ids[1] > 0


def test_a_chat_that_is_too_long_loses_its_oldest_pictures(engine: Engine) -> None:
    turn = [*asked(picture_file(120, 120)), {"role": "assistant", "content": "yes"}]
    chat = [*turn * 30, *asked(TWO)]
    with pytest.raises(PromptTooLongError):
        engine.chat_ids(chat)
    kept, n_left_out = engine.fit_messages(chat, 50)
    assert kept == chat[n_left_out:]
    assert 0 < n_left_out < len(chat) - 2
    assert engine.chat(kept, max_tokens=2).token_ids


def test_layers_that_are_left_out_read_pictures(tmp_path: Path) -> None:
    """The text is that of forwards by hand through the same layers, with drafts and without; it is another one."""
    path, out = picture_model(tmp_path, n_layer=6), Lossy(layer_skip=1.4, layer_skip_force=True)
    options: dict[str, Any] = {"runtime": "cpu", "n_threads": 1, "n_ctx": 1024}
    with edgedec.load(path, draft="suffix", lossy=out, **options) as engine:
        texts = [engine.chat(asked(ONE), max_tokens=30, draft=draft, **DRAWS[0]).token_ids for draft in (True, False)]
        pictures = engine.requests.mark_pictures(asked(ONE))[1]
        ids, rows = engine.chat_ids(asked(ONE)), engine.requests.picture_rows(pictures)
        layers = without(6, engine.card.left_out)
    expected = []
    with Cpu().load(path, LoadOptions(n_ctx=1024, n_threads=1)) as model:
        for of_rows in (layers, None):
            session, text, n_past, span = model.session(1024), list(ids), 0, Span(layers=of_rows)
            for start, end, picture in placed(ids, rows):
                session.forward(np.array(ids[n_past:start], np.int32), n_past=n_past, layers=of_rows)
                evaluated(session, start, RowGroup(vectors=picture.rows, span=span, sees=picture.block))
                n_past = end
            for _ in range(30):
                forward = session.forward(np.array(text[n_past:], np.int32), n_past=n_past, layers=of_rows)
                n_past = len(text)
                text.append(int(forward.logits[0].argmax()))
            expected.append(tuple(text[len(ids) :]))
    assert texts == [expected[0]] * 2
    assert expected[0] != expected[1]


def test_under_a_cap_pictures_are_planned_or_left_out_by_name(model: Path) -> None:
    with edgedec.load(model, runtime="cpu", n_threads=1, memory="700MB") as engine:
        names = [term.name for term in engine.plan.terms]
        assert {"process of pictures", "picture encoder", "encoder's buffers", "pixels", "rows of pictures"} <= {*names}
        assert engine.chat(asked(ONE), max_tokens=2).token_ids
    with edgedec.load(model, runtime="cpu", n_threads=1, memory="100MB") as engine:
        assert "pictures left out" in engine.plan.given_up
        assert engine.requests.pictures is None
        with pytest.raises(RequestError, match="the memory plan left pictures out; allow more"):
            engine.chat(asked(ONE))
    with pytest.raises(MemoryCapError, match="process of pictures"):
        edgedec.load(model, runtime="cpu", memory="100MB", projector=model.with_name("mmproj-tiny-f16.gguf"))


def test_a_model_without_a_projector_says_what_is_missing(tmp_path: Path, model: Path) -> None:
    path = tiny_llama(tmp_path / "plain.gguf", n_ctx_train=512, chat_template="{{ messages[0].content }}")
    with edgedec.load(path, runtime="cpu", n_threads=1) as engine:
        assert engine.requests.pictures is None
        with pytest.raises(RequestError, match=r"reads no pictures: no mmproj\*\.gguf lies beside it"):
            engine.chat(asked(ONE))
    with edgedec.load(model, runtime="cpu", n_threads=1, projector=None) as engine:
        assert engine.requests.pictures is None
    with pytest.raises(RequestError, match="image_max_tokens"):
        edgedec.load(model, image_max_tokens=0)


@pytest.mark.parametrize("runtime", ["llamacpp", "reference"])
def test_other_runtimes_read_pictures(model: Path, runtime: str, engine: Engine) -> None:
    with edgedec.load(model, runtime=runtime, n_threads=1, n_ctx=512) as other:
        text = other.chat(asked(ONE), max_tokens=4, **DRAWS[0])
    assert text.token_ids == engine.chat(asked(ONE), max_tokens=4, **DRAWS[0]).token_ids
