"""The JSON object of `edgedec info`: what a model's header says, the memory that it needs, the runtimes that run it."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from edgedec.api.load import asked_plan
from edgedec.api.options import EngineOptions
from edgedec.api.plan import choose
from edgedec.errors import EdgedecError, ModelFormatError
from edgedec.gguf.file import GGUF, is_onnx, read_header_of
from edgedec.gguf.model_info import ModelInfo, describe
from edgedec.gguf.model_kinds import is_embedder, is_ranker
from edgedec.gguf.places import standing
from edgedec.gguf.two_graphs import graphs_of, weights_of
from edgedec.load_options import default_n_ctx
from edgedec.load_plan import LoadPlan
from edgedec.memory.planner import plan_wishes
from edgedec.memory.setting import Cap
from edgedec.memory.system import available_bytes
from edgedec.runtime import Runtime
from edgedec.sampling import SamplingParams
from edgedec_apps.cli.commands.doctor import ask_runtimes
from edgedec_apps.cli.opening import application_of, engine_options
from edgedec_apps.cli.options import LoadFlags
from edgedec_runtimes.architectures.nextn import without_nextn

_CONTEXTS = (512, 2048, 4096, 8192, 32768)


def model_document(path: Path, cap: Cap) -> dict[str, Any]:
    """Return the JSON object of a GGUF file or an ONNX export, its memory planned within a cap.

    Raises:
        ModelFormatError: The header, or an export's edgedec.json, is damaged.
    """
    gguf = read_header_of(path)
    info, choice = describe(gguf), _choose_by_default(path)
    document = {
        "name": info.name,
        "path": str(standing(path)),
        "architecture": info.architecture,
        "n_params": info.n_params,
        "size_bytes": info.n_bytes,
        "quantization": info.quantization_label,
        "tensors": [
            {"type": share.type.name, "n_tensors": share.n_tensors, "n_bytes": share.n_bytes, "share": share.share}
            for share in info.quantization
        ],
        "n_layer": describe(without_nextn(gguf)).n_layer,
        "n_embd": info.n_embd,
        "n_vocab": info.n_vocab,
        "n_ctx_train": info.n_ctx_train,
        **_memory(choice, info, cap),
        "sampling_defaults": asdict(SamplingParams(**info.sampling_defaults)),
        "sampling_defaults_from": "the model file" if info.sampling_defaults else "edgedec",
        "has_chat_template": info.has_chat_template,
        "embeds": is_embedder(gguf) and not is_ranker(gguf),
        "ranks": is_ranker(gguf),
        "license": info.license,
        "runtimes": _refusals(path, gguf, choice),
        "runtime_chosen": None if choice is None else choice.runtime.name,
        "runtime_reason": "" if choice is None else choice.reason,
    }
    return document | _export_facts(path)


def _export_facts(path: Path) -> dict[str, Any]:
    """Return what the manifest of an ONNX export says instead of its header, which has no tensors; {} for a GGUF."""
    if not is_onnx(path):
        return {}
    if graphs := graphs_of(path):
        return {"n_params": None, "quantization": f"ONNX graphs of an encoder and a decoder, {weights_of(graphs)}"}
    from edgedec_export.folder import read_manifest  # not in the memory of a GGUF's plan

    folder = path if path.is_dir() else path.parent
    try:
        facts = read_manifest(folder) or {}
        n_bytes = sum(int(file["bytes"]) for file in facts["files"].values())
        label = f"ONNX export for {facts['target']}, {facts['quant']}, KV cache {facts['kv']}"
        return {"size_bytes": n_bytes, "n_params": None, "quantization": label}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ModelFormatError(f"{folder}: its edgedec.json can't be read ({error}); export the model again") from error


def _memory(choice: LoadPlan | None, info: ModelInfo, cap: Cap) -> dict[str, Any]:
    """Return the default context, and the memory that `edgedec plan` plans for it and for usual ones.

    Nothing is planned where no runtime runs the model.
    """
    if choice is None:
        n_ctx = default_n_ctx(info.n_ctx_train or 0)
        return {"n_ctx_default": n_ctx, "memory_bytes": {}, "memory_start_bytes": None, "memory_on_devices": {}}
    usual = _planned(choice, None, cap)
    n_default, trained = usual.options.n_ctx or 0, info.n_ctx_train or 4096
    others = [n for n in _CONTEXTS if n <= trained and n != n_default]
    plans = dict(sorted({n_default: usual.memory, **{n: _planned(choice, n, cap).memory for n in others}}.items()))
    names = {cap.device.name for plan in plans.values() for cap in plan.devices}
    return {
        "n_ctx_default": n_default,
        "memory_bytes": {str(n): plan.total_bytes for n, plan in plans.items()},
        "memory_start_bytes": min(plan.start_bytes for plan in plans.values()),
        "memory_on_devices": {
            name: {str(n): plan.device_bytes(name) for n, plan in plans.items()} for name in sorted(names)
        },
    }


def _planned(choice: LoadPlan, n_ctx: int | None, cap: Cap) -> LoadPlan:
    """Return the plan of `edgedec run` for a length of context; None for the default one."""
    options = engine_options(flags := LoadFlags(context=n_ctx), keeps_prompts=True)
    wishes = asked_plan(choice, options, application_of(flags, None, one_request=True), available_bytes())
    return plan_wishes(wishes, cap)


def _refusals(path: Path, gguf: GGUF, choice: LoadPlan | None) -> dict[str, str | None]:
    """Return for each runtime why it does not run the file here, without the file's name; None where it does."""

    def refusal(runtime: Runtime) -> str | None:
        refused = runtime.accepts(path)
        if refused is None and (choice is None or runtime.name != choice.runtime.name):
            runtime.report()  # as edgedec doctor asks: a library or a device may be lacking
        return refused

    answers = ask_runtimes(refusal).items()
    prefix = f"{gguf.paths[0]}: "
    return {name: None if answer is None else str(answer).removeprefix(prefix) for name, answer in answers}


def _choose_by_default(path: Path) -> LoadPlan | None:
    """Return the runtime that auto chooses with what was measured before; None where no runtime runs the file."""
    try:
        return choose(path, "auto", EngineOptions().load_options(available_bytes()), measure=False)
    except EdgedecError:
        return None
