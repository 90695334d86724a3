"""min_tokens: a text goes on to so many tokens, drafted or not, and is the plain one up to where that would end."""

from pathlib import Path
from typing import Any

import pytest
from support.models.tiny_models import tiny_llama

import edgedec
from edgedec.errors import RequestError
from edgedec.grammar import Grammar

PROMPT = "the cat and the cat and the "


@pytest.mark.parametrize("way", [{"temperature": 0.0}, {"temperature": 0.9, "seed": 3}])
def test_a_text_has_as_many_tokens(tmp_path: Path, way: dict[str, Any]) -> None:
    """No text is shorter, and with drafts it is the same; a plain text that is long enough stays as it is."""
    texts = []
    for draft in ("off", "suffix"):
        with edgedec.load(tiny_llama(tmp_path / f"{draft}.gguf"), runtime="cpu", n_ctx=256, draft=draft) as engine:
            (end, *_) = (i for i in range(engine.tokenizer.n_vocab) if engine.tokenizer.is_end(i))
            likely = way | {"logit_bias": {end: 8.0}, "max_tokens": 60}
            plain = engine.generate(PROMPT, **likely)
            n = len(plain.token_ids)
            for least in (0, n, n + 9):
                longer = engine.generate(PROMPT, **likely, methods={"min_tokens": least})
                assert len(longer.token_ids) >= least
                assert longer.token_ids[:n] == plain.token_ids
                assert (longer.token_ids == plain.token_ids) == (least <= n)
                texts.append((draft, longer.token_ids))
            with pytest.raises(RequestError, match="a grammar decides where the text ends"):
                engine.generate(PROMPT, grammar=Grammar.regex("a+"), methods={"min_tokens": 2})
            with pytest.raises(RequestError, match=r"min_tokens is 2\.5; it must be a whole number from 0"):
                engine.generate(PROMPT, methods={"min_tokens": 2.5})
            past = engine.generate(PROMPT, **likely, ignore_end=True, methods={"min_tokens": 2})
            assert past.token_ids == engine.generate(PROMPT, **likely, ignore_end=True).token_ids
    assert [ids for draft, ids in texts if draft == "off"] == [ids for draft, ids in texts if draft == "suffix"]
