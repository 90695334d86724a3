// One message of a conversation as DOM nodes: what was asked with its files, or answers side by side.

import { chosenOf } from "/static/conversation.js";
import { button, copy, element, patch, thumbnailNode } from "/static/dom.js";
import { graph, whatDraftingDid } from "/static/drafting.js";
import { render } from "/static/markdown.js";
import { visible } from "/static/tools.js";

// What an answer tells of itself, in a line; of drafts where they gained something.
export function summary({ predicted_n: n, speed, gain, reason }) {
  const ends = { length: "cut off at the limit", stopped: "stopped" };
  const parts = n === undefined ? [] : [`${n} ${n === 1 ? "token" : "tokens"}`, speed && `${speed.toFixed(1)} tokens/s`, gain > 1.05 && `${gain.toFixed(1)} times as fast as without drafts`];
  return [...parts, ends[reason]].filter((part) => part).join(" · ");
}

// What an answer waits for.
function waiting({ reading, askedMs }) {
  const seconds = Math.floor((performance.now() - askedMs) / 1000);
  if (!reading) return `waiting for the model${seconds ? `: ${seconds} s` : ""}`;
  const { total, processed, left } = reading;
  const rest = left > 500 ? `, ${Math.round(left / 1000)} s left` : "";
  return `reading the prompt: ${processed} of ${total} tokens${rest}`;
}

// A message as a node. `actions` has onEdit(text), onRegenerate() and onChoose(index).
export function messageNode(message, actions) {
  const isUser = message.role === "user";
  const node = element("article", `message ${message.role}`);
  node.tabIndex = -1;
  node.setAttribute("aria-label", isUser ? "You" : "Answer");
  if (isUser) {
    node.append(...(message.files ?? []).map(fileNode));
    if (message.found?.note) node.append(element("p", "note", message.found.note));
    const text = element("div", "text", message.content);
    text.hidden = !message.content;
    const edits = button("Edit", () => edit(node, message, actions.onEdit));
    node.append(text, element("div", "tools", copyButton(() => message.content), edits));
    return node;
  }
  const several = message.answers.length > 1;
  const answers = element("div", several ? "answers several" : "answers");
  message.answers.forEach((answer, i) => answers.append(answerNode(answer, i, message, actions)));
  const again = button("Regenerate", actions.onRegenerate);
  again.className = "regenerate";
  node.append(element("p", "who", chosenOf(message).meta.model ?? "Model"), answers);
  (several ? node.appendChild(element("div", "tools")) : answers.querySelector(".tools")).append(again);
  show(node, message, false);
  return node;
}

const copyButton = (text) => button("Copy", ({ currentTarget }) => void copy(text(), currentTarget));

function fileNode(file) {
  const { name, text, note, thumbnail } = file;
  if (thumbnail) {
    const small = file.picture ? "" : "; the page was opened again: the small copy is sent";
    return element("figure", "picture", thumbnailNode(file), element("figcaption", "", `${name} (${note}${small})`));
  }
  const content = element("pre", "", text);
  content.tabIndex = 0;
  return element("details", "file", element("summary", "", note ? `${name} (${note})` : name), content);
}

function answerNode(answer, index, message, { onChoose }) {
  const node = element("section", "answer");
  if (message.answers.length > 1) node.setAttribute("aria-label", `Answer ${index + 1} of ${message.answers.length}`);
  const thoughts = element("details", "thinking", element("summary", "", "Thinking"), element("div", "thoughts"));
  const why = element("details", "why", element("summary", "", "Why this speed"), element("p"), element("figure"), element("ul"));
  const tools = element("div", "tools", element("span", "note"), copyButton(() => answer.content));
  if (message.answers.length > 1) {
    const choose = button("Go on with this one", () => onChoose(index));
    choose.className = "choose";
    tools.append(choose);
  }
  const error = element("p", "error");
  node.append(thoughts, element("div", "text"), element("div", "tool-calls"), error, tools, why);
  return node;
}

// Show what the answers of a message say by now.
export function show(node, message, isRunning) {
  node.querySelector(".regenerate").hidden = isRunning;
  const sections = node.querySelectorAll(".answer");
  message.answers.forEach((answer, i) => showAnswer(sections[i], answer, isRunning, i === message.chosen));
}

function callNode({ name, arguments: given, result, failed, note }) {
  const state = result === undefined ? "waits" : failed ? "failed" : "answered";
  const parts = [element("pre", "", visible(given)), element("pre", "", result ?? ""), element("p", "", note ?? "")];
  return element("details", "tool-call", element("summary", "", `Tool ${name}: ${state}`), ...parts);
}

function showAnswer(node, { content, reasoning, calls = [], meta, error }, isRunning, isChosen) {
  const part = (selector) => node.querySelector(selector);
  node.classList.toggle("chosen", isChosen);
  const choose = part(".choose");
  if (choose) {
    choose.hidden = isRunning;
    choose.setAttribute("aria-pressed", String(isChosen));
  }
  part(".thinking").hidden = !reasoning;
  part(".thinking summary").textContent = isRunning && !content ? "Thinking …" : "Thoughts";
  if (reasoning) patch(part(".thoughts"), render(reasoning));
  patch(part(".text"), render(content));
  patch(part(".tool-calls"), element("div", "", ...calls.map(callNode)));
  part(".error").textContent = error ?? "";
  part(".note").textContent = isRunning && meta.predicted_n === undefined ? waiting(meta) : summary(meta);
  part(".why").hidden = !meta.predicted_n;
  part(".why p").textContent = whatDraftingDid(meta);
  part(".why figure").replaceChildren(...graph(meta));
  part(".why ul").replaceChildren(...(meta.explanation ?? []).map((line) => element("li", "", line)));
}

function edit(node, message, onEdit) {
  const box = element("textarea");
  box.value = message.content;
  box.rows = Math.min(12, message.content.split("\n").length + 1);
  box.setAttribute("aria-label", "Edit the message");
  const hide = (value) => {
    node.querySelector(".text").hidden = value || !message.content;
    node.querySelector(".tools").hidden = value;
  };
  const close = () => {
    box.remove();
    row.remove();
    hide(false);
    node.querySelector(".tools button:last-child").focus();
  };
  const row = element("div", "edit-tools", button("Send again", () => onEdit(box.value)), button("Cancel", close));
  box.addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    event.stopPropagation();
    close();
  });
  hide(true);
  node.append(box, row);
  box.focus();
}
