"""Finds llama.cpp's shared library through llama-cpp-python, checks it, and sends its log to `logging`.

Struct layouts change between releases without a version in the ABI. So the defaults that the library writes into its
structs are compared with those of the tested release: a field that has moved would show.
"""

import importlib.util
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from edgedec.errors import RuntimeUnavailableError
from edgedec.plugins import install_command
from edgedec_runtimes.llamacpp import trial

logger = logging.getLogger("edgedec.llamacpp")
logger.addHandler(logging.NullHandler())  # without one, `logging` would print warnings itself

TESTED = "0.3.36"
# ggml's levels of log lines; the comment in the binding lists older numbers.
_LEVELS = {1: logging.DEBUG, 2: logging.INFO, 3: logging.WARNING, 4: logging.ERROR}
_WARNING, _ERROR, _CONTINUED = 3, 4, 5

_MODEL_DEFAULTS = {"load_mode": -1, "lazy_mode": 1, "split_mode": 1, "vocab_only": False, "check_tensors": False}
_MODEL_DEFAULTS |= {"use_extra_bufts": True, "no_host": False, "no_alloc": False, "load_mtp": False}
_CONTEXT_DEFAULTS = {"n_ctx": 512, "n_batch": 2048, "n_ubatch": 512, "n_seq_max": 1, "n_outputs_max": 0}
_CONTEXT_DEFAULTS |= {"pooling_type": -1, "flash_attn_type": -1, "type_k": 1, "type_v": 1, "embeddings": False}
_CONTEXT_DEFAULTS |= {"offload_kqv": True, "op_offload": True, "swa_full": True, "kv_unified": False, "n_samplers": 0}

HOW_TO_MEND = (
    "build it here (pip install --force-reinstall --no-cache-dir --no-binary llama-cpp-python llama-cpp-python), look "
    "after the GPU's driver, or use another runtime (--runtime cpu)"
)

_log_lines: deque[tuple[int, str]] = deque(maxlen=4000)
_log_lock = threading.Lock()
_keep_alive: list[Any] = []


def installed() -> bool:
    """Return whether llama-cpp-python is installed, without loading it."""
    return importlib.util.find_spec("llama_cpp") is not None


def packaged_libraries() -> tuple[Path, ...]:
    """Return the folders in which llama-cpp-python has its libraries; none where it is not installed."""
    package = importlib.util.find_spec("llama_cpp")
    return () if package is None or package.origin is None else (Path(package.origin).parent / "lib",)


def how_to_install() -> str:
    """Return a phrase that says how to install llama-cpp-python."""
    return f"install it with: {install_command('llamacpp')}"


@cache
def llama() -> ModuleType:
    """Return llama_cpp's low-level module, checked and initialised; another process tries it first.

    Raises:
        RuntimeUnavailableError: llama-cpp-python is not installed, does not load, crashes, or has other struct layouts
            than the tested release.
    """
    if (crash := trial.complaint()) is not None:
        raise RuntimeUnavailableError(
            f"llama.cpp's library of llama-cpp-python can't be used on this machine: {crash}; {HOW_TO_MEND}"
        )
    return load_library()


def load_library() -> ModuleType:
    """Return llama_cpp's low-level module, checked and initialised, without trying it first; raises as llama()."""
    try:
        import llama_cpp
        from llama_cpp import llama_cpp as api
    except Exception as error:  # a missing package, or a library that does not load on this machine
        raise RuntimeUnavailableError(
            f"the llamacpp runtime needs llama-cpp-python {TESTED}, which does not import here "
            f"({type(error).__name__}: {error}); {how_to_install()}"
        ) from error
    _check_layout(api, llama_cpp.__version__)
    take_log(api, api.llama_log_set)
    api.llama_backend_init()
    return api  # type: ignore[no-any-return]  # the package is untyped to us


def take_log(api: ModuleType, set_log: Callable[[Any, None], None]) -> None:
    """Send the log of one of llama.cpp's libraries to `logging`, by its function that sets where the log goes."""
    callback = api.llama_log_callback(_on_log)
    _keep_alive.append(callback)
    set_log(callback, None)


def version() -> str:
    """Return the versions of the binding and of the library it loads."""
    api = llama()
    import llama_cpp

    return f"llama-cpp-python {llama_cpp.__version__} (llama.cpp {api.llama_version().decode()})"


def _check_layout(api: ModuleType, found: str) -> None:
    for params, expected in (
        (api.llama_model_default_params(), _MODEL_DEFAULTS),
        (api.llama_context_default_params(), _CONTEXT_DEFAULTS),
    ):
        wrong = {name: getattr(params, name, None) for name in expected}
        wrong = {name: value for name, value in wrong.items() if value != expected[name]}
        if wrong:
            raise RuntimeUnavailableError(
                f"llama-cpp-python {found} lays its structs out unlike the tested {TESTED} (found {wrong}); "
                f"{how_to_install()}"
            )


def _on_log(level: int, text: bytes, _user_data: Any) -> None:
    """Pass a line of llama.cpp's log on to `logging`; called from C, so no exception may escape."""
    try:
        line = text.decode("utf-8", errors="replace")
        with _log_lock:
            if level == _CONTINUED and _log_lines:
                level = _log_lines[-1][0]
            _log_lines.append((level, line))
        stripped = line.rstrip()
        if stripped.strip("."):
            logger.log(_LEVELS.get(level, logging.DEBUG), "%s", stripped)
    except Exception:  # logging handlers are the application's; their errors must not cross into C
        return


@contextmanager
def captured_log() -> Iterator[list[str]]:
    """Yield a list that holds, when the block ends, the lines that llama.cpp logged in the block."""
    with _log_lock:
        _log_lines.clear()
    lines: list[str] = []
    try:
        yield lines
    finally:
        with _log_lock:
            lines.extend(line.rstrip() for _, line in _log_lines)


def last_complaint() -> str:
    """Return the last warning or error that llama.cpp logged, for the message of an exception."""
    with _log_lock:
        complaints = [line.strip() for level, line in _log_lines if level in (_WARNING, _ERROR) and line.strip()]
    return complaints[-1] if complaints else "it gave no reason"
