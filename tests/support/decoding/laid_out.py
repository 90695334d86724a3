"""Denoising where passes evaluate a part of the text, in a plain form: a table of keys and values by position."""

from collections.abc import Callable
from pathlib import Path

import numpy as np

import edgedec
from edgedec.api.options import Lossy
from edgedec.load_options import LoadOptions
from edgedec_runtimes.reference.model import ReferenceModel
from edgedec_runtimes.reference.network import KVCache, Row, embeddings, evaluate_together, logits
from edgedec_runtimes.reference.runtime import Reference
from support.decoding.plain_denoising import MASK, looked_at, write_model

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
