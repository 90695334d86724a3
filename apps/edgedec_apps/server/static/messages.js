// One message of a conversation as DOM nodes.

import { render } from "/static/markdown.js";

function element(name, className, ...children) {
  const node = document.createElement(name);
  if (className) node.className = className;
  node.append(...children);
  return node;
}

function button(label, action) {
  const node = element("button", "", label);
  node.type = "button";
  node.addEventListener("click", action);
  return node;
}

// What an answer tells of itself, in a line.
export function summary(meta) {
  if (!meta || meta.predicted_n === undefined) return meta?.reason === "stopped" ? "stopped" : "";
  const parts = [`${meta.predicted_n} tokens`];
  if (meta.speed) parts.push(`${meta.speed.toFixed(1)} tokens/s`);
  parts.push(meta.draft_n ? `drafted ${meta.draft_n}, accepted ${meta.draft_n_accepted}` : "nothing drafted");
  if (meta.cache_n) parts.push(`${meta.cache_n} tokens of the prompt reused`);
  if (meta.reason === "length") parts.push("cut off at the limit");
  if (meta.reason === "stopped") parts.push("stopped");
  return parts.join(" · ");
}

export function messageNode(message, { onEdit, onRegenerate, isLast }) {
  const who = message.role === "user" ? "You" : "Model";
  const text = element("div", "text");
  const note = element("span", "note");
  const tools = element("div", "tools", note);
  const node = element("article", `message ${message.role}`, element("p", "who", who), text, tools);
  node.setAttribute("aria-label", who);
  show(node, message);
  tools.append(button("Copy", () => navigator.clipboard?.writeText(message.content)));
  if (message.role === "user") tools.append(button("Edit", () => edit(node, message, onEdit)));
  if (message.role === "assistant" && isLast) tools.append(button("Regenerate", onRegenerate));
  return node;
}

// Show what a message says by now.
export function show(node, message) {
  const text = node.querySelector(".text");
  if (message.role === "user") text.textContent = message.content;
  else text.replaceChildren(render(message.content));
  node.querySelector(".note").textContent = message.role === "user" ? "" : summary(message.meta);
  node.querySelector("details")?.remove();
  node.querySelector(".error")?.remove();
  if (message.error) node.append(element("p", "error", message.error));
  const lines = message.meta?.explanation ?? [];
  if (lines.length) {
    const list = element("ul", "", ...lines.map((line) => element("li", "", line)));
    node.append(element("details", "", element("summary", "", "About this answer"), list));
  }
}

function edit(node, message, onEdit) {
  const box = element("textarea");
  box.value = message.content;
  box.rows = Math.min(12, message.content.split("\n").length + 1);
  box.setAttribute("aria-label", "Edit the message");
  const row = element(
    "div",
    "tools",
    button("Send again", () => onEdit(box.value)),
    button("Cancel", () => {
      box.remove();
      row.remove();
      node.querySelector(".text").hidden = false;
      node.querySelector(".tools").hidden = false;
    }),
  );
  node.querySelector(".text").hidden = true;
  node.querySelector(".tools").hidden = true;
  node.append(box, row);
  box.focus();
}
