"""Whether the network may be used."""

import os

from edgedec.resolver import ResolveOptions

_FALSE = {"", "0", "false", "no", "off"}


def offline_reason(options: ResolveOptions) -> str | None:
    """Say why the network is not to be used; None when it may be."""
    if options.offline:
        return "offline was asked for"
    for variable in ("EDGEDEC_OFFLINE", "HF_HUB_OFFLINE"):
        if os.environ.get(variable, "").lower() not in _FALSE:
            return f"{variable} is set"
    return None
