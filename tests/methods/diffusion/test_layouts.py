"""Passes that evaluate a part of the text: the texts are those of a plain form with a table of keys and values."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.decoding.plain_denoising import FORMS, MASK, write_model

import edgedec
from edgedec.api.options import Lossy
from edgedec.errors import OptionError
from edgedec.load_options import LoadOptions
from edgedec_runtimes.reference.kv_cache import KVCache
from edgedec_runtimes.reference.model import ReferenceModel
from edgedec_runtimes.reference.network import Row, embeddings, evaluate_together, logits
from edgedec_runtimes.reference.runtime import Reference

pytestmark = pytest.mark.slow

PROMPT, N, LENGTH = [1, *range(70, 79)], 20, 8
Stays = Callable[[int, int, int], bool]
"""(position, number of the pass, passes since it was committed) -> whether its keys and values stay."""


def window(n_behind: int) -> tuple[Stays, int]:
    """Return what stays in a window, and how far it goes."""
    return lambda place, i, age: i > 0 and age > i, n_behind


def delayed(every: int) -> tuple[Stays, int]:
    """Return what stays where tokens are kept late."""
    return lambda place, i, age: i % every > 0 and age > 1, N


def plain(path: Path, stays: Stays, n_behind: int, shift: int) -> list[int]:
    """Write a text on the reference runtime: each pass evaluates what does not stay, and commits two positions."""
    ids, committed = [*PROMPT, *[MASK] * N], dict.fromkeys(range(len(PROMPT)), -100)
    with Reference().load(path, LoadOptions(n_ctx=64)) as model:
        assert isinstance(model, ReferenceModel)
        cache: KVCache = model.session(64).cache
        for start in range(len(PROMPT), len(ids), LENGTH):
            end, i = min(start + LENGTH, len(ids)), 0
            while places := [place for place in range(start, end) if ids[place] == MASK]:
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


@pytest.mark.parametrize(
    ("layout", "form", "shift"),
    [
        ("window:5", window(5), False),
        ("window:0", window(0), True),
        ("delayed:3", delayed(3), False),
        ("delayed:3", delayed(3), True),
    ],
)
def test_texts_are_those_of_a_plain_table(tmp_path: Path, layout: str, form: tuple[Stays, int], shift: bool) -> None:
    """In as many passes, with fewer rows."""
    path = write_model(tmp_path / "m.gguf", "whole", **{"diffusion.shift_logits": shift})
    found, rows = [], []
    for rule in ("schedule:2", f"schedule:2,{layout}"):
        lossy = Lossy(methods={"diffusion": {"denoise": rule, "length": LENGTH}})
        with edgedec.load(path, runtime="cpu", n_ctx=64, n_threads=1, lossy=lossy) as engine:
            for _ in range(2):  # the second one finds what the first one has left
                result = engine.generate(PROMPT, max_tokens=N, temperature=0.0, ignore_end=True)
                found.append(list(result.token_ids))
            rows.append(int(result.stats.explanation[-1].split(";")[-1].split()[0]))
    assert found[2] == found[3] == plain(path, *form, shift)
    assert rows[1] < rows[0]


@pytest.mark.parametrize("form", FORMS)
def test_layouts_are_for_whole_texts(tmp_path: Path, form: str) -> None:
    """A model of blocks has one already; a rule comes first, and is one."""
    path, wrong = write_model(tmp_path / "m.gguf", form), ["window", "threshold,credit", "threshold,window:x"]
    for rule in [*wrong, *(["threshold,window"] if form != "whole" else [])]:
        with pytest.raises(OptionError, match="denoise"):
            edgedec.load(path, runtime="cpu", lossy=Lossy(methods={"diffusion": {"denoise": rule}}))
