"""An estimate of the longest stretch of text that a grammar leaves no choice in, in bytes.

llguidance follows such a stretch to its end before it allows a token. That takes 5 us and some 400 bytes of memory for
each byte, and no limit of its own stops it. So the length is estimated from the source, rather too high: the longest
alternative counts, as if it did not have to be distinguished from the others; a repeated part counts as often as it
must be there, and once where it need not be; a definition that leads back to itself counts once.
"""

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from edgedec_runtimes.grammar.references import REFERENCES, target

_Name = TypeVar("_Name", str, int)
_Token = tuple[str, int]  # "text" with its number of bytes, "times" with a count, or one of "(", "|" and ")" with 0
_FAR = 10**12  # larger than every limit; estimates stop here, so that products of counts stay short

# A bracket that is not closed matches to the end of the source at once, and names have a largest length, so that both
# expressions take time in proportion to the source.
_REGEX = re.compile(
    r"""(?P<times>\{(?P<least>\d+)(?:,\d*)?\})
      | (?P<open>\((?:\?(?:P?<[^>]{0,64}>|[A-Za-z-]{0,16}:?))?)
      | (?P<mark>[|)])
      | (?P<skipped>[*+?^$])
      | (?P<one>\\(?:[pPxuU]\{[^}]{0,64}\}|x[0-9A-Fa-f]{2}|.)
               | \[\^?\]?(?:\\.|\[:[a-z^]{1,16}:\]|[^\]\\])*+(?:\]|\\?\Z) | .)""",
    re.VERBOSE | re.DOTALL,
)
_LARK = re.compile(
    r"""(?P<skipped>//[^\n]*|\#[^\n]*|->[^\S\n]*\w+)
      | (?P<json>%json\s*+(?=\{))
      | (?P<string>"(?:\\.|[^"\\\n])*+(?:"|(?=\n)|\\?\Z))
      | /(?P<regex>(?:\\.|[^/\\\n])++)(?:/|(?=\n)|\\?\Z)
      | (?P<times>(?:~\s*+|\{)(?P<least>\d+))
      | (?P<name>[A-Za-z_][\w-]*)
      | (?P<open>[(\[])
      | (?P<close>[)\]])
      | (?P<bar>\|)""",
    re.VERBOSE | re.DOTALL,
)
_HEAD = re.compile(r"^[^\S\n]*[?!]*(?P<name>[A-Za-z_][\w-]*)[^\S\n]*[:.{\[]", re.MULTILINE)


def regex_bytes(pattern: str) -> int:
    """Return the estimate for a regular expression.

    >>> regex_bytes("(ab|c){3}d?"), regex_bytes("((a{10}){10}){1,}[0-9]{7}")
    (7, 107)
    """
    return _longest(_regex_tokens(pattern))


def lark_bytes(source: str) -> int:
    """Return the estimate for a grammar in Lark's notation: that of its rule `start`.

    >>> lark_bytes('start: a{10} B\\na: "xy" | start\\nB: /b{5}/')
    25
    """
    heads = [*_HEAD.finditer(source)]
    if not heads:
        return 0  # there is no rule, which llguidance refuses
    ends = [*(head.start() for head in heads[1:]), len(source)]
    bodies = {head["name"]: source[head.end() - 1 : end] for head, end in zip(heads, ends, strict=True)}
    tokens = {name: [*_lark_tokens(body)] for name, body in bodies.items()}

    def value(name: str, values: Mapping[str, int]) -> int:
        return _longest((kind, n) if kind in _KINDS else ("text", values.get(kind, 0)) for kind, n in tokens[name])

    uses = {name: {kind for kind, _ in bodies if kind in tokens} for name, bodies in tokens.items()}
    return _known("start", uses.__getitem__, value)["start"] if "start" in uses else 0


def schema_bytes(schema: Any) -> int:
    """Return the estimate for a JSON schema.

    >>> schema_bytes({"type": "array", "minItems": 5, "items": {"type": "string", "pattern": "^a{8}$"}})
    56
    """
    whole = _nodes(schema)
    nodes = {id(node): node for node in whole}
    anchors = {f"#{node['$anchor']}": node for node in whole if isinstance(node, dict) and "$anchor" in node}
    sizes: dict[int, int] = {}
    for node in reversed(whole):
        sizes[id(node)] = _size(node, sizes)

    def references_of(node: Mapping[str, Any]) -> Iterator[Any]:
        names = (node[key] for key in REFERENCES if isinstance(node.get(key), str))
        return (anchors.get(name) or target(schema, name) for name in names)

    def uses(place: int) -> list[int]:
        node = nodes[place]
        inner = node if isinstance(node, list) else [node[key] for key in node if key not in _DEFINITIONS]
        references = [*inner, *(references_of(node) if isinstance(node, dict) else ())]
        return [id(each) for each in references if id(each) in nodes]

    def value(place: int, values: Mapping[int, int]) -> int:
        node = nodes[place]
        if isinstance(node, list):
            return max((values.get(id(each), 1) for each in node), default=0)
        references = sum(values.get(id(each), 0) for each in references_of(node))
        return references + _schema_value(node, lambda part: values.get(id(part), 1), sizes)

    return _known(id(schema), uses, value)[id(schema)] if whole else 1


def count_nodes(schema: Any, n_most: int) -> int:
    """Return how many objects and lists a schema holds; counting stops at `n_most` + 1.

    >>> count_nodes({"a": [1, [2, {}]]}, 10), count_nodes([[]] * 10, 3)
    (4, 4)
    """
    n, open_parts = 0, [iter([schema])]
    while open_parts and n <= n_most:
        for part in open_parts[-1]:
            if isinstance(part, dict | list):
                n += 1
                open_parts.append(iter(part.values() if isinstance(part, dict) else part))
                break
        else:
            open_parts.pop()
    return n


def patterns(schema: Any) -> Iterator[str]:
    """Yield the regular expressions of a JSON schema.

    >>> [*patterns({"items": {"pattern": "a+"}, "patternProperties": {"^b": {"pattern": {"type": "null"}}}})]
    ['^b', 'a+']
    """
    for node in _nodes(schema):
        if isinstance(node, dict):
            if isinstance(node.get("pattern"), str):
                yield node["pattern"]
            if isinstance(node.get("patternProperties"), dict):
                yield from node["patternProperties"]


_KINDS = ("text", "times", "(", "|", ")")
_DEFINITIONS = ("$defs", "definitions")


def _longest(tokens: Iterable[_Token]) -> int:
    """Return the estimate for tokens; a token "times" repeats the text or group before it."""
    outer: list[tuple[int, int]] = []
    best = before = last = 0  # bytes of the longest alternative so far; of this one but its last part; of its last part
    for kind, n in tokens:
        if kind == "text":
            before, last = before + last, n
        elif kind == "times":
            last = min(last * max(n, 1), _FAR)
        elif kind == "(":
            outer.append((best, before + last))
            best = before = last = 0
        elif kind == "|":
            best, before, last = max(best, before + last), 0, 0
        elif outer:
            last = max(best, before + last)
            best, before = outer.pop()
    return max(best, before + last)


def _regex_tokens(pattern: str) -> Iterator[_Token]:
    for match in _REGEX.finditer(pattern):
        if match["times"]:
            yield "times", int(match["least"][:12])
        elif match["open"]:
            yield "(", 0
        elif match["mark"]:
            yield match["mark"], 0
        elif match["one"]:
            yield "text", len(match["one"].encode(errors="surrogatepass")) if len(match["one"]) == 1 else 1


def _lark_tokens(body: str) -> Iterator[_Token]:
    """Yield the tokens of a definition; the token of a reference is its name."""
    at = 0
    while (match := _LARK.search(body, at)) is not None:
        at = match.end()
        if match["json"]:
            try:
                schema, at = json.JSONDecoder().raw_decode(body, at)
            except (ValueError, RecursionError):  # llguidance refuses it
                continue
            yield "text", schema_bytes(schema)
        elif match["string"]:
            yield "text", len(match["string"].encode(errors="surrogatepass")) - 2
        elif match["regex"]:
            yield "text", regex_bytes(match["regex"])
        elif match["times"]:
            yield "times", int(match["least"][:12])
        elif match["name"]:
            yield match["name"], 0
        elif not match["skipped"]:
            yield "(" if match["open"] else ")" if match["close"] else "|", 0


def _known(
    first: _Name, uses: Callable[[_Name], Collection[_Name]], value: Callable[[_Name, Mapping[_Name, int]], int]
) -> dict[_Name, int]:
    """Return the values of `first` and of all names that it uses, each computed from those of the names it uses itself.

    There is no recursion. A name that leads back to itself gets its value without the names that are not known yet.
    """
    values: dict[_Name, int] = {}
    begun: set[_Name] = set()
    path = [first]
    while path:
        name = path[-1]
        if name in begun:
            path.pop()
            if name not in values:
                values[name] = min(value(name, values), _FAR)
        else:
            begun.add(name)
            path += [use for use in uses(name) if use not in begun]
    return values


def _nodes(schema: Any) -> list[Any]:
    """Return the objects and lists of a schema, each before those inside of it."""
    nodes = [schema] if isinstance(schema, dict | list) else []  # true and false are schemas, too
    for node in nodes:
        nodes += [each for each in (node if isinstance(node, list) else node.values()) if isinstance(each, dict | list)]
    return nodes


def _size(part: Any, sizes: Mapping[int, int]) -> int:
    """Return about how long a part of a schema is as text.

    `sizes` has the lengths of the objects and lists inside of it, by their id().
    """
    if isinstance(part, dict):
        return 2 + sum(len(key) + 6 + _inner_size(each, sizes) for key, each in part.items())
    return 2 + sum(_inner_size(each, sizes) + 2 for each in part)


def _inner_size(part: Any, sizes: Mapping[int, int]) -> int:
    return len(part) + 2 if isinstance(part, str) else sizes.get(id(part), 8)


def _schema_value(node: Mapping[str, Any], value: Callable[[Any], int], sizes: Mapping[int, int]) -> int:
    """Return the estimate for the text that an object of a schema asks for, without its references."""
    parts = _string_bytes(node), _object_bytes(node, value), _array_bytes(node, value), _same_bytes(node, sizes)
    cases = sum(value(node[key]) for key in ("anyOf", "oneOf") if key in node)
    all_of = sum(map(value, node["allOf"])) if _is_list(node, "allOf") else 0
    return 1 + sum(parts) + cases + all_of


def _same_bytes(node: Mapping[str, Any], sizes: Mapping[int, int]) -> int:
    cases = [*(node["enum"] if _is_list(node, "enum") else ()), *([node["const"]] if "const" in node else ())]
    return max((_inner_size(case, sizes) for case in cases), default=0)


def _string_bytes(node: Mapping[str, Any]) -> int:
    pattern = node.get("pattern")
    return max(regex_bytes(pattern) if isinstance(pattern, str) else 0, _count(node, "minLength"))


def _object_bytes(node: Mapping[str, Any], value: Callable[[Any], int]) -> int:
    properties = node["properties"] if isinstance(node.get("properties"), dict) else {}
    patterned = node["patternProperties"].values() if isinstance(node.get("patternProperties"), dict) else ()
    more: list[int] = [
        *map(value, patterned),
        *([value(node["additionalProperties"])] if "additionalProperties" in node else ()),
    ]
    rest: int = max(more, default=1)
    required = {name for name in node["required"] if isinstance(name, str)} if _is_list(node, "required") else set()
    n_required = sum(len(name) + 6 + (value(properties[name]) if name in properties else rest) for name in required)
    others = [len(name) + 6 + value(part) for name, part in properties.items() if name not in required]
    n_more = max(1, _count(node, "minProperties") - len(required))
    return n_required + n_more * max([*others, *more, int("minProperties" in node)])


def _array_bytes(node: Mapping[str, Any], value: Callable[[Any], int]) -> int:
    first = [*(node["prefixItems"] if _is_list(node, "prefixItems") else ())]
    if _is_list(node, "items"):
        first += node["items"]
    rest = 0 if _is_list(node, "items") else value(node.get("items", True)) + 2
    n_rest = max(int("items" in node), _count(node, "minItems") - len(first))
    return sum(value(each) + 2 for each in first) + n_rest * rest


def _is_list(node: Mapping[str, Any], key: str) -> bool:
    return isinstance(node.get(key), list)


def _count(node: Mapping[str, Any], key: str) -> int:
    n = node.get(key)
    return min(int(n), _FAR) if isinstance(n, int | float) and 0 < n < float("inf") else 0
