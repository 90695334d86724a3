"""Random requests for several texts at once: what an engine is loaded with, and what it is then asked for.

    config = drawn(random.Random("0:17"), real=False)

A configuration is plain data: the same seed draws the same one. random_same_text.py writes it with drafts and without.
"""

import random
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from support.heads.tiny_heads import TinyHead, write_head
from support.models.onnx_exports import export_tiny
from support.models.tiny_models import N_VOCAB, tiny_llama
from support.models.tiny_quantized import ARCHITECTURES, Tiny, write_tiny

from edgedec.api.options import Lossy
from edgedec.grammar import Grammar
from edgedec_methods.futures import PLAIN_DRAW

Kind = Literal["one", "parallel", "samples", "until", "forks", "best", "search", "cancel", "resume", "chat"]
KINDS: tuple[Kind, ...] = ("one", "parallel", "samples", "until", "forks", "best", "search", "cancel", "resume", "chat")
_WEIGHTS = (6, 2, 3, 2, 1, 3, 1, 2, 1, 1)
_CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_HEADED = Tiny(n_layer=4, n_embd=48, n_head=4, n_head_kv=2, head_dim=16, n_ff=80)
_HEAD = TinyHead(
    n_embd=48, n_embd_target=48, n_ff=80, n_head=3, n_head_kv=1, head_dim=16, taps=(2, 3, 4), n_vocab_target=N_VOCAB
)
_TINY = ("tiny", "tiny", "headed", "headed", "qwen3", "gemma3", "lfm2", "qwen3moe")
_WIDE_HEADS = ("qwen3", "gemma3", "lfm2", "qwen3moe")  # whose keys and values can be of 8 bits
_DRAFTS = ("suffix", "recycling", "trigram", "stand", "common", "suffix+recycling", "model", "cascade", "auto")
_PROMPTS = (
    "abcabcabcabcabcabc, and so on: abc",
    "x = 1\nx = 1\nx = 1\nx = ",
    "The answer is: 12. The answer is: 13. The answer is:",
    "A list: [1, 2, 3], [1, 2, 3], [1, 2",
    "q",
)
_GRAMMARS = {
    "abc": Grammar.regex("((abc){1,9}|(abd){2,5})x"),
    "letters": Grammar.regex("[a-e]{0,30}"),
    "numbers": Grammar.regex(r"(foo|ba[rz]){1,4}-?\d{2}"),
    "lark": Grammar.lark('start: item ("," item){0,6} ";"?\nitem: "(" /[xyz]{1,3}/ ")" | "none"'),
    "json": Grammar.json_schema(
        {"type": "object", "properties": {"a": {"enum": ["yes", "no"]}, "b": {"type": "integer"}}, "required": ["a"]}
    ),
}
_STOPS = ("a", "ab", "cab", "bcabc", "x", "ba", "no", "1", "\ufffd", "foo", ",", '"')


@dataclass(frozen=True, slots=True)
class Asked:
    """One request.

    Attributes:
        kind: What is called.
        prompt: The prompt.
        options: The options of the request; `grammar` is a name of the grammars here.
        n: Texts, or requests at once.
        at: Behind how many tokens something happens, where something does: a cancel, forks, the text to resume.
        choose: For "best" a method of choosing, for "search" a search.
        learns: Whether the requests with this prompt and grammar share a Futures.
        predicted: Whether the text of plain decoding is given as a prediction.
    """

    kind: Kind
    prompt: str
    options: dict[str, Any] = field(default_factory=dict)
    n: int = 1
    at: int = 0
    choose: str = ""
    learns: bool = False
    predicted: bool = False

    def request(self) -> dict[str, Any]:
        """Return the options as edgedec takes them."""
        named = self.options.get("grammar")
        return self.options if named is None else {**self.options, "grammar": _GRAMMARS[named]}


@dataclass(frozen=True, slots=True)
class Config:
    """What an engine is loaded with, and the requests that it answers one after another.

    Attributes:
        model: The name of the model.
        load: The options of the load that plain decoding has, too.
        drafting: Those that it has not.
        requests: The requests.
    """

    model: str
    load: dict[str, Any]
    drafting: dict[str, Any]
    requests: tuple[Asked, ...]


class Files:
    """The models, each written when it is first asked for.

    Args:
        folder: Where they are written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, name: str) -> Path:
        """Return the path of a model, a head, or an export."""
        if name in ("head", "onnx"):
            return getattr(self, f"_{name}")  # type: ignore[no-any-return]
        path = self.folder / f"{name}.gguf"
        if not path.exists():
            more = {"tokenizer.chat_template": _CHATML}
            if name in ("tiny", "small"):
                tiny_llama(path, seed=len(name), n_ctx_train=1024, more=more)
            else:
                write_tiny(path, _HEADED if name == "headed" else ARCHITECTURES[name], metadata=more)
        return path

    @cached_property
    def _head(self) -> Path:
        write_head(self.folder / "head", _HEAD)
        return self.folder / "head"

    @cached_property
    def _onnx(self) -> Path:
        (self.folder / "export").mkdir()
        return export_tiny(self.folder / "export", "llama", ("F32",), "f32", {}).folder


def drawn(rng: random.Random, *, real: bool, only_cpu: bool = False) -> Config:
    """Return a configuration of tiny models; with `real`, one in sixty is of smollm2-135m.

    Args:
        rng: Draws it.
        real: Whether that model is there.
        only_cpu: Whether all are of the cpu runtime.
    """
    runtime = rng.choices(("cpu", "onnx", "llamacpp"), (46, 0 if only_cpu else 3, 0 if only_cpu else 1))[0]
    load: dict[str, Any] = {"runtime": runtime, "n_ctx": rng.choice((96, 160, 256, 256))}
    model = "tiny" if runtime != "cpu" else rng.choice(_TINY)
    drafting: dict[str, Any] = {"draft": rng.choice(_DRAFTS), "n_draft_max": rng.choice((1, 2, 4, 7, 15, 15))}
    is_real = real and runtime == "cpu" and rng.random() < 1 / 60
    if is_real:
        model, load["n_ctx"] = "smollm2-135m", 256
    if runtime == "onnx":
        model = "onnx"
    if runtime == "cpu":
        if rng.random() < 0.3:
            load["n_parallel"] = rng.choice((2, 3))
        if rng.random() < 0.2 and model in _WIDE_HEADS:
            load["kv_type"] = "q8_0"
        if rng.random() < 0.08:
            load["lossy"] = Lossy(slide=True)
        elif rng.random() < 0.12 and not is_real:
            load |= {"memory": rng.choice(("90MB", "200MB")), "n_texts": rng.choice((1, 4, 8)), "grammars": True}
        if model == "headed" and rng.random() < 0.6:
            drafting |= {"draft": rng.choice(("head", "head+suffix")), "draft_head": "head"}
        elif not is_real and rng.random() < 0.06:
            drafting["draft"] = "skip"
    if drafting["draft"] in ("model", "cascade"):
        is_own = runtime == "onnx" or "kv_type" in load or rng.random() < 0.6
        drafting["draft_model"] = model if is_own else "small"
        if is_real or runtime == "onnx":
            drafting["draft"] = "suffix"
            del drafting["draft_model"]
    prompts = [rng.choice(_PROMPTS) for _ in range(3)]
    n = rng.randint(1, 2) if is_real else rng.randint(4, 14)
    requests = tuple(_asked(rng, rng.choice(prompts), load) for _ in range(n))
    return Config(model, load, drafting, requests)


def _asked(rng: random.Random, prompt: str, load: dict[str, Any]) -> Asked:
    """Return a request to an engine with these options of the load."""
    (kind,) = rng.choices(KINDS, _WEIGHTS)
    options: dict[str, Any] = {"seed": rng.randrange(1000), "max_tokens": rng.choice((1, 3, 12, 24, 40, 80))}
    options["temperature"] = rng.choice((0.0, 0.3, 1.0, 1.5))
    asked = Asked(kind, prompt, options, n=rng.choice((2, 3, 4, 6)), at=rng.choice((1, 2, 5, 9, 14)))
    if rng.random() < 0.2:
        options |= rng.choice(({"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.1}))
    if rng.random() < 0.15:
        options |= rng.choice(({"repetition_penalty": 1.3}, {"frequency_penalty": 0.6}, {"momentum": 0.5}))
    if rng.random() < 0.1:
        options["logit_bias"] = {rng.randrange(3, N_VOCAB): rng.choice((-5.0, 2.0, 6.0))}
    if rng.random() < 0.3:
        options["logprobs"] = rng.choice((0, 2))
    if rng.random() < 0.4:
        options["stop"] = tuple(rng.sample(_STOPS, rng.choice((1, 1, 2))))
    if kind == "search":
        searched = {name: options[name] for name in ("seed", "max_tokens", "temperature")}
        return replace(asked, options=searched, choose=rng.choice(("beam", "cntp", "particles")), n=2)
    if rng.random() < 0.45 and kind != "forks":
        options["grammar"] = rng.choice(tuple(_GRAMMARS))
        if rng.random() < 0.2:
            options |= {"json_close": True, "max_tokens": 60}
        elif rng.random() < 0.3 and options["temperature"]:
            for name in ("logit_bias", *PLAIN_DRAW):
                options.pop(name, None)
            asked = replace(asked, learns=True)
    elif rng.random() < 0.3:
        options |= {"ignore_end": True}
    elif rng.random() < 0.1:
        options["stop_unsure"] = rng.choice((0.05, 0.3))
    if kind == "best":
        methods = ("vote", "vote", "first", "first", "likely", "judge", "bag")
        asked = replace(asked, choose=rng.choice(methods))
        if asked.choose in ("likely", "bag"):
            options["logprobs"] = 0
    if load["runtime"] == "cpu" and rng.random() < 0.3:
        asked = replace(asked, predicted=True)
    return asked
