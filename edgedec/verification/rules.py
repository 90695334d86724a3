"""The opt-in verification rules that are installed, by their names: plug-ins of the group `edgedec.rules`."""

from edgedec import plugins
from edgedec.errors import PluginError
from edgedec.sequence import COUPLED
from edgedec.verification.contract import Rule


def rule_names() -> list[str]:
    """Return the names of all rules, the default first; those of edgedec stand before other packages'."""
    return [COUPLED, *plugins.plugins(plugins.RULES)]


def find_rule(name: str) -> Rule:
    """Return the opt-in rule of that name.

    Raises:
        PluginError: No such rule is installed, it does not import, or it is no Rule.
    """
    rule = plugins.load_plugin(plugins.RULES, name)
    if not isinstance(rule, Rule):
        raise PluginError(f"the rule {name!r} is a {type(rule).__name__}, not a Rule; remove its package")
    return rule
