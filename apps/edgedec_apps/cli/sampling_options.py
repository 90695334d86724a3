"""The options of a generation: sampling, and the grammar that a text keeps to."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgedec.errors import OptionError, RequestError
from edgedec_apps.cli.declared import sampling_flag

if TYPE_CHECKING:
    from edgedec.grammar import Grammar


_REGEX, _SWITCH = "regex:", {"on": True, "off": False}
PENALTIES: Mapping[str, str] = {
    "repetition": "repetition_penalty",
    "frequency": "frequency_penalty",
    "presence": "presence_penalty",
    "last-n": "penalty_last_n",
}
"""By the name that --penalty has, the argument of a generation."""


@dataclass(frozen=True)
class SamplingFlags:
    """The options of a generation; an option that is not given has the model's default."""

    max_tokens: int | None = sampling_flag("--max-tokens -n N", "Most tokens to generate.")
    temperature: float | None = sampling_flag("--temperature -t X", "0 always takes the most probable token.")
    top_k: int | None = sampling_flag("--top-k N", "Keep the N most probable tokens; 0 is off.", further=True)
    top_p: float | None = sampling_flag("--top-p X", "Keep this much probability; 1 is off.", further=True)
    min_p: float | None = sampling_flag(
        "--min-p X", "Keep tokens with at least X times the probability of the best; 0 is off.", further=True
    )
    penalty: list[str] | None = sampling_flag(
        "--penalty NAME=X",
        "Against repeated tokens: repetition=X (1 is off), frequency=X, presence=X (0 is off), of "
        "the last-n=N tokens, -1 for all. Repeatable.",
        further=True,
    )
    logit_bias: list[str] | None = sampling_flag(
        "--logit-bias ID=B", "Add B to the logit of token ID; -inf excludes it. Repeatable.", further=True
    )
    seed: int | None = sampling_flag("--seed N", "Same seed, same text.")
    stop: list[str] | None = sampling_flag("--stop TEXT", "End the text before this string. Repeatable.")
    logprobs: int | None = sampling_flag(
        "--logprobs N", "With --json: log-probabilities of the N most probable tokens.", further=True
    )
    grammar: str | None = sampling_flag(
        "--grammar --json-schema FILE",
        "Write JSON of the schema in this file, or a text of its grammar: GBNF where it ends in .gbnf, else "
        "Lark; or of regex:REGEX. A cut text gives exit code 45.",
    )
    think: str | None = sampling_flag(
        "--think on|off|N", "Whether the model thinks first, or for at most N tokens.", further=True
    )

    def as_options(self) -> dict[str, Any]:
        """Return the options that are given, by the names of SamplingParams; for grammars see grammar_options()."""
        values = {
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "min_p": self.min_p,
            "logit_bias": dict(map(_bias, self.logit_bias)) if self.logit_bias else None,
            "seed": self.seed,
            "stop": tuple(self.stop) if self.stop else None,
            "logprobs": self.logprobs,
        }
        return {name: value for name, value in values.items() if value is not None} | dict(
            map(_penalty, self.penalty or ())
        )


def grammar_options(flags: SamplingFlags, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options `grammar` and `think` of Engine.chat_stream, as far as the flags name them.

    Raises:
        RequestError: There is a method without the grammar that it needs, or one that does not go with a grammar; a
            file is not UTF-8; the grammar is invalid with any model.
        StorageError: A file can't be read.
    """
    think = {} if flags.think is None else {"think": _think(flags.think)}
    if flags.grammar is None:
        if options.get("json_close"):
            raise RequestError("--method json-close needs a grammar; give --json-schema or --grammar too")
        return think
    if options.get("ignore_end"):
        raise RequestError("--method ignore-end goes on past the end, which a grammar decides; leave it out")
    from edgedec_runtimes.grammar.compiler import require_valid

    require_valid(grammar := _grammar(flags.grammar))
    return {"grammar": grammar} | think


def _grammar(words: str) -> "Grammar":
    from edgedec.grammar import Grammar
    from edgedec_apps.cli.prompt import argument_text
    from edgedec_apps.texts import read_text

    if words.startswith(_REGEX):
        return Grammar.regex(argument_text(words.removeprefix(_REGEX), "--grammar") or "")
    text, ending = read_text(path := Path(words)), path.suffix.lower()
    if ending == ".json" or (ending not in (".gbnf", ".lark") and text.lstrip().startswith("{")):
        return Grammar.json_schema(text)
    return (Grammar.gbnf if ending == ".gbnf" else Grammar.lark)(text)


def _think(text: str) -> bool | int:
    if text in _SWITCH:
        return _SWITCH[text]
    if not text.isdecimal():
        raise OptionError("--think", text, "it must be on, off, or the most tokens of thoughts")
    return int(text)


def _penalty(text: str) -> tuple[str, float]:
    name, _, number = text.partition("=")
    penalty = PENALTIES.get(name.strip().replace("_", "-"))
    try:
        if penalty is None:
            raise ValueError(name)
        return penalty, int(number) if penalty == "penalty_last_n" else float(number)
    except ValueError:
        accepted = f"write NAME=X with one of {', '.join(PENALTIES)}, such as repetition=1.1"
        raise OptionError("--penalty", text, accepted) from None


def _bias(text: str) -> tuple[int, float]:
    token_id, _, bias = text.partition("=")
    try:
        return int(token_id), float(bias)
    except ValueError as error:
        raise RequestError(f"--logit-bias is {text!r}; write TOKEN_ID=BIAS, such as 50256=-inf") from error
