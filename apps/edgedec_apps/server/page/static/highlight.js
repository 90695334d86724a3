// Colors code by tokens that most languages share: comments, strings, numbers, keywords, names of calls. It knows no
// grammar, and a language that it does not know stays plain.

const MOST_CHARACTERS = 100_000;
const words = (text) => text.trim().split(/\s+/);

const KEYWORDS = new Set(
  words(`
  abstract and any as assert async await bool break byte case catch chan char class const constexpr continue crate
  debugger def default defer del delete do done double dyn echo elif else elsif end enum esac except export extends
  extern False false fi final finally float fn for foreach from func function global go goto if impl implements import
  in include inline instanceof int interface internal is lambda let local long loop match mod module move mut namespace
  new nil None nonlocal not null object of operator or override package pass private protected pub public raise range
  readonly ref register require return self Self short signed sizeof static str string struct super switch template
  then this throw throws trait True true try type typedef typename typeof undefined union unless unsafe unsigned until
  use using val var virtual void volatile when where while with yield`),
);
const SQL = new Set(
  words(`
  add all alter and as asc between by case create cross delete desc distinct drop else end exists foreign from full
  group having if in index inner insert into is join key left like limit not null offset on or order outer primary
  references right select set table then union unique update using values view when where with`),
);

const STRING = String.raw`"""[\s\S]*?(?:"""|$)|'''[\s\S]*?(?:'''|$)|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'`;
const TICKS = String.raw`|${"`"}(?:\\[\s\S]|[^${"`"}\\])*${"`"}`;
const CHARACTER = String.raw`"(?:\\[\s\S]|[^"\\])*"|'(?:\\[^'\n]+|[^'\\\n])'`; // where a single quote may stand alone
const NUMBER = String.raw`\b(?:0[xX][\da-fA-F_]+|0[bB][01_]+|\d[\d_]*(?:\.\d[\d_]*)?(?:[eE][+-]?\d+)?)[a-z]?\b`;
const WORD = String.raw`[A-Za-z_$][\w$]*`;
const SLASHES = String.raw`\/\/[^\n]*|\/\*[\s\S]*?(?:\*\/|$)`;

function grammar(comment, { string = STRING, word = WORD, keywords = KEYWORDS, anyCase = false } = {}) {
  const pattern = `(?<comment>${comment})|(?<string>${string})|(?<number>${NUMBER})|(?<word>${word})`;
  return { pattern: new RegExp(pattern, "g"), keywords, anyCase };
}

const GRAMMARS = new Map();
const known = (names, rules) => words(names).forEach((name) => GRAMMARS.set(name, rules));
known(
  `python py python3 sh bash zsh shell console ruby rb yaml yml toml ini conf perl pl r make makefile dockerfile docker
  cmake elixir ex julia jl nim powershell ps1 graphql`,
  grammar(String.raw`#[^\n]*`),
);
known(
  `c cpp c++ cc h hpp cs csharp java js javascript jsx mjs ts typescript tsx go golang swift kotlin kt scala dart php css
  scss less zig proto glsl cuda json jsonc json5 groovy objc`,
  grammar(SLASHES, { string: STRING + TICKS }),
);
known("rust rs", grammar(SLASHES, { string: CHARACTER }));
known("sql sqlite postgres postgresql mysql", grammar(String.raw`--[^\n]*|\/\*[\s\S]*?(?:\*\/|$)`, { keywords: SQL, anyCase: true }));
known("lua haskell hs elm ada", grammar(String.raw`--[^\n]*`, { string: CHARACTER }));
known("lisp clojure clj scheme asm nasm", grammar(String.raw`;[^\n]*`, { string: CHARACTER }));
known("tex latex matlab erlang prolog", grammar(String.raw`%[^\n]*`, { string: CHARACTER }));
known(
  "html xml svg xhtml vue",
  grammar(String.raw`<!--[\s\S]*?(?:-->|$)`, { string: String.raw`"[^"]*"|'[^']*'`, word: String.raw`<\/?[\w:-]+|\/?>`, keywords: null }),
);

// The text as a list of strings and of span elements with the classes comment, string, number, keyword and call.
export function highlight(text, language) {
  const rules = GRAMMARS.get(language.toLowerCase());
  if (!rules || text.length > MOST_CHARACTERS) return [text];
  const parts = [];
  let plain = 0; // where the text begins that has no span yet
  for (const match of text.matchAll(rules.pattern)) {
    const kind = kindOf(match, text, rules);
    if (!kind) continue;
    if (match.index > plain) parts.push(text.slice(plain, match.index));
    const span = document.createElement("span");
    span.className = kind;
    span.append(match[0]);
    parts.push(span);
    plain = match.index + match[0].length;
  }
  if (plain < text.length) parts.push(text.slice(plain));
  return parts;
}

function kindOf({ groups, index, 0: token }, text, { keywords, anyCase }) {
  if (groups.word === undefined) return groups.comment !== undefined ? "comment" : groups.string !== undefined ? "string" : "number";
  if (!keywords || keywords.has(anyCase ? token.toLowerCase() : token)) return "keyword";
  return text[index + token.length] === "(" ? "call" : null;
}
