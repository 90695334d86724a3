"""`--draft-option KEY=VALUE`: how drafts are made and verified, and what single drafters need."""

from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike

from edgedec.api.options import DraftOptions, Numerics
from edgedec.errors import RequestError
from edgedec.load_options import N_DRAFT_MAX
from edgedec_apps.cli.method_keys import read_keys


@dataclass(frozen=True, slots=True)
class Drafting:
    """What `--draft-option` gives: its keys.

    Attributes:
        model: a smaller model of the same family, which may draft, too
        head: a trained draft head of the model, or off (default: the one that is found, docs/heads.md)
        max: most tokens of a draft
        tree: how a draft model or head branches: chain, grow, siblings:K, beam:K, paths:K (default: by rule)
        rule: how drafts are verified: coupled (default) keeps the text; tokenwise, block, recursive, kseq, multipath
            its distribution
        numerics: strict: drafts only as long as they keep the text; padded: steps of a few rows, so that longer ones
            do, too; loose: longer ones, and the text may differ
        store: a file in which the suffix drafter keeps earlier outputs
        overlap: the draft model goes on while the target verifies on another device or machine
    """

    model: str | PathLike[str] | None = None
    head: str | PathLike[str] | None = None
    max: int = N_DRAFT_MAX
    tree: str | None = None
    rule: str | None = None
    numerics: Numerics = "strict"
    store: str | None = None
    overlap: bool = False

    def options(self, *, drafts: bool) -> DraftOptions:
        """Return them as edgedec.load takes them; `drafts` is false where nothing is drafted."""
        return DraftOptions(
            overlap=self.overlap,
            tree=self.tree,
            numerics=self.numerics,
            store=self.store,
            max_rows=None if drafts else 1,
        )


def require_no_rule(drafting: Drafting) -> None:
    """Raise RequestError where a rule of verification is named, and the command leaves it to each text."""
    if drafting.rule is not None:
        raise RequestError("--draft-option rule is for edgedec run and chat, and requests name their own; leave it out")


def drafting_of(options: Sequence[str] | None) -> Drafting:
    """Return what `--draft-option` options say.

    Raises:
        RequestError: One is not KEY=VALUE, or there is no such key.
        OptionError: A key does not take the value.
    """
    pairs = [text.partition("=") for text in options or ()]
    for name, sign, value in pairs:
        if not name or not sign:
            raise RequestError(f"--draft-option is {name + sign + value!r:.100}; write KEY=VALUE, such as max=8")
    return Drafting(**read_keys("--draft-option ", Drafting, [(name, value) for name, _, value in pairs]))
