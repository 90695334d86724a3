// Keys: what each does, and the dialog that lists them.

import { element, find } from "/static/dom.js";

const FIXED = [
  ["Enter", "Send the message"],
  ["Shift+Enter", "Begin a line"],
  ["Arrow up", "Edit the last message, where the message box is empty"],
  ["Escape", "Stop the answer, or close what is open"],
];

// `keys` are [letter, what it does, action]; each is pressed with Alt, and does nothing while a dialog is open.
export function bindKeys(keys) {
  const list = find("key-list");
  for (const [key, what] of [...keys.map(([letter, what]) => [`Alt+${letter}`, what]), ...FIXED]) {
    list.append(element("dt", "", element("kbd", "", key)), element("dd", "", what));
  }
  document.addEventListener("keydown", (event) => {
    if (!event.altKey || event.ctrlKey || event.metaKey || document.querySelector("dialog[open]")) return;
    const found = keys.find(([letter]) => event.code === `Key${letter}`); // not event.key: with Alt a Mac makes signs
    if (!found) return;
    event.preventDefault();
    found[2]();
  });
}

// Focus the message before (-1) or after (1) the one that has the focus; from elsewhere the last.
export function stepMessages(log, by) {
  const messages = [...log.querySelectorAll(".message")];
  const at = messages.indexOf(document.activeElement.closest?.(".message"));
  (at < 0 ? messages.at(-1) : messages[at + by])?.focus();
}
