"""Whether the network may be used."""

import os

from edgedec.load_options import ResolveOptions

_FALSE = {"", "0", "false", "no", "off"}


def offline_reason(options: ResolveOptions) -> str | None:
    """Return why the network may not be used, for a message; None where it may be used."""
    if options.offline:
        return "the option offline is set"
    for variable in ("EDGEDEC_OFFLINE", "HF_HUB_OFFLINE"):
        if os.environ.get(variable, "").lower() not in _FALSE:
            return f"{variable} is set"
    return None
