"""Jinja's sandbox for templates of unknown origin, in which everything that a template does is on a budget.

Calls, filters, tests, attributes and arithmetic go through the methods of `Sandbox` by Jinja's own hooks. The syntax
tree is rewritten before it is compiled, so that loops, macros, comparisons, `~`, slices and literals do so, too. In all
else the environment is that of Hugging Face's apply_chat_template.
"""

from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from itertools import chain
from types import BuiltinMethodType, CodeType, FunctionType, MethodType
from typing import Any, NoReturn

from jinja2 import Template, nodes
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment, safe_range
from jinja2.utils import Namespace, pass_context
from jinja2.visitor import NodeTransformer

from edgedec.progress import CancelToken
from edgedec_runtimes.chat.budget import STEP_BYTES, Budget, check_key, listed
from edgedec_runtimes.chat.filters import FILTERS, METHODS, TESTS, budget_of
from edgedec_runtimes.chat.operators import compare, pay_arithmetic

# The largest template known has 40,000 characters and 2,000 nodes; compiling takes up to 2 s at these limits.
MAX_SOURCE_CHARS = 128 * 1024
MAX_NODES = 10_000
MAX_TIME_FORMAT_CHARS = 200
NODE_BYTES = 8  # of a piece of output that waits to be joined
NODES_PER_MACRO = 128
STEPS_PER_CALL = 4
FORMAT_BYTES = 1024  # roughly those of the wrapper of a str.format

# Nodes that a later version of Jinja adds are refused until they are listed here.
_STATEMENTS = (
    "Template Output TemplateData For If Macro CallBlock FilterBlock With Assign AssignBlock Scope Break Continue"
)
_EXPRESSIONS = (
    "Name NSRef Const Tuple List Dict Pair Keyword CondExpr Filter Test Call Getitem Getattr Slice Concat Compare "
    "Operand Mul Div FloorDiv Add Sub Mod Pow Not Neg Pos And Or"
)
_NODES = frozenset(f"{_STATEMENTS} {_EXPRESSIONS}".split())


def _call(name: str, *args: nodes.Node, lineno: int) -> nodes.Call:
    """Return the node that calls a method of `Sandbox`."""
    method = nodes.EnvironmentAttribute(name, lineno=lineno)
    return nodes.Call(method, list(args), [], None, None, lineno=lineno)


def _run(n_nodes: int, lineno: int) -> nodes.ExprStmt:
    """Return the statement that pays for running `n_nodes` nodes."""
    return nodes.ExprStmt(_call("run", nodes.Const(n_nodes), lineno=lineno), lineno=lineno)


class _Rewriter(NodeTransformer):  # Jinja is extended by inheritance
    """Makes calls of the sandbox from nodes that Jinja compiles to plain Python, and refuses nodes it does not know."""

    def __init__(self) -> None:
        self.n_nodes = 0

    def generic_visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> nodes.Node:
        """Count the node and visit its children."""
        name = type(node).__name__
        if name not in _NODES:
            raise TemplateSyntaxError(f"{name} is not available to chat templates", node.lineno)
        self.n_nodes += 1
        if self.n_nodes > MAX_NODES:
            raise TemplateSyntaxError(f"it has more than {MAX_NODES:,} parts", node.lineno)
        return super().generic_visit(node)

    def visit_For(self, node: nodes.For) -> nodes.Node:
        """Let every iteration pay for the body, and every test for itself."""
        n_nodes = self.n_nodes
        self.generic_visit(node)
        node.body.insert(0, _run(self.n_nodes - n_nodes, node.lineno))
        if node.test is not None:
            node.test = nodes.And(_call("run", nodes.Const(1), lineno=node.lineno), node.test, lineno=node.lineno)
        return node

    def visit_Macro(self, node: nodes.Macro) -> list[nodes.Node]:
        """Let every call pay for the body, and every definition for the macro, which can be kept."""
        n_nodes = self.n_nodes
        self.generic_visit(node)
        node.body.insert(0, _run(self.n_nodes - n_nodes, node.lineno))
        return [_run(NODES_PER_MACRO, node.lineno), node]

    visit_CallBlock = visit_Macro

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call("concatenate", *node.nodes, lineno=node.lineno)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        pairs = ((nodes.Const(operand.op, lineno=node.lineno), operand.expr) for operand in node.ops)
        return _call("compare", node.expr, *chain.from_iterable(pairs), lineno=node.lineno)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _call("made", node, lineno=node.lineno) if isinstance(node.arg, nodes.Slice) else node

    def visit_Pair(self, node: nodes.Pair) -> nodes.Node:
        self.generic_visit(node)
        node.key = _call("key", node.key, lineno=node.lineno)
        return node

    def visit_List(self, node: nodes.List) -> nodes.Node:
        return _call("made", self.generic_visit(node), lineno=node.lineno)

    visit_Dict = visit_List

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return _call("made", node, lineno=node.lineno) if node.ctx == "load" else node

    def visit_NSRef(self, node: nodes.NSRef) -> nodes.Node:
        if node.attr.startswith("_"):
            raise TemplateSyntaxError(f"names with an underscore in front, as {node.attr!r}, are reserved", node.lineno)
        return node


class _Generation(Extension):
    """Accepts {% generation %} blocks, which mark the parts of a prompt that a training run learns from."""

    tags = {"generation"}  # noqa: RUF012  # as in Extension

    def parse(self, parser: Parser) -> nodes.Node:
        """Return the block as a plain scope."""
        lineno = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=lineno)


def _raise_exception(message: str = "", /) -> NoReturn:
    raise TemplateError(str(message))


def _strftime_now(time_format: str, /) -> str:
    if len(time_format) > MAX_TIME_FORMAT_CHARS:
        raise SecurityError(f"a time format has at most {MAX_TIME_FORMAT_CHARS} characters")
    return datetime.now().strftime(time_format)


def _dict(mapping: Mapping[str, Any] | None = None, /, **items: Any) -> dict[str, Any]:
    return {**(mapping or {}), **items}


def _namespace(mapping: Mapping[str, Any] | None = None, /, **items: Any) -> Namespace:
    attributes = _dict(mapping, **items)
    if any(name.startswith("_") for name in attributes):
        raise SecurityError("names with an underscore in front are reserved")
    return Namespace(attributes)


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "dict": _dict,
    "namespace": _namespace,
    "raise_exception": _raise_exception,
    "range": safe_range,
    "strftime_now": _strftime_now,
}


@pass_context
def _printed(context: Context, value: Any) -> Any:
    budget_of(context).weigh(value)
    return value


def _pay_method(budget: Budget, callee: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Pay for calling a method of a value (SecurityError where it is not in METHODS)."""
    method = getattr(callee, "__wrapped__", callee)  # Jinja wraps str.format
    if isinstance(method, (BuiltinMethodType, MethodType)):
        for owner, prices in METHODS:
            if isinstance(method.__self__, owner) and method.__name__ in prices:
                prices[method.__name__](budget, method.__self__, *args, **kwargs)
                return
    raise SecurityError(f"calling {getattr(method, '__qualname__', type(callee).__name__)} is not available")


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment and the budget of one rendering; Jinja's hooks are its methods."""

    intercepted_binops = frozenset(["+", "-", "*", "/", "//", "%", "**"])

    def __init__(self, cancel: CancelToken | None = None) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, loopcontrols],
            finalize=_printed,
            optimized=False,  # Jinja folds constants without paying
            cache_size=0,
        )
        self.filters = FILTERS
        self.tests = TESTS  # type: ignore[assignment]  # the type that mypy infers from Jinja's own is too narrow
        self.globals = dict(_FUNCTIONS)
        self.budget = Budget(cancel)

    def guarded_code(self, source: str) -> CodeType:
        """Return the code of a template.

        Raises:
            TemplateSyntaxError: The source is no template, is too large, or uses what is not available.
            Exception: Jinja or Python fails otherwise on an odd source.
        """
        if len(source) > MAX_SOURCE_CHARS:
            raise TemplateSyntaxError(f"it has {len(source):,} characters, more than {MAX_SOURCE_CHARS:,}", 1)
        tree = _Rewriter().visit(self.parse(source))
        return self.compile(tree.set_environment(self))

    def names_read(self, source: str) -> frozenset[str]:
        """Return the names of variables that a template reads; `guarded_code` must have accepted the template."""
        return frozenset(node.name for node in self.parse(source).find_all(nodes.Name) if node.ctx == "load")

    def render(self, code: CodeType, variables: Mapping[str, Any]) -> str:
        """Return the text that the code of a template (from `guarded_code`) makes of the variables."""
        return Template.from_code(self, code, self.globals).render(variables)

    # --- called by the rewritten tree ---

    def run(self, n_nodes: int) -> bool:
        """Pay for one run of a piece of a template with that many nodes."""
        self.budget.spend(STEP_BYTES + NODE_BYTES * n_nodes)
        return True

    def concatenate(self, *parts: Any) -> str:
        """Return `a ~ b ~ c` for the parts a, b and c."""
        self.budget.spend(self.budget.weigh(*parts))
        return "".join(map(str, parts))

    def compare(self, left: Any, *pairs: Any) -> bool:
        """Return the result of `left operator right operator right ...`; `pairs` are the operators and right sides."""
        for name, right in zip(pairs[::2], pairs[1::2], strict=True):
            if not compare(self.budget, left, name, right):
                return False
            left = right
        return True

    def made(self, value: Any) -> Any:
        """Pay for a slice, a list, a tuple or a dict that was just made, and return it."""
        return self.budget.made(value)

    def key(self, value: Any) -> Any:
        """Return a key of a dict, which was checked."""
        return check_key(value)

    # --- called by Jinja ---

    def concat(self, parts: Iterable[str]) -> str:  # in Environment an attribute
        """Return the joined output of a template, a macro or a block."""
        pieces = []
        for part in parts:
            self.budget.spend(len(part))
            pieces.append(part)
        return "".join(pieces)

    def call(self, context: Context, callee: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Return the result of a call. A template may call macros, recursive loops, and the functions in the tables."""
        if isinstance(callee, MethodType) and callee.__self__ is self:
            return callee(*args)
        self.budget.step(STEPS_PER_CALL + len(args) + len(kwargs))
        if isinstance(callee, (Macro, LoopContext, Undefined)):
            return context.call(callee, *args, **kwargs)
        kwargs.pop("_loop_vars", None)
        kwargs.pop("_block_vars", None)
        args = tuple(map(listed, args))
        if isinstance(callee, FunctionType) and callee in _FUNCTIONS.values():
            self.budget.weigh(*args)
        else:
            _pay_method(self.budget, callee, args, kwargs)
        return self.budget.made(callee(*args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Return Jinja's wrapper for str.format, which is paid for; None for any other value."""
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            self.budget.spend(FORMAT_BYTES)
        return wrapped

    def getitem(self, obj: Any, argument: Any) -> Any:
        """Return `obj[argument]`."""
        self.budget.step()
        return super().getitem(obj, check_key(argument))

    def unsafe_undefined(self, obj: Any, attribute: str) -> NoReturn:
        """Raise SecurityError for an unsafe attribute at once, where Jinja would wait until it is used."""
        raise SecurityError(f"access to attribute {attribute!r} of {type(obj).__name__!r} object is unsafe")

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Return the result of `left operator right`."""
        pay_arithmetic(self.budget, left, operator, right)
        return self.binop_table[operator](left, right)
