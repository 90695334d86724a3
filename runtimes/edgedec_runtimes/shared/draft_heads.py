"""What runtimes without trained draft heads say when one is given."""

from edgedec.errors import RequestError, argument
from edgedec.model import LoadOptions


def refuse_draft_head(options: LoadOptions, runtime: str) -> None:
    """Raise RequestError where the options name a draft head, which only the cpu runtime can follow a text with."""
    if options.draft_head is not None:
        raise RequestError(
            f"the {runtime} runtime can't give a draft head the hidden states that it reads; use the cpu runtime, or "
            f"leave {argument('draft_head')} out"
        )
