"""Filling in the middle: the prompt that makes a model write what stands between two texts.

The tokens around the texts are those that the model was trained with (Bavarian et al. 2022, arXiv:2207.14255); the
order is the usual one: what stands before, what stands after, then what is between.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from edgedec.api.engine import Engine
from edgedec.callers import checks_arguments
from edgedec.decoding.prompt_length import encode_prompt, require_may_fit, too_long
from edgedec.errors import RequestError
from edgedec.tokenizer import Tokenizer

_NEEDED = ("pre", "suf", "mid")
_REPOSITORY = "myproject\n"  # as llama.cpp calls the repository whose name it does not know
_SNIPPET = "\n\n--- snippet ---\n\n"


@dataclass(frozen=True, slots=True)
class Gap:
    """What surrounds a text that is to be written.

    Attributes:
        before: The text before the gap.
        after: The text after the gap.
        begun: The beginning of what is to be written.
        files: Names and texts of other files that the model may look at.
    """

    before: str
    after: str
    begun: str = ""
    files: tuple[tuple[str, str], ...] = ()

    @property
    def texts(self) -> list[str]:
        """All of its texts."""
        return [self.before, self.after, self.begun, *(text for file in self.files for text in file)]


def can_infill(tokenizer: Tokenizer) -> bool:
    """Return whether a model has tokens for filling in the middle."""
    return all(role in tokenizer.infill_ids for role in _NEEDED)


def require_infill(tokenizer: Tokenizer) -> None:
    """Raise RequestError where a model has no tokens for filling in the middle."""
    if not can_infill(tokenizer):
        raise RequestError(
            "the model has no tokens for filling in the middle; use one that was trained for it, "
            "such as qwen2.5-coder-0.5b (docs/better-answers.md)"
        )


def gap_ids(tokenizer: Tokenizer, gap: Gap, n_most: int) -> list[int]:
    """Return the prompt that makes the model write what belongs into a gap, at most `n_most` tokens.

    Raises:
        RequestError: The model has no tokens for filling in the middle.
        PromptTooLongError: The prompt has more tokens.
    """
    require_infill(tokenizer)
    require_may_fit(tokenizer, "".join(gap.texts), n_most)
    ids = tokenizer.infill_ids

    def encoded(text: str) -> list[int]:
        return encode_prompt(tokenizer, text, n_most, add_special=False)

    around = tokenizer.encode("", add_special=True)
    begins = around[:1] if around and not tokenizer.is_end(around[0]) else []
    files = _file_ids(tokenizer, gap.files, n_most)
    before, after = [ids["pre"], *encoded(gap.before)], [ids["suf"], *encoded(gap.after)]
    token_ids = [*begins, *files, *before, *after, ids["mid"], *encoded(gap.begun)]
    if len(token_ids) > n_most:
        raise too_long(len(token_ids), n_most)
    return token_ids


@checks_arguments
def infill_ids(engine: Engine, before: str, after: str, *, files: Sequence[tuple[str, str]] = ()) -> list[int]:
    """Return a prompt, as token ids, that makes the model write what belongs between two texts.

    Args:
        before: The text before the gap.
        after: The text after the gap.
        files: Names and texts of other files that the model may look at.

    Raises:
        RequestError: The model has no tokens for filling in the middle.
        PromptTooLongError: The prompt does not fit the context.
    """
    return gap_ids(engine.tokenizer, Gap(before, after, files=tuple(files)), engine.requests.n_prompt_max)


def _file_ids(tokenizer: Tokenizer, files: Sequence[tuple[str, str]], n_most: int) -> list[int]:
    """Return the tokens of other files, each after its name where the model has a token for that."""
    ids, token_ids = tokenizer.infill_ids, list[int]()
    if not files:
        return token_ids

    def add(text: str) -> None:
        token_ids.extend(encode_prompt(tokenizer, text, n_most, add_special=False))

    if "rep" in ids:
        token_ids.append(ids["rep"])
        add(_REPOSITORY)
    for name, text in files:
        if "sep" in ids:
            token_ids.append(ids["sep"])
            add(f"{name}\n")
        else:
            add(_SNIPPET)
        add(text)
    if "sep" in ids:
        token_ids.append(ids["sep"])
        add("filename\n")
    return token_ids
