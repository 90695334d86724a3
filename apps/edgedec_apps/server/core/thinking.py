"""Whether the model is to think before it answers: the fields of a request as variables of the chat template."""

from typing import Any

from edgedec.api.engine import Engine
from edgedec.chat import may_think, thinking_variables
from edgedec.errors import RequestError
from edgedec_apps.server.core.fields import Fields

_EFFORT = "reasoning_effort"
_NO_THINKING = ("none", "minimal")
_OF_RENDERING = {"messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token", "cancel", "self"}


def thinks(engine: Engine, options: dict[str, Any]) -> bool:
    """Return whether a chat's text may begin with what the model thinks; under a grammar all of it is the answer."""
    template, limits = engine.template, {"grammar", "json_schema"} & options.keys()
    return template is not None and not limits and may_think(template.source)


def read_thinking(fields: Fields, engine: Engine) -> dict[str, Any]:
    """Return the template's variables of a request; what the template has no variable for is ignored by name.

    They stand in `reasoning_effort`, `reasoning` (with `effort` and `enabled`), `enable_thinking`, and
    `chat_template_kwargs`, as llama-server and vLLM have it.

    Raises:
        ApiError: A field is malformed, or `chat_template_kwargs` names what the server itself gives the template.
    """
    reasoning, given = fields.object("reasoning"), fields.object("chat_template_kwargs")
    variables = effort_variables(fields, _EFFORT, engine, fields.text(_EFFORT))
    variables |= effort_variables(reasoning, "effort", engine, reasoning.text("effort"))
    for each, name in ((reasoning, "enabled"), (fields, "enable_thinking")):
        variables |= switch(each, name, engine, each.optional_flag(name))
    reasoning.end()
    for name, value in given.rest().items():
        if name in _OF_RENDERING or not name.isidentifier():
            raise given.refusal(name[:100], "can't be set; it must be a variable that the chat template has of its own")
        if engine.template is None or name in engine.template.variables:
            variables[name] = value
        else:
            given.note_ignored(name)
    return variables


def switch(fields: Fields, name: str, engine: Engine, think: bool | None) -> dict[str, bool]:
    """Return the variables that make the model think, or not, as the field `name` says; none for None.

    Where the template can't do this, the field is ignored by name.
    """
    if think is None or engine.template is None:
        return {}
    try:
        return thinking_variables(engine.template, think)
    except RequestError:
        fields.note_ignored(name)
        return {}


def effort_variables(fields: Fields, name: str, engine: Engine, effort: str | None) -> dict[str, Any]:
    """Return the template's variables for an effort that stood in the field `name`.

    A template with a variable of that name gets the value. Else "none" and "minimal" switch thinking off, and other
    values switch it on, where the template can do that. Where it can't, the field is ignored by name.
    """
    if not effort:
        return {}
    if engine.template is not None:
        if _EFFORT in engine.template.variables:
            return {_EFFORT: effort}
        try:
            if found := thinking_variables(engine.template, effort not in _NO_THINKING):
                return dict(found)
        except RequestError:
            pass
    fields.note_ignored(name)
    return {}


def read_think(fields: Fields, engine: Engine) -> dict[str, Any]:
    """Return the template's variables of ollama's `think`: true, false, or an effort such as "high".

    Raises:
        ApiError: The field is something else.
    """
    think = fields.take("think")
    if isinstance(think, str):
        return effort_variables(fields, "think", engine, think)
    if not isinstance(think, bool | None):
        raise fields.refusal("think", f"is {think!r:.40}; it must be true, false, or an effort such as 'low'")
    return dict(switch(fields, "think", engine, think))
