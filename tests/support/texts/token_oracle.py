"""llama.cpp's own tokenizer of a GGUF, and the comparison with ours."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from edgedec.errors import UnsupportedModelError
from edgedec.tokenizer import Tokenizer
from edgedec_runtimes.llamacpp.library import captured_log, last_complaint, llama
from edgedec_runtimes.llamacpp.tokenizer import LlamaCppTokenizer

_FLAGS = ((True, True), (False, False), (False, True))  # add_special, parse_special


@contextmanager
def oracle(path: Path) -> Iterator[LlamaCppTokenizer]:
    """Load the vocabulary, without the weights, and free it in the end."""
    api = llama()
    params = api.llama_model_default_params()
    params.vocab_only = True
    with captured_log():
        model = api.llama_model_load_from_file(str(path).encode(), params)
    if not model:
        raise UnsupportedModelError(f"{path}: llama.cpp does not take it: {last_complaint()}")
    try:
        vocabulary = api.llama_model_get_vocab(model)
        yield LlamaCppTokenizer(lambda: vocabulary)
    finally:
        api.llama_model_free(model)


def differing_texts(ours: Tokenizer, theirs: Tokenizer, texts: Iterable[str]) -> list[str]:
    """Describe each text whose ids differ with any combination of flags."""
    found = []
    for text in texts:
        for add_special, parse_special in _FLAGS:
            mine = ours.encode(text, add_special=add_special, parse_special=parse_special)
            expected = theirs.encode(text, add_special=add_special, parse_special=parse_special)
            if mine != expected:
                at = next((i for i, (a, b) in enumerate(zip(mine, expected, strict=False)) if a != b), -1)
                found.append(f"{text!a} ({add_special=}, {parse_special=}) at {at}: {mine} != {expected}")
                break
    return found


def differing_tokens(ours: Tokenizer, theirs: Tokenizer) -> list[str]:
    """Describe each token whose piece or role differs, and the vocabulary's size and BOS and EOS where they do."""
    names = ("n_vocab", "bos_token", "eos_token")
    found = [name for name in names if getattr(ours, name) != getattr(theirs, name)]
    for i in range(min(ours.n_vocab, theirs.n_vocab)):
        mine, expected = ours.piece(i), theirs.piece(i)
        if mine != expected or ours.is_end(i) != theirs.is_end(i):
            found.append(f"{i}: {mine!r} {ours.is_end(i)} != {expected!r} {theirs.is_end(i)}")
    return found
