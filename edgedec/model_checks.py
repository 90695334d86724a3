"""tmp"""
from edgedec.gguf import GGUF


def require_consistent(gguf: GGUF) -> None:
    """Tmp."""
