"""Who may write control tokens such as "<|im_end|>": a chat template, and who writes a whole prompt, but no message.

Where a message spells one, SaidTemplate puts MARK behind the first character, and encode_with_controls() takes MARK out
again once it has cut the prompt at its control tokens. MARK is no character (one that a text holds is left out), and a
template leaves it where it is, whatever else the template does with a message.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property, lru_cache, partial
from typing import Any

from edgedec.chat import NO_ARGUMENTS, ChatTemplate, Message, open_template
from edgedec.errors import TemplateError, argument
from edgedec.progress import CancelToken
from edgedec.tokenizer import Tokenizer, added_around

MARK = "\ufdd1"
_ESCAPED = "\\ufdd1"  # as tojson and lists of texts may write it
# What an assistant's message may hold: the marks of what was thought, of calls of tools and of channels.
_OF_REPLIES = re.compile(
    r"think|tool.?call|tool.sep|function_call>|python_|channel|(start|end)_(action|response)\b|^\[(ARGS|CALL_ID)\]$"
    r'|^<\|(message|constrain|")\|>$|^<escape>$',
    re.IGNORECASE,
)
_REPLY_FIELDS = ("content", "reasoning_content", "thinking")
_WHITE_SPACE = " \t\n\v\f\r"
_QUESTION = {"role": "user", "content": "Which day is it?"}
_TOOL = {"type": "function", "function": {"name": "day", "description": "The day.", "parameters": NO_ARGUMENTS}}


def _spelled(starts: Mapping[str, list[str]], text: str) -> list[str]:
    """Return which of some tokens, by their first two characters, stand in a text."""
    return [token for start, tokens in starts.items() if start in text for token in tokens if token in text]


@lru_cache(8)
def _by_start(tokens: tuple[str, ...]) -> dict[str, list[str]]:
    """Return tokens by their first two characters; some models have thousands."""
    by_start: dict[str, list[str]] = {}
    for token in tokens:
        by_start.setdefault(token[:2], []).append(token)
    return by_start


class Marker:
    """Puts MARK into texts that spell one of some tokens, and where a template's own text beside one could complete it.

    So a text that ends with "<|im_" is marked at its end, and a key "|im_end|" that a template writes between < and >.
    """

    def __init__(self, tokens: Iterable[str]) -> None:
        self._tokens = tuple(token for token in tokens if len(token) > 1)
        self._starts = _by_start(self._tokens)
        self._firsts = {token[0] for token in self._tokens}
        self._inner = {character for token in self._tokens for character in token[1:] if not character.isalnum()}
        self._longest = max(map(len, self._tokens), default=0)

    def __call__(self, value: Any) -> Any:
        """Return a message, a tool or another value of plain data with the texts in it marked."""
        if isinstance(value, str):
            return self._marked(value)
        if isinstance(value, Mapping):
            return {self(key): self(item) for key, item in value.items()}
        return [self(item) for item in value] if isinstance(value, list | tuple) else value

    def _marked(self, text: str) -> str:
        text = text.replace(MARK, "").replace(_ESCAPED, f"\\{MARK}ufdd1")
        for token in _spelled(self._starts, text):
            text = text.replace(token, token[0] + MARK + token[1:])
        core = text.strip()
        tails = [core[at:] for first in self._firsts if (at := core.rfind(first, -self._longest)) >= 0]
        before = MARK if core[:1] in self._inner else ""
        after = MARK if any(token.startswith(tail) for tail in tails for token in self._tokens) else ""
        return text.replace(core, before + core + after, 1) if before or after else text


_UNMARKED = Marker(())


class SaidTemplate:
    """Implements ChatTemplate around a model's own: what messages, tools and variables say is marked.

    Where the source of a model's file does not compile, or renders no chat, only chats are refused, as all else works
    without it.

    Args:
        source: The template's text.
        file: The name of the model's file, for messages; empty for a source that a caller gave.

    Attributes:
        refusal: Why chats are refused; empty where the source renders a chat.
    """

    def __init__(self, source: str, tokenizer: Tokenizer, file: str = "") -> None:
        self.source, self.refusal, self._tokenizer = source, "", tokenizer
        try:
            self._opened = open_template(source, bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token)
            self._try()
        except TemplateError as error:
            place = f"{file}: " if file else ""
            advice = f"chats are refused: give another template ({argument('chat_template')})"
            self.refusal = f"{place}{error.marked}; {advice}"

    def _try(self) -> None:
        """Raise TemplateError where it renders neither the plainest chat nor one with a system message and a tool."""
        try:
            self._opened.render([_QUESTION])
        except TemplateError as error:
            try:
                self._opened.render([{"role": "system", "content": "Answer."}, _QUESTION], tools=[_TOOL])
            except TemplateError:
                raise error from None

    @property
    def _template(self) -> ChatTemplate:
        if self.refusal:
            raise TemplateError(self.refusal)
        return self._opened

    @property
    def variables(self) -> Collection[str]:
        """The names that the template reads, and trust_messages (TemplateError where chats are refused)."""
        return {*self._template.variables, "trust_messages"}

    @cached_property
    def _markers(self) -> tuple[Marker, Marker]:
        """The marker of a user's or a tool's texts, and that of an assistant's replies, which may hold more tokens."""
        tokens = self._tokenizer.control_texts
        return Marker(tokens), Marker([token for token in tokens if not _OF_REPLIES.search(token)])

    def said(self, message: Message, *, trust_messages: object = False) -> dict[str, Any]:
        """Return a message with its texts marked, as render() marks each; the role is the template's."""
        anyone, assistant = (_UNMARKED, _UNMARKED) if trust_messages is True else self._markers
        fields = _REPLY_FIELDS if message.get("role") == "assistant" else ()
        marked = {name: (assistant if name in fields else anyone)(value) for name, value in message.items()}
        return marked | ({"role": message["role"]} if "role" in message else {})

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        cancel: CancelToken | None = None,
        trust_messages: object = False,
        **variables: Any,
    ) -> str:
        """Return the text of the prompt, marked for encode_with_controls; see ChatTemplate.render.

        With trust_messages=True, control tokens that messages, tools and variables spell are control tokens.
        """
        template, mark = self._template, _UNMARKED if trust_messages is True else self._markers[0]
        said = partial(self.said, trust_messages=trust_messages)
        try:
            if isinstance(messages, list | tuple):
                messages = [said(each) if isinstance(each, Mapping) else each for each in messages]
            tools, variables = mark(tools), mark(variables)
        except RecursionError as error:
            raise TemplateError("a message, a tool or a variable of the template is nested too deep") from error
        text = template.render(
            messages, add_generation_prompt=add_generation_prompt, tools=tools, cancel=cancel, **variables
        )
        return text.replace(_ESCAPED, MARK)


def encode_with_controls(
    tokenizer: Tokenizer, text: str, *, add_special: bool = True, most: int | None = None
) -> list[int]:
    """Return the token ids of a prompt: control tokens where they are spelled, but not where MARK is inside.

    Args:
        text: The prompt.
        add_special: Whether to add what the model expects around a text, unless the text begins with BOS itself.
        most: As of Tokenizer.encode.
    """
    add_special = add_special and not (tokenizer.bos_token and text.startswith(tokenizer.bos_token))
    if MARK not in text:
        return tokenizer.encode(text, add_special=add_special, parse_special=True, most=most)
    begin, end = added_around(tokenizer) if add_special else ([], [])
    encode, starts = partial(tokenizer.encode, add_special=False, most=most), _by_start(tokenizer.control_texts)
    ids = list(begin)
    for part, is_said in _parts(tokenizer, text):
        plain = part.replace(MARK, "")
        token_ids = encode(plain, parse_special=not is_said)
        spelled = (encode(token, parse_special=True)[0] for token in _spelled(starts, plain)) if is_said else ()
        if any(token_id in token_ids for token_id in spelled):
            # Some tokenizers read a few in any text: the marks of gpt-oss, and what SentencePiece merges to one.
            token_ids = [token_id for each in part.split(MARK) for token_id in encode(each)]
        ids += token_ids
        if most is not None and len(ids) > most:
            return ids
    return ids + end


def _parts(tokenizer: Tokenizer, text: str) -> list[tuple[str, bool]]:
    """Cut a prompt around the texts between two control tokens that hold MARK; also return which parts these are."""
    tokens = sorted(_spelled(_by_start(tokenizer.control_texts), text), key=len, reverse=True)
    pieces = re.split(f"({'|'.join(map(re.escape, tokens))})", text) if tokens else [text]
    parts = [("", False)]
    for i, piece in enumerate(pieces):
        if i % 2 or MARK not in piece:
            parts[-1] = (parts[-1][0] + piece, False)
            continue
        swallows = i and not tokenizer.encode(f"{pieces[i - 1]} ", add_special=False, parse_special=True)[1:]
        parts += [(piece.lstrip(_WHITE_SPACE) if swallows else piece, True), ("", False)]
    return parts
