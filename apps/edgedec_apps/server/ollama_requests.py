"""What ollama's interface is asked, as a generation.Asked.

Options that say how ollama would load a model change nothing here: the model is loaded. Those that would change the
text and that edgedec does not have are refused.
"""

from dataclasses import dataclass
from typing import Any

from edgedec.api.engine import Engine
from edgedec.noise import SEED_LIMIT
from edgedec_apps.server.fields import Fields, checked
from edgedec_apps.server.generation import Asked, Prompt
from edgedec_apps.server.messages import read_messages
from edgedec_apps.server.requests import MOST_LOGPROBS, read_reuse, read_speculative
from edgedec_apps.server.structured import close_option, ollama_format
from edgedec_apps.server.tools import Tools, read_tools

_NUMBERS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "min_p": "min_p",
    "repeat_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
}
_WHOLE = {"top_k": "top_k", "repeat_last_n": "penalty_last_n"}
_OF_LOADING = (
    *("numa", "num_batch", "num_gpu", "main_gpu", "low_vram", "f16_kv", "logits_all", "vocab_only"),
    *("use_mmap", "use_mlock", "embedding_only", "num_thread", "num_keep"),
)
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "tfs_z": (1, 1.0),
    "typical_p": (1, 1.0),
    "mirostat": (0,),
    "penalize_newline": (True,),
}


@dataclass(frozen=True, slots=True)
class OllamaWanted:
    """How the answer is to be sent: as a stream or not, with log-probabilities or not."""

    stream: bool
    logprobs: bool


def read_chat(fields: Fields, engine: Engine, template: str | None) -> tuple[Asked | None, OllamaWanted]:
    """Read the fields of /api/chat but for the model; no messages ask for nothing but that the model is loaded.

    Raises:
        RequestError: A field is unknown, malformed or not supported; its message names it.
    """
    given = fields.objects("messages")
    prompt: Prompt | None = read_messages(given) if given else None
    tools, _ = read_tools(fields, template)
    return _asked(fields, engine, prompt, tools)


def read_generate(fields: Fields, engine: Engine) -> tuple[Asked | None, OllamaWanted]:
    """Read the fields of /api/generate but for the model; no prompt asks for nothing but that the model is loaded."""
    text, system, raw = fields.text("prompt"), fields.text("system"), fields.flag("raw")
    for name in ("suffix", "template", "context", "images", "width", "height", "steps"):
        fields.unsupported(name, "leave it out")
    prompt: Prompt | None = None
    if text:
        chats = engine.can_chat and not raw
        if system and not chats:
            raise fields.refusal("system", "needs a chat template, and raw: false")
        before = [{"role": "system", "content": system}] if system else []
        prompt = [*before, {"role": "user", "content": text}] if chats else text
    return _asked(fields, engine, prompt, ())


def _asked(fields: Fields, engine: Engine, prompt: Prompt | None, tools: Tools) -> tuple[Asked | None, OllamaWanted]:
    structured = ollama_format(fields)
    options = _options(fields.object("options"), engine) | structured | close_option(fields, structured)
    logprobs, top = fields.flag("logprobs"), fields.whole("top_logprobs", low=0, high=MOST_LOGPROBS)
    if logprobs:
        options["logprobs"] = top or 0
    stream = fields.take("stream")
    if stream not in (None, True, False):
        raise fields.refusal("stream", f"is {stream!r:.40}; it must be true or false")
    draft, verify = read_speculative(fields)
    reuse = read_reuse(fields)
    fields.unsupported("think", "what a model thinks is not told apart from its answer; leave it out")
    fields.skip("keep_alive")
    fields.end()
    asked = None if prompt is None else Asked((prompt,), options, 1, reuse, draft, verify, tools)
    return asked, OllamaWanted(stream is not False, logprobs)


def _options(fields: Fields, engine: Engine) -> dict[str, Any]:
    given: dict[str, Any] = {}
    for name, option in _NUMBERS.items():
        value = fields.number(name)
        given |= {} if value is None else {option: checked(option, value, fields, name)}
    for name, option in _WHOLE.items():
        value = fields.whole(name)
        given |= {} if value is None else {option: checked(option, value, fields, name)}
    seed = fields.whole("seed", high=SEED_LIMIT - 1, low=-(2**63))
    if seed is not None and seed >= 0:  # below, one is drawn
        given["seed"] = seed
    n_most = fields.whole("num_predict", low=-2)
    if n_most is not None and n_most >= 0:  # below, the context is the limit
        given["max_tokens"] = checked("max_tokens", n_most, fields, "num_predict")
    stop = fields.texts("stop")
    if stop:
        given["stop"] = checked("stop", stop, fields, "stop")
    n_ctx = fields.whole("num_ctx", low=1)
    if n_ctx is not None and n_ctx > engine.n_ctx:
        raise fields.refusal("num_ctx", f"is {n_ctx}; the model was loaded with {engine.n_ctx} (edgedec serve -c N)")
    for name, values in _NEUTRAL.items():
        fields.only(name, *values)
    fields.skip("mirostat_tau", "mirostat_eta", *_OF_LOADING)
    fields.end()
    return given
