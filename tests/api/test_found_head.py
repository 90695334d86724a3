"""load uses the draft head that lies beside its model, or the one it is told, and says why it uses none."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.heads.loaded_blocks import FLOATS
from support.heads.tiny_heads import OF_FLOATS, write_head
from support.heads.tiny_nextn import nextn_metadata, nextn_tensors, write_nextn
from support.models.gguf_writer import write_gguf
from support.models.tiny_quantized import write_tiny

import edgedec
from edgedec.api.load import asked_plan
from edgedec.api.options import LIBRARY, EngineOptions
from edgedec.api.plan import find_model
from edgedec.errors import EdgedecError, ModelFormatError, ModelNotFoundError, RequestError, UnsupportedModelError
from edgedec.load_plan import LoadPlan
from edgedec_runtimes.trained_heads.record import RECORD_FILE, record_text


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Return a tiny model with a head beside it."""
    write_head(tmp_path / "m.head", OF_FLOATS)
    return write_tiny(tmp_path / "m.gguf", FLOATS)


def _wishes(model: Path, **options: Any) -> LoadPlan:
    given: dict[str, Any] = {"runtime": "cpu", "cache_dir": model.parent / "cache"} | options
    chosen = EngineOptions(**given)
    return asked_plan(find_model(model, chosen, None), chosen, LIBRARY)


def _used(wishes: LoadPlan) -> Path | None:
    assert ("head" in wishes.drafters) == (wishes.options.draft_head is not None)
    return wishes.options.draft_head


def test_auto_uses_the_head_beside_the_model(model: Path) -> None:
    """So does naming the drafter; other drafters, off, and draft_head="off" leave it alone."""
    head = model.with_name("m.head")
    assert _used(_wishes(model)) == head
    assert _used(_wishes(model, draft="head")) == head
    assert _used(_wishes(model, draft="suffix")) is None
    assert _used(_wishes(model, draft="off")) is None
    assert _used(_wishes(model, draft_head="off")) is None
    assert _wishes(model, draft_head="off").notes == ()


def test_the_head_that_is_named_wins(model: Path, tmp_path: Path) -> None:
    """Where no drafter reads it, the statistics say so."""
    other = tmp_path / "other"
    write_head(other, OF_FLOATS)
    assert _used(_wishes(model, draft_head=other)) == other
    wishes = _wishes(model, draft="suffix", draft_head=other)
    assert _used(wishes) is None
    (note,) = wishes.notes
    assert note == f"the draft head {other} is not used, as nothing in suffix reads it"
    (note,) = _wishes(model, draft="off", draft_head=other).notes
    assert note.endswith("is not used, as nothing is drafted")


@pytest.mark.slow
def test_auto_uses_the_nextn_layer_of_the_models_file(tmp_path: Path) -> None:
    """A head beside the model, and one that is named, win; off and other drafters leave the layer alone."""
    model, alone = write_nextn(tmp_path / "n.gguf", FLOATS), write_nextn(tmp_path / "alone.gguf", FLOATS, alone=True)
    assert _used(_wishes(model)) == model
    assert _used(_wishes(model, draft="head")) == model
    assert _used(_wishes(model, draft_head=alone)) == alone
    assert _used(_wishes(model, draft_head=model)) == model
    assert _used(_wishes(model, draft="off")) is None
    assert _used(_wishes(model, draft="suffix")) is None
    assert _used(_wishes(model, draft_head="off")) is None
    assert _used(_wishes(model, runtime="reference")) is None
    write_head(tmp_path / "n.head", OF_FLOATS)
    assert _used(_wishes(model)) == tmp_path / "n.head"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"blk.4.nextn.enorm.weight": None}, "it has no tensor 'blk.4.nextn.enorm.weight'"),
        ({"blk.4.nextn.eh_proj.weight": (48, 95)}, r"its tensor 'joint' has the shape \(95, 48\), expected \(48, 96\)"),
        ({"blk.4.ffn_norm.weight": None}, "it has no tensor 'blk.0.ffn_norm.weight'"),
        ({"blk.4.attn_q.weight": (48, 48)}, r"tensor 'blk.0.attn_q.weight' has the shape \(48, 48\)"),
    ],
)
def test_a_damaged_nextn_layer_is_noted_or_refused(
    change: dict[str, tuple[int, ...] | None], why: str, tmp_path: Path
) -> None:
    """The model is used without it, with a note that names what is wrong; one that was named is an error."""
    tensors: dict[str, Any] = dict(nextn_tensors(FLOATS))
    for name, shape in change.items():
        if shape is None:
            del tensors[name]
        else:
            tensors[name] = np.zeros(shape[::-1], np.float32)
    model = write_gguf(tmp_path / "n.gguf", nextn_metadata(FLOATS), tensors)
    wishes = _wishes(model)
    assert _used(wishes) is None
    (note,) = wishes.notes
    assert note.startswith("the draft head n.gguf was found, but is not used: ")
    assert re.search(why, note)
    with pytest.raises(EdgedecError, match=why):
        _wishes(model, draft_head=model)


def test_a_head_that_does_not_fit_is_noted_or_refused(model: Path) -> None:
    """One that was found is passed over with a note; one that was named is an error."""
    head = model.with_name("m.head")
    (head / RECORD_FILE).write_text(record_text("h", None, None, taps=[2, 3, 9]))
    wishes = _wishes(model)
    assert _used(wishes) is None
    (note,) = wishes.notes
    assert "m.head was found, but is not used: the draft head h does not fit the model: it taps layer 9" in note
    with pytest.raises(UnsupportedModelError, match="it taps layer 9"):
        edgedec.load(model, runtime="cpu", draft_head=head, n_ctx=64, runtime_options={"tile_cache": False})


def test_what_is_wrong_with_a_named_head_is_said_whatever_the_runtime(model: Path, tmp_path: Path) -> None:
    """A model in place of a head, and a damaged head, are not called a matter of the runtime."""
    with pytest.raises(UnsupportedModelError, match="no trained draft head"):
        edgedec.load(model, draft_head=model)
    damaged = tmp_path / "damaged"
    write_head(damaged, OF_FLOATS)
    (damaged / "model.safetensors").write_bytes(b"{}")
    with pytest.raises(ModelFormatError, match="claims a header"):
        edgedec.load(model, draft_head=damaged)
    with pytest.raises(ModelNotFoundError, match="'no such head'"):
        edgedec.load(model, draft_head="no such head", offline=True)


def test_only_runtimes_that_take_heads_get_one(model: Path) -> None:
    """A head that is named decides the runtime, or is refused; one that is found changes nothing."""
    head = model.with_name("m.head")
    assert _used(_wishes(model, runtime="reference")) is None
    chosen = EngineOptions(draft_head=head, cache_dir=model.parent / "cache")
    assert find_model(model, chosen, None, measure=False).runtime.name == "cpu"
    with pytest.raises(RequestError, match="use the cpu runtime"):
        edgedec.load(model, runtime="reference", draft_head=head, n_ctx=64)


def test_two_models_in_turn_have_no_head(model: Path) -> None:
    """A named head is refused beside a small model."""
    switching = edgedec.Lossy(methods={"switching": {"small_model": model, "entropy": 1.0}})
    with pytest.raises(RequestError, match="a draft head"):
        _wishes(model, draft_head=model.with_name("m.head"), lossy=switching)
