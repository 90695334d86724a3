"""Jinja's sandbox for templates of unknown origin, in which everything that a template does is on a budget.

Calls, filters, tests, items and arithmetic go through the methods of `Sandbox` by Jinja's own hooks. The syntax tree is
rewritten before it is compiled, so that loops, `~`, slices and literals do so, too. In all else the environment is that
of Hugging Face's apply_chat_template.

minijinja (3.1) does not take Jinja's place: its fuel does not end a template that prints a list which holds itself
twice, sixty levels deep, and a list in a list, 30,000 levels deep, ends the process.
"""

from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
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
from edgedec_runtimes.chat.budget import STEP_BYTES, Budget, listed, pay_arithmetic, plain
from edgedec_runtimes.chat.filters import FILTERS, METHODS, OWNERS, TESTS

# The largest template known has 40,000 characters and 2,000 nodes; compiling takes up to 2 s at these limits.
MAX_SOURCE_CHARS = 128 * 1024
MAX_NODES = 10_000
MAX_TIME_FORMAT_CHARS = 200
NODE_BYTES = 8  # of a piece of output that waits to be joined
MACRO_BYTES = 1024  # of a macro that is defined, as it can be kept
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


class _Rewriter(NodeTransformer):  # Jinja is extended by inheritance
    """Makes calls of the sandbox from nodes that Jinja compiles to plain Python, and refuses nodes it does not know."""

    def __init__(self) -> None:
        self.n_nodes = 0
        self.n_bytes = 0  # of one run of all nodes so far

    def generic_visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> nodes.Node:
        """Count the node and visit its children."""
        name = type(node).__name__
        if name not in _NODES:
            raise TemplateSyntaxError(f"{name} is not available to chat templates", node.lineno)
        self.n_nodes += 1
        self.n_bytes += MACRO_BYTES if isinstance(node, (nodes.Macro, nodes.CallBlock)) else NODE_BYTES
        if self.n_nodes > MAX_NODES:
            raise TemplateSyntaxError(f"it has more than {MAX_NODES:,} parts", node.lineno)
        return super().generic_visit(node)

    def visit_For(self, node: nodes.For) -> nodes.Node:
        """Let every iteration pay for the body, and every test for itself."""
        before = self.n_bytes
        self.generic_visit(node)
        run = _call("run", nodes.Const(self.n_bytes - before), lineno=node.lineno)
        node.body.insert(0, nodes.ExprStmt(run, lineno=node.lineno))
        if node.test is not None:
            node.test = nodes.And(_call("run", nodes.Const(0), lineno=node.lineno), node.test, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call("concatenate", *node.nodes, lineno=node.lineno)

    def visit_List(self, node: nodes.Expr) -> nodes.Node:
        """Let a literal, a slice, and the arguments that a macro doesn't name be paid for."""
        self.generic_visit(node)
        return _call("made", node, lineno=node.lineno)

    visit_Dict = visit_List

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        return self.visit_List(node) if node.ctx == "load" else self.generic_visit(node)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        return self.visit_List(node) if isinstance(node.arg, nodes.Slice) else self.generic_visit(node)

    def visit_Name(self, node: nodes.Name) -> nodes.Node:
        is_star = node.ctx == "load" and node.name in ("varargs", "kwargs")
        return self.visit_List(node) if is_star else self.generic_visit(node)

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


@pass_context  # so that Jinja evaluates no constant beforehand, without paying
def _printed(context: Context, value: Any) -> Any:
    return plain(value)


def _pay_method(budget: Budget, callee: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Pay for calling a method of a value (SecurityError where it is not in METHODS)."""
    method = getattr(callee, "__wrapped__", callee)  # Jinja wraps str.format
    is_method = isinstance(method, (BuiltinMethodType, MethodType)) and isinstance(method.__self__, OWNERS)
    if not is_method or method.__name__ not in METHODS:
        raise SecurityError(f"calling {getattr(method, '__qualname__', type(callee).__name__)} is not available")
    METHODS[method.__name__](budget, method.__self__, *args, **kwargs)


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

    def run(self, n_bytes: int) -> bool:
        """Pay for one run of a piece of a template, and for so many bytes."""
        self.budget.spend(STEP_BYTES + n_bytes)
        return True

    def concatenate(self, *parts: Any) -> Any:
        """Return `a ~ b ~ c` for the parts a, b and c."""
        return self.budget.made("".join(str(plain(part)) for part in parts))

    def made(self, value: Any) -> Any:
        """Pay for a value that was just made, and return it."""
        return self.budget.made(value)

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
        args = tuple(plain(listed(each)) for each in args)
        if not (isinstance(callee, FunctionType) and callee in _FUNCTIONS.values()):
            _pay_method(self.budget, callee, args, {name: plain(each) for name, each in kwargs.items()})
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
        return super().getitem(obj, plain(argument))

    def unsafe_undefined(self, obj: Any, attribute: str) -> NoReturn:
        """Raise SecurityError for an unsafe attribute at once, where Jinja would wait until it is used."""
        raise SecurityError(f"access to attribute {attribute!r} of {type(obj).__name__!r} object is unsafe")

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Return the result of `left operator right`."""
        pay_arithmetic(self.budget, left, operator, right)
        return self.budget.made(self.binop_table[operator](left, right))
