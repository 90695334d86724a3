"""GBNF, llama.cpp's grammars: the texts are exactly those of the grammar; errors name line and expectation."""

import random
from collections.abc import Iterator
from itertools import product

import pytest
from support.models.tiny_models import byte_ids

from edgedec.errors import RequestError
from edgedec.grammar import MAX_SOURCE_BYTES, Grammar
from edgedec.model import Model
from edgedec_runtimes.grammar.compiler import Llguidance
from edgedec_runtimes.grammar.gbnf import Chars, Choice, Node, Rule, Sequence, read_gbnf
from edgedec_runtimes.grammar.gbnf_lark import lark_of_gbnf

pytest.importorskip("llguidance", reason="the extra `grammar` is not installed")

pytestmark = pytest.mark.slow

# llama.cpp's own grammar of JSON, shortened, in this project's words.
JSON = r"""
root   ::= object   # the whole text
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( pair ("," ws pair)* )? "}" ws
pair   ::= string ":" ws value
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt/] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws     ::= | " " | "\n" [ \t]{0,20}
"""


def matches(rules: dict[str, Node], text: str) -> bool:
    """Return whether a text keeps to rules, tried in every way: slow, and written without any of the product's code."""

    def ends(node: Node, at: int, used: int) -> set[int]:
        if used > 60:
            return set()
        if isinstance(node, Chars):
            inside = at < len(text) and any(low <= ord(text[at]) <= high for low, high in node.ranges)
            return {at + 1} if at < len(text) and inside != node.negated else set()
        if isinstance(node, Rule):
            return ends(rules[node.name], at, used + 1)
        if isinstance(node, Choice):
            return {end for part in node.parts for end in ends(part, at, used)}
        found = {at}
        if isinstance(node, Sequence):
            for part in node.parts:
                found = {end for each in found for end in ends(part, each, used)}
            return found
        result = {at} if node.least == 0 else set()
        for i in range(node.most if node.most is not None else len(text) + node.least + 1):
            found = {end for each in found for end in ends(node.part, each, used)}
            result |= found if i + 1 >= node.least else set()
        return result

    return len(text) in ends(rules["root"], 0, 0)


@pytest.fixture(scope="module")
def compiler(byte_model: Model) -> Llguidance:
    return Llguidance(byte_model.tokenizer)


def accepts(compiler: Llguidance, source: str, text: str) -> bool:
    """Return whether the compiled grammar takes a text as a whole."""
    state = compiler.compile(Grammar.gbnf(source))
    return all(state.advance(token_id) for token_id in byte_ids(text)) and state.may_end


@pytest.mark.parametrize(
    ("source", "good", "bad"),
    [
        ('root ::= [a-z]* "ab"', ["ab", "xxab", "abab"], ["xx", "aba"]),
        ('root ::= "a" | "ab" "c"', ["a", "abc"], ["ab", "ac"]),
        ('root ::= "ab"{2} [0-9]{1,} "x"{0,2} "y"{3,}', ["abab1yyy", "abab12xxyyyy"], ["ab1yyy", "abab1xxxyyy"]),
        ('root ::= ("a" |\n  "b")+ # end', ["a", "abba"], ["c"]),
        ('root ::=\n  one |\n  two\none ::= "1"\ntwo ::= "2"', ["1", "2"], ["12"]),
        (r'root ::= "\x41\u00e9\U0001F600\n\"\\\[\]" [\]\-^\\]', ['Aé😀\n"\\[]]', 'Aé😀\n"\\[]^'], ['Aé😀\n"\\[]a']),
        ("root ::= [^a-y\\n-]", ["z", "é", "\t"], ["a", "\n", "-"]),
        ("root ::= .{2}", ["\n\n", "éa"], ["a", "abc"]),
        ('root ::= "(" root ")" | "x"', ["x", "((x))"], ["(x", "()"]),
        ('root ::= "a" root "a" | "a" | "b"', ["a", "aba", "aaa", "aabaa"], ["aa", "ab"]),
        ('root ::= root "+" num | num\nnum ::= [0-9]+', ["1", "1+22+3"], ["1+", "+1"]),
        ('root ::= "[" item* "]"\nitem ::= root | [a-z]+ | [a-z] "1"', ["[abc]", "[a1[b]]"], ["[1]", "a"]),
        (JSON, ["{}", '{"a": [1, -2.5e3,null], "b":\n\t{"c":"\\u00ff x"}} '], ["[]", '{"a"}', '{"a":01}', '{"a":1,}']),
    ],
)
def test_texts(compiler: Llguidance, source: str, good: list[str], bad: list[str]) -> None:
    assert [text for text in good if not accepts(compiler, source, text)] == []
    assert [text for text in bad if accepts(compiler, source, text)] == []


def _drawn(rng: random.Random, depth: int) -> str:
    kind = rng.randrange(8 if depth else 3)
    if kind == 0:
        return '"' + "".join(rng.choice("ab") for _ in range(rng.randint(1, 2))) + '"'
    if kind == 1:
        return rng.choice(["[ab]", "[^a]", "[b-c]", "."])
    if kind == 2:
        return rng.choice(["one", "two"])
    inner = [_drawn(rng, depth - 1) for _ in range(rng.randint(1, 2))]
    if kind < 5:
        return "(" + " ".join(inner) + ")"
    return "(" + " | ".join(inner) + ")" + rng.choice(["", "?", "*", "+", "{2}", "{0,2}"])


def _sources() -> Iterator[str]:
    rng = random.Random(7)
    for _ in range(60):
        one = f'"c" {rng.choice(["root", "two"])} "c" | {_drawn(rng, 1).replace("one", chr(34) + "b" + chr(34))}'
        yield f'root ::= {_drawn(rng, 2)} {_drawn(rng, 1)}\none ::= {one}\ntwo ::= [a-b] | "c" two\n'


def test_drawn_grammars_have_exactly_their_texts(compiler: Llguidance) -> None:
    """Of 60 drawn grammars, with recursion and what is ambiguous, every short text is judged as by trying all ways."""
    texts = ["".join(letters) for n in range(5) for letters in product("abc", repeat=n)]
    n_good = 0
    for source in _sources():
        rules = read_gbnf(source)
        expected = [text for text in texts if matches(rules, text)]
        if not [text for text in expected if text]:
            continue
        assert [text for text in texts if accepts(compiler, source, text)] == expected, source
        n_good += len(expected)
    assert n_good > 500


def test_json_is_cut_into_terminals() -> None:
    """Where one character decides, parts become terminals, which llguidance's masks are quick for."""
    assert "STRING_1:" in lark_of_gbnf(JSON)
    assert "PART" in lark_of_gbnf('root ::= "(" root ")" | [a-z]+ "1" root')
    assert "PART" not in lark_of_gbnf('root ::= "(" root ")" | [a-z]+ "x" root'), "each character is a terminal"


@pytest.mark.parametrize(
    ("source", "line", "expected"),
    [
        ("", 1, "expected a rule 'root', which is the whole text, found the end"),
        ('start ::= "a"', 1, "expected a rule 'root'"),
        ('root ::= "a', 1, 'expected a character or ", found the end'),
        ('root ::= "a"\nx = "b"', 2, "expected ::=, found '= \"b\"'"),
        ('root ::= ("a"\n| "b"', 2, "expected ), found the end"),
        ("root ::= [b-a]", 1, "expected a range whose end is not before its beginning"),
        ("root ::= []", 1, "expected a character of the class, found ']'"),
        ('root ::= "a"{2,1}', 1, "expected at least 2 repetitions after the comma"),
        ('root ::= "a"{x}', 1, "expected {n}, {n,} or {n,m}, found '{x}'"),
        ('root ::= "a" )', 1, "expected a part of a rule or the end of the line, found ')'"),
        ('root ::= "a"\n\n  | b', 3, "expected the name of a rule, found '| b'"),
        ('root ::= "a"\n\none ::= two', 3, "there is no rule 'two'"),
        (r'root ::= "\q"', 1, r"after \, found 'q"),
        (r'root ::= "\u12"', 1, r"4 hexadecimal digits of a character after \u"),
        (r'root ::= "\ud800"', 1, "hexadecimal digits of a character"),
        ("root ::= <think>", 1, "tokens such as <think> can't be named here"),
        ("root ::= " + "(" * 5000, 1, "at most 100 groups inside of one another"),
    ],
)
def test_what_is_malformed_is_refused(compiler: Llguidance, source: str, line: int, expected: str) -> None:
    """The message has the line, what was expected there, and what was found."""
    with pytest.raises(RequestError) as caught:
        compiler.compile(Grammar.gbnf(source))
    assert f"line {line}: " in str(caught.value)
    assert expected in str(caught.value)


def test_large_grammars_are_refused_or_read_at_once(compiler: Llguidance) -> None:
    """What would take long is refused, or needs no more passes than there are; chains and circles are followed."""
    circle = "".join(f'r{i} ::= "a" r{(i * 7 + 1) % 900} | "b" r{(i * 11 + 3) % 900} | "c"\n' for i in range(900))
    assert accepts(compiler, f"root ::= r0\n{circle}", "abac")
    chain = "".join(f"r{i} ::= r{i + 1}\n" for i in range(6000))
    with pytest.raises(RequestError, match=r"bytes; at most|chain"):
        compiler.compile(Grammar.gbnf(f'root ::= r0\n{chain}r6000 ::= "a"'))
    with pytest.raises(RequestError, match="at most 100000 are compiled"):
        compiler.compile(Grammar.gbnf("root ::= " + '"a" ' * 50_000))
    with pytest.raises(RequestError, match="at most 1000000"):
        Grammar.gbnf("x" * (MAX_SOURCE_BYTES + 1))
