"""Pictures with a share of their rows: which rows stay, beside float64; ids, kept prompts, drafts; what is refused."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.models.siglip_files import siglip_projector
from support.models.siglip_truth import true_seen

import edgedec
from edgedec import Lossy
from edgedec.errors import CapabilityError, EdgedecError, OptionError, RequestError
from edgedec_methods.picture_rows import PictureRows
from edgedec_runtimes.pictures.contract import Picture
from edgedec_runtimes.pictures.fewer_rows import RowChooser
from edgedec_runtimes.pictures.header import read_projector
from edgedec_runtimes.pictures.native_encoder import NativeEncoder, open_native

LARGE, SMALL = 144, 96  # 18 x 18 patches are more than the keys, and the queries, that are multiplied together


@dataclass(frozen=True)
class Watcher(PictureRows):
    """Keeps what the encoder saw."""

    seen: tuple[NDArray[np.float32], ...] = ()

    def worth(self, seen: NDArray[np.float32]) -> NDArray[np.float32]:
        object.__setattr__(self, "seen", (*self.seen, seen))
        return super().worth(seen)


def noise(side: int) -> Picture:
    return Picture(side, side, np.random.default_rng(0).integers(0, 256, side * side * 3, np.uint8).tobytes())


def truth(path: Path, side: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    return true_seen(path, np.frombuffer(noise(side).rgb, np.uint8).reshape(side, side, 3), n_head=3)


def projector(path: Path, kind: str, side: int, merge: int = 4) -> Path:
    """Write an encoder of three layers and three heads, whose last tile is the whole picture."""
    return siglip_projector(path, kind, n_embd=48, n_head=3, n_layer=3, image_size=side, merge=merge)


def opened(path: Path, chooser: RowChooser | None = None, n_threads: int = 1) -> NativeEncoder:
    encoder = open_native(path, read_projector(path), n_threads, None, chooser)
    assert encoder is not None
    return encoder


@pytest.mark.slow
@pytest.mark.parametrize("by", ["flow", "attention"])
def test_what_patches_give_is_that_of_float64_with_any_number_of_threads(by: str, tmp_path: Path) -> None:
    path, seen = projector(tmp_path / "m.gguf", "gemma3", LARGE, 2), list[NDArray[np.float32]]()
    for n_threads in (1, 3):
        watcher = Watcher(0.5, by)
        opened(path, watcher, n_threads).encode(noise(LARGE))
        seen += watcher.seen
    mass, flow = truth(path, LARGE)
    np.testing.assert_allclose(seen[0], flow if by == "flow" else mass[None], rtol=2e-4)
    assert [each.tobytes() for each in seen] == [seen[0].tobytes()] * 2


@pytest.mark.parametrize("by", ["flow", "attention"])
@pytest.mark.parametrize(("kind", "merge"), [("gemma3", 4), ("idefics3", 2)])
def test_the_best_rows_stay_in_their_order(kind: str, merge: int, by: str, tmp_path: Path) -> None:
    """They have the bits that they have among all rows; a row's score is the sum of its patches' scores."""
    path = projector(tmp_path / "m.gguf", kind, SMALL, merge)
    everything, some = opened(path), opened(path, PictureRows(0.33, by))
    mass, flow = truth(path, SMALL)
    worth = 0.5 * flow[2] + 0.25 * flow[1] + 0.25 * flow[0] if by == "flow" else mass
    n = SMALL // 8 // merge
    sums = np.zeros((n, n))
    for i, score in enumerate(worth):
        sums[i // (n * merge) // merge, i % (n * merge) // merge] += score
    best = sorted(sorted(range(n * n), key=lambda i: -sums.ravel()[i])[: round(0.33 * n * n)])
    rows, fewer = everything.encode(noise(SMALL))[-1], some.encode(noise(SMALL))[-1]
    assert fewer.tobytes() == rows[best].tobytes()
    before, after = (each.layout(SMALL, SMALL) for each in (everything, some))
    blocks = tuple(replace(block, n_rows=round(0.33 * n * n), n_x=round(0.33 * n * n)) for block in before.blocks)
    assert after == replace(before, blocks=blocks)
    assert len({everything.identity, some.identity, opened(path, PictureRows(0.34, by)).identity}) == 3
    assert some.terms()[1].n_bytes > everything.terms()[1].n_bytes
    whole = opened(path, PictureRows(1.0, by))
    assert (whole.identity, whole.layout(SMALL, SMALL)) == (everything.identity, before)
    assert whole.encode(noise(SMALL))[-1].tobytes() == rows.tobytes()


def test_one_row_stays_at_least(tmp_path: Path) -> None:
    (rows,) = opened(projector(tmp_path / "m.gguf", "gemma3", SMALL), PictureRows(1e-9)).encode(noise(SMALL))
    assert rows.shape == (1, 64)


@pytest.mark.parametrize(
    "options", [{}, {"share": 0}, {"share": 1.1}, {"share": True}, {"share": 0.3, "by": "size"}], ids=str
)
def test_what_is_no_share_and_no_score_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=r"share of a picture's rows|flow or attention"):
        PictureRows(**options)


@pytest.fixture
def ask(tmp_path: Path) -> Callable[..., Any]:
    """Return a function that loads a tiny model with options of the method, and asks about a picture.

    It returns the prompt's ids, and the texts with drafts and without.
    """
    pytest.importorskip("llama_cpp")
    pytest.importorskip("PIL.Image")
    from support.models.picture_models import picture_file, picture_model

    model = picture_model(tmp_path)
    message = [{"role": "user", "content": "ab " * 160, "images": [picture_file()]}]
    usual: dict[str, Any] = {"runtime": "cpu", "n_threads": 1, "draft": "suffix", "n_ctx": 1024, "prompt_cache": "1GB"}
    draw: dict[str, Any] = {"max_tokens": 40, "temperature": 1.0, "seed": 7}

    def asked(**options: Any) -> tuple[list[int], Any, Any]:
        lossy = Lossy(methods={"picture_rows": options}) if options else Lossy()
        with edgedec.load(model, lossy=lossy, cache_dir=tmp_path / "cache", **usual) as engine:
            texts = [engine.chat(message, draft=draft, **draw) for draft in (True, False)]
            return engine.chat_ids(message), texts[0], texts[1]

    return asked


SHARES: list[dict[str, Any]] = [{"share": 0.5}, {"share": 0.5, "by": "attention"}, {"share": 0.33}]


@pytest.mark.slow
@pytest.mark.parametrize("options", SHARES, ids=str)
def test_texts_are_the_same_with_drafts_and_kept_prompts_are_of_one_share(
    ask: Callable[..., Any], options: dict[str, Any]
) -> None:
    """Prompts are kept by ids: a process that asks with another share reads the picture, one with the same does not."""
    ids, first, plain = ask(**options)
    n_before = next(i for i, each in enumerate(ids) if each < 0)
    assert (first.stats.n_reused_tokens <= n_before, first.stats.n_draft_tokens > 0) == (True, True)
    again = ask(**options)[1]
    assert first.token_ids == again.token_ids == plain.token_ids
    assert again.stats.n_reused_tokens > n_before


@pytest.mark.slow
def test_ids_differ_by_share_and_score_and_all_rows_are_as_without_the_method(ask: Callable[..., Any]) -> None:
    ids, text, _ = ask()
    whole = ask(share=1.0)
    assert (whole[0], whole[1].token_ids, whole[1].stats.n_reused_tokens > 256) == (ids, text.token_ids, True)
    rows = [{each for each in row_ids if each < 0} for row_ids in (ids, *(ask(**options)[0] for options in SHARES))]
    assert [len(each) for each in rows] == [20, 10, 10, 5]
    assert len(set().union(*rows)) == sum(map(len, rows))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "error"), [("qwen2vl_merger", CapabilityError), ("", RequestError)])
def test_no_encoder_of_ours_is_an_error(kind: str, error: type[EdgedecError], tmp_path: Path) -> None:
    """libmtmd says nothing of its patches; a model without a projector reads no pictures."""
    pytest.importorskip("llama_cpp")
    from support.models.picture_models import picture_model
    from support.models.tiny_models import tiny_llama

    model = picture_model(tmp_path, kind) if kind else tiny_llama(tmp_path / "m.gguf", n_ctx_train=512)
    with pytest.raises(error, match="leave the method out") as caught:
        edgedec.load(model, runtime="cpu", n_threads=1, lossy=Lossy(methods={"picture_rows": {"share": 0.5}}))
    assert ("libmtmd (qwen2vl_merger)" if kind else "projector") in str(caught.value)
