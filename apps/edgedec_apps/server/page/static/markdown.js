// Markdown to DOM nodes: text becomes text nodes, never markup. Images and HTML stay text; links go to the web or mail.

import { highlight } from "/static/highlight.js";

const SAFE_LINK = /^(https?:|mailto:)/i;
const FENCE = /^ {0,3}(```+|~~~+)\s*([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*\s*$/;
const RULE = /^ {0,3}([-*_])(\s*\1){2,}\s*$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const TABLE_RULE = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;
const MOST_DEPTH = 8;

export function render(text) {
  const fragment = document.createDocumentFragment();
  blocks(text.replace(/\r\n?/g, "\n").split("\n"), fragment, 0);
  return fragment;
}

function element(name, ...children) {
  const node = document.createElement(name);
  node.append(...children);
  return node;
}

function blocks(lines, parent, depth) {
  let at = 0;
  while (at < lines.length) {
    const line = lines[at];
    if (!line.trim()) at += 1;
    else if (FENCE.test(line)) at = fence(lines, at, parent);
    else if (HEADING.test(line)) {
      const [, marks, words] = line.match(HEADING);
      const heading = element(`h${Math.min(marks.length + 2, 6)}`);
      inline(words, heading, 0);
      parent.append(heading);
      at += 1;
    } else if (RULE.test(line)) {
      parent.append(element("hr"));
      at += 1;
    } else if (/^ {0,3}>/.test(line) && depth < MOST_DEPTH) at = quote(lines, at, parent, depth);
    else if (ITEM.test(line) && depth < MOST_DEPTH) at = list(lines, at, parent, depth);
    else if (line.includes("|") && TABLE_RULE.test(lines[at + 1] ?? "") && lines[at + 1].includes("|")) at = table(lines, at, parent);
    else at = paragraph(lines, at, parent);
  }
}

function fence(lines, at, parent) {
  const [, marks, language] = lines[at].match(FENCE);
  const body = [];
  let end = at + 1;
  while (end < lines.length && !(lines[end].trim().startsWith(marks) && !lines[end].trim().slice(marks.length).replaceAll(marks[0], "").trim())) {
    body.push(lines[end]);
    end += 1;
  }
  parent.append(codeBlock(body.join("\n"), language.trim().split(/\s/)[0].slice(0, 30)));
  return end + 1;
}

// A block of code with its language and a button; messages.js handles the clicks on it.
function codeBlock(text, language) {
  const copy = element("button", "Copy");
  copy.type = "button";
  copy.className = "copy-code";
  copy.setAttribute("aria-label", language ? `Copy the code (${language})` : "Copy the code");
  const head = element("div", element("span", language || "text"), copy);
  head.className = "code-head";
  const pre = element("pre", element("code", ...highlight(text, language)));
  pre.tabIndex = 0;
  const block = element("div", head, pre);
  block.className = "code";
  return block;
}

function quote(lines, at, parent, depth) {
  const inner = [];
  while (at < lines.length && /^ {0,3}>/.test(lines[at])) {
    inner.push(lines[at].replace(/^ {0,3}> ?/, ""));
    at += 1;
  }
  const node = element("blockquote");
  blocks(inner, node, depth + 1);
  parent.append(node);
  return at;
}

function list(lines, at, parent, depth) {
  const [, indent, marker] = lines[at].match(ITEM);
  const ordered = /\d/.test(marker);
  const node = element(ordered ? "ol" : "ul");
  if (ordered && parseInt(marker, 10) !== 1) node.start = parseInt(marker, 10);
  while (at < lines.length) {
    const match = lines[at].match(ITEM);
    if (!match || match[1].length !== indent.length || /\d/.test(match[2]) !== ordered) break;
    const inner = [match[3]];
    at += 1;
    while (at < lines.length) {
      const deeper = lines[at].match(/^\s*/)[0].length > indent.length;
      const blank = !lines[at].trim();
      if (blank ? !/^\s/.test(lines[at + 1] ?? "x") : !deeper) break;
      inner.push(lines[at].slice(Math.min(indent.length + 2, lines[at].match(/^\s*/)[0].length)));
      at += 1;
    }
    const item = element("li");
    if (inner.length === 1) inline(inner[0], item, 0);
    else blocks(inner, item, depth + 1);
    node.append(item);
  }
  parent.append(node);
  return at;
}

function table(lines, at, parent) {
  const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => cell.trim());
  const row = (line, kind) => {
    const node = element("tr");
    for (const words of cells(line)) {
      const cell = element(kind);
      inline(words, cell, 0);
      node.append(cell);
    }
    return node;
  };
  const node = element("table", element("thead", row(lines[at], "th")));
  const body = element("tbody");
  at += 2;
  while (at < lines.length && lines[at].includes("|")) {
    body.append(row(lines[at], "td"));
    at += 1;
  }
  node.append(body);
  parent.append(node);
  return at;
}

function paragraph(lines, at, parent) {
  const words = [lines[at]];
  at += 1;
  while (at < lines.length && lines[at].trim() && ![FENCE, HEADING, RULE, ITEM].some((kind) => kind.test(lines[at])) && !/^ {0,3}>/.test(lines[at])) {
    words.push(lines[at]);
    at += 1;
  }
  const node = element("p");
  words.forEach((line, i) => {
    if (i) node.append(element("br"));
    inline(line, node, 0);
  });
  parent.append(node);
  return at;
}

// In order of precedence; each takes the shortest span that closes.
const SPANS = [
  { name: "code", pattern: /(`+)([^`]|[^`][\s\S]*?[^`])\1(?!`)/ },
  { name: "link", pattern: /(?<!!)\[([^\[\]]{1,500})\]\(([^()\s]{1,2000})\)/ },
  { name: "strong", pattern: /(?<!\\)\*\*(?=\S)([\s\S]*?\S)\*\*|(?<![\w_])__(?=\S)([\s\S]*?\S)__(?!\w)/ },
  { name: "em", pattern: /(?<![\\*])\*(?=[^\s*])([^*]*?[^\s*])\*(?!\*)|(?<!\w)_(?=[^\s_])([^_]*?[^\s_])_(?!\w)/ },
  { name: "s", pattern: /~~(?=\S)([\s\S]*?\S)~~/ },
];

function inline(text, parent, depth) {
  while (text) {
    let first = null;
    if (depth < MOST_DEPTH) {
      for (const { name, pattern } of SPANS) {
        const match = text.match(pattern);
        if (match && (first === null || match.index < first.match.index)) first = { name, match };
      }
    }
    if (first === null) {
      parent.append(text.replace(/\\([\\`*_{}[\]()#+\-.!~|>])/g, "$1"));
      return;
    }
    const { name, match } = first;
    if (match.index) parent.append(text.slice(0, match.index).replace(/\\([\\`*_{}[\]()#+\-.!~|>])/g, "$1"));
    parent.append(span(name, match, depth));
    text = text.slice(match.index + match[0].length);
  }
}

function span(name, match, depth) {
  if (name === "code") return element("code", match[2].trim() || match[2]);
  if (name === "link" && !SAFE_LINK.test(match[2])) return document.createTextNode(match[0]);
  const node = element(name === "link" ? "a" : name);
  if (name === "link") {
    node.href = match[2];
    node.rel = "noopener noreferrer nofollow";
    node.target = "_blank";
    node.title = match[2];
  }
  inline(match[1] ?? match[2], node, depth + 1);
  return node;
}
