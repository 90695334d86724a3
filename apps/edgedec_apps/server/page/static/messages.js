// One message of a conversation as DOM nodes: what was asked with its files, or answers side by side.

import { chosenOf } from "/static/conversation.js";
import { button, copy, element, patch, thumbnailNode } from "/static/dom.js";
import { graph, whatDraftingDid } from "/static/drafting.js";
import { render } from "/static/markdown.js";
import { visible } from "/static/tools.js";

// What an answer tells of itself, in a line.
export function summary(meta) {
  if (meta?.predicted_n === undefined) return meta?.reason === "stopped" ? "stopped" : "";
  const parts = [`${meta.predicted_n} tokens`];
  if (meta.speed) parts.push(`${meta.speed.toFixed(1)} tokens/s`);
  parts.push(meta.draft_n ? `drafted ${meta.draft_n}, accepted ${meta.draft_n_accepted}` : "nothing drafted");
  if (meta.cache_n) parts.push(`${meta.cache_n} tokens of the prompt reused`);
  if (meta.reason === "length") parts.push("cut off at the limit");
  if (meta.reason === "stopped") parts.push("stopped");
  return parts.join(" · ");
}

// What an answer waits for.
function waiting({ reading }) {
  if (!reading) return "waiting for the model";
  const { total, processed, left } = reading;
  const rest = left > 500 ? `, ${Math.round(left / 1000)} s left` : "";
  return `reading the prompt: ${processed} of ${total} tokens${rest}`;
}

// A message as a node. `actions` has onEdit(text), onRegenerate() and onChoose(index).
export function messageNode(message, actions) {
  const isUser = message.role === "user";
  const who = isUser ? "You" : chosenOf(message).meta.model ?? "Model";
  const node = element("article", `message ${message.role}`, element("p", "who", who));
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
  node.append(answers, element("div", "tools", again));
  show(node, message, false);
  return node;
}

function copyButton(text) {
  const node = button("Copy", () => void copy(text(), node));
  return node;
}

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
  const about = element("details", "about", element("summary", "", "About this answer"), element("ul"));
  const tools = element("div", "tools", element("span", "note"), copyButton(() => answer.content));
  if (message.answers.length > 1) {
    const choose = button("Go on with this one", () => onChoose(index));
    choose.className = "choose";
    tools.append(choose);
  }
  const error = element("p", "error");
  const chart = element("details", "chart", element("summary", "", "Speed and acceptance"), element("div"));
  node.append(thoughts, element("div", "text"), element("div", "tool-calls"), error, element("figure", "drafting", element("figcaption"), chart), tools, about);
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
  const drawn = graph(meta);
  part(".drafting").hidden = !meta.predicted_n;
  part(".chart").hidden = !drawn;
  part(".chart div").replaceChildren(...(drawn ? [drawn] : []));
  part("figcaption").textContent = whatDraftingDid(meta);
  const lines = meta.explanation ?? [];
  part(".about").hidden = !lines.length;
  part(".about ul").replaceChildren(...lines.map((line) => element("li", "", line)));
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
