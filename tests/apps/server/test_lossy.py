"""A server that leaves out layers says so, on the model's card and with every reply's statistics."""

from pathlib import Path

from support.models.tiny_models import tiny_llama
from support.processes.running_server import CHAT, messages, started

from edgedec.api.options import Lossy
from edgedec_runtimes.layer_skip.choose import lossy_note


def test_the_card_names_what_is_left_out(tmp_path: Path) -> None:
    """With --layer-skip the card of /v1/models has the note of the statistics; without it has none."""
    path = tiny_llama(tmp_path / "tiny.gguf", n_layer=6, chat_template=CHAT, n_ctx_train=1024)
    for options, lossy in (({"lossy": Lossy(layer_skip=1.4, layer_skip_force=True)}, True), ({}, False)):
        with started(path, load_options=options) as running:
            (card,) = running.client.get("/v1/models").json()["data"]
            note = lossy_note(running.engine.card)
            assert ("lossy" in card["meta"]) == note.startswith("LOSSY: layers 2 3 left out") == lossy
            assert card["meta"].get("lossy", "") == note
            asked = {"messages": messages("x"), "max_tokens": 2}
            reply = running.client.post("/v1/chat/completions", json=asked).json()
            assert reply["choices"][0]["message"]["content"] is not None
