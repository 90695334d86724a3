"""What a person sees of a reply: the text as it comes, the summary after it, and whether it was cut."""

import re
import sys
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol

from edgedec.errors import CutTextError, counted
from edgedec.progress import Progress, stage
from edgedec_apps.cli.chat.echo import without_echo
from edgedec_apps.cli.shown.explain import Detail, explained, gain
from edgedec_apps.cli.shown.log import telling_of_losses
from edgedec_apps.cli.shown.progress import ProgressLine
from edgedec_apps.cli.shown.terminal import say, write_text, writes_a_file

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from edgedec.decoding.generate import TokenStream
    from edgedec.decoding.samples import SampleStream
    from edgedec.sequence import Generation

_LEAST_TIMES, _LEAST_CHARACTERS, _MOST_CHARACTERS = 8, 160, 4000  # of an end that repeats itself


class ShownText(Protocol):
    """Shows a text while it comes."""

    def write(self, text: str) -> None:
        """Show the next part of the text."""

    def end(self) -> None:
        """End the text, and its last line."""

    def break_off(self) -> None:
        """End the line of the text at a terminal, for a note on standard error; the text may go on."""


class PlainText:
    """Writes a text to standard output as it is."""

    def __init__(self) -> None:
        self._last = ""

    def write(self, text: str) -> None:
        """Write the next part of the text."""
        write_text(text)
        self._last = text

    def end(self) -> None:
        """End the last line, unless the text ended it."""
        if self._last and not self._last.endswith("\n"):
            write_text("\n")

    def break_off(self) -> None:
        """End the last line where standard error is on the same screen; a pipe or a file gets nothing."""
        if sys.stdout.isatty() and sys.stderr.isatty():
            self.end()
            self._last = ""


def print_stream(
    stream: "TokenStream | SampleStream",
    progress: ProgressLine,
    *,
    n_most: int | None = None,
    show: ShownText | None,
    hidden: "Mapping[int, str] | None" = None,
) -> None:
    """Show the tokens of a stream as they come, and close the stream; those of several texts are only counted.

    Where `show` is None nothing is printed. There, and where standard output is a file, the tokens are counted as
    progress, out of `n_most`. `hidden` has the texts of tokens, by id, that `show` is to get although they add nothing
    to the text.
    """
    from edgedec.sequence import TokenOutput

    is_unseen = show is None or writes_a_file()

    def make_room() -> None:
        progress.stop()
        if show is not None:
            show.break_off()

    try:
        with progress as on_progress, telling_of_losses(quiet=progress.quiet, before=make_room), without_echo():
            with stage(on_progress, "prefill"):
                first = next(stream, None)
            for n, token in enumerate(chain([] if first is None else [first], stream), start=1):
                if is_unseen:
                    on_progress(Progress("generating", n, n_most, "tokens"))
                if show is None or not isinstance(token, TokenOutput):
                    continue
                if text := token.text + (hidden or {}).get(token.token_id, ""):
                    if not is_unseen:
                        progress.stop()
                    show.write(text)
    except BaseException:
        if show is not None:
            show.break_off()
        raise
    finally:
        stream.close()
    if show is not None:
        show.end()


def print_texts(texts: "Sequence[str]") -> None:
    """Print several texts, each below a line with its number."""
    for number, text in enumerate(texts, 1):
        shown = PlainText()
        shown.write(f"--- text {number} of {len(texts)} ---\n")
        shown.write(text or "\n")
        shown.end()


def say_summary(generation: "Generation", detail: Detail = "none", further: "Sequence[str]" = ()) -> None:
    """Print the summary line of a reply, and what explains it in as much detail; `further` are lines to explain, too.

    At a terminal that shows the reply too, an empty line stands before the summary.
    """
    separator = "\n" if sys.stderr.isatty() and sys.stdout.isatty() else ""
    say(separator + summary(generation))
    for line in explained(generation.stats, detail, further):
        say(f"  {line}")


def summary(generation: "Generation") -> str:
    """Return one line on a reply: latency, speed, length, what drafts gained if they did, reused tokens, and notes."""
    stats = generation.stats
    n = stats.n_generated_tokens
    parts = [f"first token {stats.first_token_s:.2f} s"] if stats.first_token_s else []
    if stats.tokens_per_s:
        parts.append(f"{stats.tokens_per_s:.1f} tokens/s")
    parts.append(f"{counted(n, 'token')} ({generation.finish_reason})")
    if (faster := gain(stats)) is not None:
        parts.append(faster)
    if stats.n_reused_tokens:
        parts.append(f"reused {stats.n_reused_tokens} of {counted(stats.n_prompt_tokens, 'prompt token')}")
    if repeats_itself(generation.text):
        parts.append("the text repeats itself at its end; --penalty repetition=1.1 may prevent that")
    return " · ".join([*parts, *stats.notes])


def repeats_itself(text: str) -> bool:
    """Return whether the end of a text is the same phrase or line many times over, apart from numbers of lines.

    >>> repeats_itself("Fruits:\\n" + "".join(f"{n}. Oranges\\n" for n in range(30))), repeats_itself("so " * 20)
    (True, False)
    """
    plain = re.sub(r"^ *\d+(?:[.)] *|\Z)", "", text[-_MOST_CHARACTERS:], flags=re.MULTILINE)
    for period in range(1, len(plain) // _LEAST_TIMES + 1):
        end = plain[-max(_LEAST_CHARACTERS, _LEAST_TIMES * period) :]
        if len(end) >= _LEAST_CHARACTERS and end[period:] == end[:-period]:
            return True
    return False


def cut_text(generation: "Generation") -> CutTextError | None:
    """Return an error where max_tokens or a full context cut a text before its grammar allowed an end; else None."""
    if generation.finish_reason != "length" or generation.is_whole is not False:
        return None
    n = len(generation.token_ids)
    return CutTextError(
        f"the text was cut after {n} tokens, before its grammar allowed an end, so it is not whole; allow more tokens "
        "(--max-tokens, --context), or let edgedec close the text in time (--method json-close)"
    )


def generation_document(generation: "Generation", model: str) -> dict[str, Any]:
    """Return the JSON object of a generation."""
    document: dict[str, Any] = {
        "model": model,
        "text": generation.text,
        "token_ids": list(generation.token_ids),
        "finish_reason": generation.finish_reason,
        **({} if generation.is_whole is None else {"is_whole": generation.is_whole}),
        **({} if generation.logprob_sum is None else {"logprob_sum": generation.logprob_sum}),
        "stats": generation.stats.as_dict(),
    }
    if any(output.logprob is not None for output in generation.outputs):
        document["logprobs"] = [
            {"token_id": output.token_id, "logprob": output.logprob, "top": dict(output.top_logprobs)}
            for output in generation.outputs
        ]
    return document
