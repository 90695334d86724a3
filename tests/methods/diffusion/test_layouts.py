"""What a pass over a block evaluates, and whose keys and values stay; FreeDave needs fewer passes."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from support.decoding.plain_denoising import FORMS, MASK, looked_at, write_model

import edgedec
from edgedec.api.options import Lossy
from edgedec.errors import ModelFormatError, OptionError
from edgedec.gguf.file import read_gguf
from edgedec.load_options import LoadOptions
from edgedec.model import Forward, ForwardItem
from edgedec.sampling import SamplingParams
from edgedec.sequence import Generation
from edgedec_methods.diffusion.block_diffusion import Diffusion
from edgedec_methods.diffusion.delayed import delayed
from edgedec_methods.diffusion.in_front import in_front
from edgedec_methods.diffusion.rules import Canvas
from edgedec_methods.diffusion.window import window
from edgedec_runtimes.cpu.runtime import Cpu
from edgedec_runtimes.reference.model import ReferenceModel
from edgedec_runtimes.reference.network import KVCache, Row, embeddings, evaluate_together, logits
from edgedec_runtimes.reference.runtime import Reference
from edgedec_runtimes.shared.denoising import denoising

PROMPT, N, LENGTH = [1, *range(70, 79)], 20, 8
Stays = Callable[[int, int, int], bool]
"""(position, number of the pass, passes since it was committed) -> whether its keys and values stay."""


def plain(path: Path, stays: Stays, n_behind: int, shift: int) -> list[int]:
    """Write a text on the reference runtime: each pass evaluates what does not stay, and commits two positions."""
    ids, committed = [*PROMPT, *[MASK] * N], dict.fromkeys(range(len(PROMPT)), -100)
    with Reference().load(path, LoadOptions(n_ctx=64)) as model:
        assert isinstance(model, ReferenceModel)
        cache: KVCache = model.session(64).cache
        for start in range(len(PROMPT), len(ids), LENGTH):
            end, i = min(start + LENGTH, len(ids)), 0
            while places := looked_at(model, ids, start, end):
                seen = range(min(len(ids), end + n_behind))
                wanted = {place - shift for place in places}
                # What is outside the block has an age above all passes of the block.
                age = {place: i - committed[place] if place in committed else 0 for place in seen}
                age |= {place: 100 for place in seen if place >= end and n_behind < N}
                fresh = [place for place in seen if place in wanted or not stays(place, i, age[place])]
                rows = [
                    Row(
                        np.arange(place + 1),
                        places=np.full(3, place, np.int32),
                        behind=np.arange(place + 1, len(seen)),
                    )
                    for place in fresh
                ]
                states = embeddings(model.handle, np.array([ids[place] for place in fresh], np.int32))
                found = dict(zip(fresh, evaluate_together(model.handle, cache, states, rows), strict=True))
                laws = {place: logits(model.handle, found[place - shift].state).astype(np.float64) for place in places}
                for law in laws.values():
                    law[MASK] = -np.inf
                sure = {place: 1 / np.exp(law - law.max()).sum() for place, law in laws.items()}
                for place in sorted(places, key=lambda place: -sure[place])[:2]:
                    ids[place], committed[place] = int(laws[place].argmax()), i
                i += 1
            committed |= dict.fromkeys(range(start, end), -100)
    return ids[len(PROMPT) :]


def check(folder: Path, layout: str, stays: Stays, n_behind: int, *, shift: bool) -> None:
    """Check that texts with a layout are those of the plain form, with fewer rows than without it."""
    path = write_model(folder / "m.gguf", "whole", **{"diffusion.shift_logits": shift})
    found, rows = [], []
    for rule in ("schedule:2", f"schedule:2,{layout}"):
        lossy = Lossy(methods={"diffusion": {"denoise": rule, "length": LENGTH}})
        with edgedec.load(path, runtime="cpu", n_ctx=64, n_threads=1, lossy=lossy) as engine:
            for _ in range(2):  # the second one finds what the first one has left
                result = engine.generate(PROMPT, max_tokens=N, temperature=0.0, ignore_end=True)
                found.append(list(result.token_ids))
            rows.append(int(result.stats.explanation[-1].split(";")[-1].split()[0]))
    assert found[2] == found[3] == plain(path, stays, n_behind, shift)
    assert rows[1] < rows[0]


@pytest.mark.parametrize(("n_passes", "kept"), [(0, []), (1, [1, 0, 2]), (2, [1, 0, 2]), (3, [])])
def test_delayed_evaluates_masks_in_each_pass_and_settled_tokens_in_every_third(n_passes: int, kept: list[int]) -> None:
    """Positions behind the block are masks, too, though the pass before has left their keys and values."""
    canvas = Canvas(range(7), 2, 5, (4,), frozenset({4}), n_passes, held=(1, 0, 2, 4, 5, 6))
    assert delayed(canvas, 3) == (kept, [place for place in range(7) if place not in kept])


@pytest.mark.parametrize(("n_passes", "kept"), [(0, []), (1, [1, 0, 5]), (31, [1, 0, 5]), (32, []), (33, [1, 0, 5])])
def test_a_window_evaluates_what_stands_around_a_block_in_every_32nd_pass(n_passes: int, kept: list[int]) -> None:
    """The block in each; what is further behind than the number says, never."""
    canvas = Canvas(range(9), 2, 5, (4,), frozenset({4}), n_passes, held=(1, 0, 2, 3, 4, 5))
    fresh = [place for place in range(6) if place not in kept and not 2 <= place < 5]
    assert window(canvas, 1) == (kept, [*fresh, 2, 3, 4])


@pytest.mark.slow
@pytest.mark.parametrize("shift", [False, True])
def test_texts_of_delayed_are_those_of_a_plain_table(tmp_path: Path, shift: bool) -> None:
    """Every third pass evaluates everything."""
    check(tmp_path, "delayed:3", lambda place, i, age: i % 3 > 0 and age > 1, N, shift=shift)


@pytest.mark.slow
@pytest.mark.parametrize(("n_behind", "shift"), [(5, False), (0, True)])
def test_texts_of_a_window_are_those_of_a_plain_table(tmp_path: Path, n_behind: int, shift: bool) -> None:
    """Only as many masked positions behind the block are seen."""
    check(tmp_path, f"window:{n_behind}", lambda place, i, age: i > 0 and age > i, n_behind, shift=shift)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_layouts_are_for_whole_texts(tmp_path: Path, form: str) -> None:
    """A model of blocks has one already; a rule comes first, and is one."""
    path, wrong = write_model(tmp_path / "m.gguf", form), ["window", "threshold,credit", "threshold,window:x"]
    for rule in [*wrong, *(["threshold,window"] if form != "whole" else [])]:
        with pytest.raises(OptionError, match="denoise"):
            edgedec.load(path, runtime="cpu", lossy=Lossy(methods={"diffusion": {"denoise": rule}}))


@pytest.mark.parametrize(
    ("wanted", "placed"), [({3, 5, 7}, ([0, 1, 2], [4, 6, 3, 5, 7])), ({2, 4, 6}, ([0, 1], [2, 4, 6, 3, 5, 7]))]
)
def test_tokens_stand_in_front_of_masks(wanted: set[int], placed: tuple[list[int], list[int]]) -> None:
    """Those before the first mask need no forward, where no row of theirs is wanted."""
    assert in_front(Canvas([5, 6, 7, 0, 8, 0, 9, 0], 2, 8, [3, 5, 7], frozenset(wanted), 1, [])) == placed


@pytest.mark.slow
def test_a_file_says_one_form(tmp_path: Path) -> None:
    """A block and a window are refused together."""
    path = write_model(tmp_path / "m.gguf", "blocks", **{"diffusion.window_size": 8})
    with pytest.raises(ModelFormatError, match=r"diffusion\.window_size"):
        denoising(read_gguf(path))


def text(path: Path, rule: str, temperature: float, n_parallel: int = 1, n: int = 30) -> tuple[Generation, int]:
    """Return a text, and in how many forwards it came."""
    lossy = Lossy(methods={"diffusion": {"denoise": rule}})
    with edgedec.load(path, runtime="cpu", n_ctx=320, n_threads=1, lossy=lossy, n_parallel=n_parallel) as engine:
        found = engine.generate([1, *range(70, 79)], max_tokens=n, temperature=temperature, seed=1, ignore_end=True)
    counts = re.search(r"in (\d+) forwards", found.stats.explanation[-1])
    assert counts is not None
    return found, int(counts[1])


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_the_text_is_that_of_static_decoding(tmp_path: Path, form: str) -> None:
    """In fewer forwards, greedily and drawn, on a session of its own and on one of several."""
    path = write_model(tmp_path / "m.gguf", form)
    for temperature, n_parallel in ((0.0, 1), (1.0, 2)):
        static, n_static = text(path, "schedule:1", temperature)
        ahead, n_ahead = text(path, "free_dave:3", temperature, n_parallel)
        assert ahead.token_ids == static.token_ids
        assert n_ahead < n_static
        assert "no room" not in "".join((*static.stats.explanation, *ahead.stats.explanation))


@pytest.mark.slow
def test_what_has_no_room_ahead_is_told(tmp_path: Path) -> None:
    """Where the context is nearly full, some passes are those of static decoding."""
    found, _ = text(write_model(tmp_path / "m.gguf", "blocks"), "free_dave:3", 0.0, n=300)
    told = re.search(r"; (\d+) had no room for states ahead", found.stats.explanation[-1])
    assert told is not None
    assert 1 <= int(told[1]) <= 64


@pytest.mark.slow
def test_states_ahead_fit_into_what_is_planned(tmp_path: Path) -> None:
    """Rows of logits are at most three blocks with those that the block keeps, and forks fit into the context."""
    path, seen = write_model(tmp_path / "m.gguf", "blocks"), list[tuple[int, int]]()
    with Cpu().load(path, LoadOptions(n_threads=1, n_ctx=192, max_rows=1)) as model:
        forward = model.forward

        def counted(items: Sequence[ForwardItem]) -> list[Forward]:
            wanted = [len(item.rows) for item in items]
            seen.append(
                (8 - wanted[0] + 2 * sum(wanted) - wanted[0], items[0].n_past + items[0].n_rows + 64 * (len(items) - 1))
            )
            return forward(items)

        model.forward = counted  # type: ignore[method-assign]
        session = Diffusion("free_dave:8").session(model.session(192), None)
        prompt = np.array([1, *range(70, 79)], np.int32)
        with session.generating(len(prompt), SamplingParams(temperature=0.0)):
            row = session.forward(prompt, n_past=0).logits[0]
            for place in range(len(prompt), 180):
                row = session.forward(np.array([row.argmax()], np.int32), n_past=place).logits[0]
        session.close()
    assert max(rows for rows, _ in seen) in range(18, 25)
    assert max(tokens for _, tokens in seen) in range(129, 193), "a fork has a page of its own"
