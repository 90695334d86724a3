"""The options of edgedec.load, and what it must know of the application that loads a model."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from edgedec.callers import check_fields, one_line
from edgedec.companion import companion_of
from edgedec.drafter import STORE_BYTES, DrafterFactory
from edgedec.errors import OptionError, RequestError, argument
from edgedec.load_options import N_DRAFT_MAX, LoadOptions, ResolveOptions
from edgedec.loading.resolve import resolve
from edgedec.memory_plan import Size, parse_size
from edgedec.progress import CancelToken, OnProgress
from edgedec.sampling import SamplingParams
from edgedec.sequence import COUPLED
from edgedec.storage.cache_files import cache_folder

ModelName = str | os.PathLike[str]
"""A path, a name of the catalogue, hf:owner/repo[:quantization or file][@revision], or ollama:name."""
AdapterName = ModelName | tuple[ModelName, float]
"""A low-rank adapter: a GGUF or a folder of PEFT, perhaps with its scale."""
Numerics = Literal["strict", "padded", "loose"]

_MOST_DRAFTED = (1 << 16) - 1
_LARGEST_SCALE = 1e30
_KEPT_PROMPTS = "2GB"  # of the disk


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftOptions:
    """How drafts are made and verified; few need it, and the text is the same unless `numerics` is "loose".

    Attributes:
        overlap: Let the draft model go on drafting on the CPU while the target verifies, for a target on an NPU,
            on a GPU or on other machines (edgedec_methods.overlapped). No effect with other rules than
            "coupled", and with a `tree`.
        tree: How a draft model or a draft head branches: "chain", or a shape that a guest brings, with its numbers
            of branches. None for what the rule of each request verifies. Where a shape does not fit the rule, the
            rule's own is taken, and the statistics say so.
        numerics: "strict" verifies only drafts whose rows have the bits of single steps on this runtime. "padded"
            gives every step the few rows that longer forwards share their bits with, where a runtime has such
            (edgedec_methods.padded_steps): drafts change no bit there either, but the text is that of padded steps.
            "loose" verifies longer drafts; the text may then differ where two tokens are nearly as probable.
        store: A file in which the suffix drafter keeps the token ids of earlier texts from process to process. It
            is read now, and written by Engine.close(). Only models of one vocabulary can share a file.
        max_rows: As in LoadOptions; None for n_draft_max + 1.

    Raises:
        RequestError: An option is out of range.
    """

    overlap: bool = False
    tree: str | None = None
    numerics: Numerics = "strict"
    store: str | os.PathLike[str] | None = None
    max_rows: int | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.tree is not None:
            from edgedec.verification.rules import find_rule

            find_rule(COUPLED).drawing(COUPLED, self.tree, SamplingParams(), trees=True)  # refuses what is no shape

    __repr__ = one_line


@dataclass(frozen=True, slots=True, kw_only=True)
class Lossy:
    """What makes a text shorter to compute, or longer than the context, at the price of another text.

    Attributes:
        slide: Go on when the context is full, with its first tokens and its newest ones. The tokens between
            them are forgotten (edgedec_methods.sliding_window). A text then ends only at an end token, max_tokens or
            a stop.
        layer_skip: Leave out layers in every forward until a token reads 1 / layer_skip of the bytes of weights.
            Decoding is about `layer_skip` times as fast, and the text is another. The layers are evenly spaced, or
            those that edgedec tune-skip --lossy found. A value beyond what was measured for the model
            (edgedec_runtimes.layer_skip.choose) is refused, unless `layer_skip_force`.
        layer_skip_force: Take a `layer_skip` beyond what was measured.
        methods: The options of a method that writes on a session of its own, by the method's name (edgedec.companion):
            {"switching": {"small_model": ..., "entropy": ...}}. With a further model, as here, nothing is drafted, and
            requests take turns.

    Raises:
        RequestError: An option of the method is out of range or unknown.
        PluginError: No method has that name.
    """

    slide: bool = False
    layer_skip: float | None = None
    layer_skip_force: bool = False
    methods: Mapping[str, Mapping[str, object]] | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.methods and "slide" in self.methods:
            raise RequestError(f"the method slide is asked for by {argument('slide')}; leave it out of methods")
        companion_of(self.methods)

    __repr__ = one_line


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """The keywords of edgedec.load: how a model is found, loaded and drafted for.

    Attributes:
        runtime: Name of a runtime, or "auto". With "auto", the speed of the two best runtimes is compared once on a
            machine, for at most 8 s, where it is not known which is faster; never under a memory cap, where memory is
            short, or for a model that is kept as tiles. What a busy machine measures is not remembered.
        n_ctx: Tokens of the context; None for what the model was trained for, where the keys and values of more than
            4,096 tokens take at most a quarter of the memory that the model leaves free; else for half of that, or a
            quarter, and so on, down to 4,096.
        lossy: Options that change the text.
        memory: The most memory that edgedec may hold ("900MB", "1.5GiB", or bytes), for all its models in the process
            together; the rest of the process doesn't count. Options that were not given are cut down to fit, in the
            order of edgedec.memory.ladder (engine.plan.given_up lists them). If nothing fits, the model is refused
            before anything is loaded. None for the memory that the system reports as free.
        gpu_memory: The most memory that edgedec may hold on each GPU, and on each device of other machines, for all
            together. As many layers as fit are put there, with their part of the KV cache; `memory` counts the host's
            memory only. None for what a GPU has free. On a GPU that shares the host's memory, its part counts for both.
        draft: "auto" drafts where the measured cost and acceptance promise a gain. The name of a drafter, several names
            joined by "+", or a factory pins drafters: their drafts are verified whatever they cost. "off" and None
            decode plainly. The text is the same in every case.
        draft_model: A smaller model, best of the same family, that may draft too; named as the model is.
        draft_head: A trained draft head (EAGLE-3, DFlash, DSpark, DFlash2) for this model, named as the model is; also
            the folder of a checkpoint. It reads the model's hidden states, and needs a runtime that gives them (cpu).
            None for the head that lies beside the model, was trained here, is shipped, or is a nextn layer in the
            model's file (edgedec.head_kinds), where there is one; "off" for none.
        lora: Low-rank adapters (LoRA) to load with the model: each a GGUF or a folder of PEFT, or a pair of that and
            its scale, which is 1 otherwise. What they add is added in this order. A request may name other scales.
        n_draft_max: The most nodes of a draft, 1 to 65,535.
        drafting: Further options of drafting.
        chat_template: Jinja source to use instead of the model's own chat template.
        projector: The file of the encoder that lets the model read pictures (mmproj), named as the model is. "auto"
            takes the one that lies beside the model's file, where there is one; None for no pictures.
        image_max_tokens: Most rows of a picture; fewer read faster, and see less. None for what the encoder is made
            for, and 1,024 for one that makes more rows of a larger picture.
        grammars: Plan memory for texts that keep to a grammar (json_schema=..., grammar=...). Without it a memory plan
            leaves grammars out, and they get the least memory that they work with.
        n_parallel: Requests that are generated at the same time and share each forward; further ones wait for their
            turn. On a runtime whose rows depend on what else is in a forward (llamacpp), all requests take turns.
        n_texts: Texts of one prompt that a request writes at the same time (Engine.samples). A memory plan keeps room
            for so many of the context's length; a request with more is refused before it begins, unless they are
            shorter. Without a plan, requests may write any number.
        n_threads: As in LoadOptions.
        kv_type: As in LoadOptions; or "auto", which takes f16, and a smaller type where memory is short. A smaller type
            may change the text.
        prompt_cache: Most of the disk ("2GB", or bytes) that prompts take which were read, of all models together, so
            that none is read twice, also in other processes; "auto" is 2 GB; None keeps none. They lie in the cache,
            for their owner's eyes only. Only the cpu runtime keeps them; with others, a size brings a warning.
        n_gpu_layers: As in LoadOptions.
        device: As in LoadOptions.
        runtime_options: Options that only the runtime has, by their names (edgedec.load_options): the cpu runtime's
            are in edgedec_runtimes.cpu.options, llamacpp's in edgedec_runtimes.llamacpp.options. Where the runtime is
            "auto", one that has them is chosen.
        offline: Never use the network; a model that is not on this machine is refused.
        cache_dir: Root of edgedec's cache; None for the environment variable EDGEDEC_CACHE or the platform's default.
        on_progress: Called with the progress of downloading and loading, from the calling thread.
        cancel: Stops downloading and loading.

    Raises:
        RequestError: An option is out of range.
    """

    runtime: str = "auto"
    n_ctx: int | None = None
    lossy: Lossy = Lossy()
    memory: Size | None = None
    gpu_memory: Size | None = None
    draft: str | DrafterFactory | None = "auto"
    draft_model: ModelName | None = None
    draft_head: str | os.PathLike[str] | None = None
    lora: Sequence[AdapterName] = ()
    n_draft_max: int = N_DRAFT_MAX
    drafting: DraftOptions = DraftOptions()
    chat_template: str | None = None
    projector: ModelName | None = "auto"
    image_max_tokens: int | None = None
    grammars: bool = False
    n_parallel: int = 1
    n_texts: int = 1
    n_threads: int | None = None
    kv_type: str = "f16"
    prompt_cache: Size | None = None
    n_gpu_layers: int | None = None
    device: str | None = None
    runtime_options: Mapping[str, object] | None = None
    offline: bool = False
    cache_dir: str | os.PathLike[str] | None = None
    on_progress: OnProgress | None = None
    cancel: CancelToken | None = None

    def __post_init__(self) -> None:
        for name in ("n_draft_max", "image_max_tokens"):
            if (value := getattr(self, name)) is not None and not 1 <= value <= _MOST_DRAFTED:
                raise OptionError(name, value, f"it must be from 1 to {_MOST_DRAFTED}")

    @property
    def cap_bytes(self) -> int | None:
        """The bytes that `memory` names, or None (RequestError where it names none)."""
        return None if self.memory is None else parse_size(self.memory, "memory")

    @property
    def gpu_cap_bytes(self) -> int | None:
        """The bytes that `gpu_memory` names, or None (RequestError where it names none)."""
        return None if self.gpu_memory is None else parse_size(self.gpu_memory, "gpu_memory")

    @property
    def resolving(self) -> ResolveOptions:
        """How the names of models are looked up."""
        return ResolveOptions(self._cache_root, self.offline, self.on_progress, self.cancel)

    @property
    def _cache_root(self) -> Path:
        return cache_folder(None if self.cache_dir is None else Path(self.cache_dir))

    def _adapter(self, adapter: AdapterName) -> tuple[Path, float]:
        """Return the file of an adapter and its scale as a float32, which must be finite (OptionError)."""
        name, scale = adapter if isinstance(adapter, tuple) else (adapter, 1.0)
        if isinstance(scale, bool) or not isinstance(scale, int | float) or not abs(scale) < _LARGEST_SCALE:
            raise OptionError("lora", adapter, "an adapter's scale must be a number")
        return resolve(name, self.resolving, "lora"), float(np.float32(scale))

    def load_options(self, planning_bytes: int | None = None) -> LoadOptions:
        """Return the runtime's options, without a draft head: edgedec.api.plan finds it.

        Args:
            planning_bytes: Bytes that making a memory plan may take; None for any.

        Raises:
            RequestError: A count is no whole number.
        """
        size = _KEPT_PROMPTS if self.prompt_cache == "auto" else self.prompt_cache
        n_bytes = 0 if size is None else parse_size(size, "prompt_cache")
        return LoadOptions(
            n_ctx=self.n_ctx,
            n_parallel=self.n_parallel,
            max_rows=self.n_draft_max + 1 if self.drafting.max_rows is None else self.drafting.max_rows,
            n_threads=self.n_threads,
            kv_type=self.kv_type,
            tiles_only=True,
            prompt_cache_bytes=0 if self.lossy.slide else n_bytes,
            adapters=tuple(map(self._adapter, self.lora)),
            planning_bytes=planning_bytes,
            n_gpu_layers=-1 if self.n_gpu_layers is None and self.gpu_memory is not None else self.n_gpu_layers,
            device=self.device,
            runtime_options=dict(self.runtime_options or {}),
            cache_dir=self._cache_root,
            on_progress=self.on_progress,
            cancel=self.cancel,
        )


@dataclass(frozen=True, slots=True)
class Application:
    """What a memory plan must know of the application that loads a model.

    Attributes:
        base_bytes: Bytes that the process holds without a model (edgedec_apps.base_memory); `memory` is then for the
            whole process. None where `memory` is for edgedec's models only.
        store_bytes: Most bytes that each drafter keeps between requests.
        request_bytes: Bytes that a server keeps for requests, from their bodies to their answers.
        earlier_peak_bytes: The most bytes that the process held before the model was looked at.
    """

    base_bytes: int | None = None
    store_bytes: int = STORE_BYTES
    request_bytes: int = 0
    earlier_peak_bytes: int = 0


LIBRARY = Application()
"""An application that uses edgedec as a library, of which nothing else is known."""
