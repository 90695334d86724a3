"""The draft head that a request names for a preset: a head that is on this machine, by its name, never by a path."""

from edgedec.errors import EdgedecError
from edgedec.head_kinds import OFF, require_fit
from edgedec.load_options import ResolveOptions
from edgedec.loading.resolve import resolve
from edgedec_apps.server.core.errors import ApiError
from edgedec_apps.server.shelf.names import Named, installed_file


def require_head(name: str, named: Named) -> None:
    """Check that a name is "off", or that of a draft head on this machine which fits a model.

    Raises:
        ApiError: It is not (400). The answer to a path is the same whether the path exists or not.
    """
    if name == OFF:
        return
    head = installed_file(name, draft_head=True)
    if head is None:
        raise ApiError(
            f'there is no draft head {name!r:.200} here; draft_head is "off", or the name of a head that edgedec pull '
            "or POST /api/pull has fetched",
            param="draft_head",
        )
    try:
        require_fit(head, resolve(named.recipe.model, ResolveOptions(offline=True)))
    except EdgedecError as error:
        raise ApiError(
            f"draft_head is {name!r:.200}, which {named.name} can't use: {error}", param="draft_head"
        ) from error
