"""Rules that revise: a text is that of a plain loop that looks at every position of a block in every pass."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from support.decoding.plain_denoising import ALL_FORMS, FORMS, MASK, Plain, write_model

import edgedec
from edgedec.api.options import Lossy
from edgedec.errors import OptionError
from edgedec.load_options import LoadOptions
from edgedec.model import Model
from edgedec.sampling import SamplingParams
from edgedec_runtimes.cpu.runtime import Cpu

pytestmark = pytest.mark.slow

PROMPT, N, LEAST = [1, 70, 80, 90, 100, 110, 120, 130, 140, 150, 160], 21, 0.1


def opened(path: Path, rule: str) -> edgedec.Engine:
    """Load a model with a rule."""
    return edgedec.load(
        path, runtime="cpu", n_ctx=96, lossy=Lossy(methods={"diffusion": {"denoise": rule}}), n_threads=1
    )


def edited(model: Model, form: str, prompt: Sequence[int]) -> tuple[list[int], int, list[str]]:
    """Return the text of `edit`, in how many passes it came, and what was done to committed positions."""
    plain = Plain(model, form, lambda confidences: confidences > 1, SamplingParams(temperature=0.0))
    block, shift = FORMS[form].get("diffusion.block_size"), FORMS[form]["diffusion.shift_logits"]
    ids, end_of_all, n_passes, done = list(prompt), len(prompt) + N, 0, list[str]()
    while (shown := len(ids)) < end_of_all:
        start = shown // block * block if block else shown
        end = start + block if block else end_of_all
        ids += [MASK] * ((end_of_all if form == "whole" else end) - shown)
        stood, was_masked_again, n = {place: set[int]() for place in range(shown, end)}, set[int](), 0
        while MASK in ids[shown:end]:
            shown, is_done = ids.index(MASK, shown) if n else shown, False
            while not is_done:
                ends = [i for i in range(shown, end) if ids[i] != MASK and model.tokenizer.is_end(ids[i])]
                places, before, n, n_passes = range(shown, min([*ends, end - 1]) + 1), list(ids), n + 1, n_passes + 1
                rows = plain._rows(ids, block or end_of_all, [place - shift for place in places]).astype(np.float64)
                rows[:, MASK] = -1e30
                laws = np.exp(rows - rows.max(1, keepdims=True))
                best = {
                    place: (int(row.argmax()), row.max() / row.sum()) for place, row in zip(places, laws, strict=True)
                }
                masked = [place for place in places if ids[place] == MASK]
                sure = [i for i in masked if best[i][1] >= 0.9] or sorted(masked, key=lambda i: -best[i][1])[:1]
                is_done = n == 3 * (end - start)
                for place, row in zip(places, laws, strict=True):
                    stood[place].add(now := before[place])
                    token, chance = best[place]
                    if now in (MASK, token) or is_done:
                        continue
                    if chance >= LEAST:
                        if token not in stood[place]:
                            ids[place] = token
                            done.append("changed")
                    elif row[now] / row.sum() < 0.05 and place not in was_masked_again:
                        ids[place] = MASK
                        was_masked_again.add(place)
                        done.append("masked")
                for place in masked if is_done else sure:
                    ids[place] = best[place][0]
                is_done |= all(ids[place] == before[place] != MASK for place in places)
        ids = ids[: min(end, end_of_all)]
    return ids[len(prompt) :], n_passes, done


@pytest.mark.parametrize("form", FORMS)
def test_a_text_is_that_of_the_plain_loop(form: str, tmp_path: Path) -> None:
    """Committed tokens are changed, and masked again; the block is shown when a pass has changed nothing."""
    path = write_model(tmp_path / "m.gguf", form)
    with opened(path, f"edit:{LEAST}") as engine, Cpu().load(path, LoadOptions(n_threads=1, n_ctx=96)) as model:
        all_done = set[str]()
        for prompt in (PROMPT, PROMPT[:8], PROMPT * 2):
            ids, n_passes, done = edited(model, form, prompt)
            found = engine.generate(prompt, max_tokens=N, temperature=0.0, ignore_end=True)
            assert list(found.token_ids) == ids
            assert f"21 tokens in {n_passes} forwards" in found.stats.explanation[-1]
            all_done |= set(done)
        assert all_done == {"changed", "masked"}


def test_what_can_not_be_revised_is_refused(tmp_path: Path) -> None:
    """A model that shows tokens before masks, and a layout that leaves positions out."""
    for form, rule in (("in_front", "edit"), ("whole", "edit,window:4")):
        with pytest.raises(OptionError, match=r"leave out|committed positions"):
            opened(write_model(tmp_path / f"{form}.gguf", form), rule)
    assert set(ALL_FORMS) - set(FORMS) == {"in_front"}
