// What stays in this browser: conversations and settings; the API key only until the tab is closed.

import { upgraded } from "/static/conversation.js";

const CONVERSATIONS = "edgedec.conversations";
const SETTINGS = "edgedec.settings";
const KEY = "edgedec.key";

function read(storage, name, fallback) {
  try {
    return JSON.parse(storage.getItem(name)) ?? fallback;
  } catch {
    return fallback;
  }
}

function write(storage, name, value) {
  try {
    storage.setItem(name, JSON.stringify(value));
    return true;
  } catch {
    return false; // full, or forbidden: the page works on without it
  }
}

export function loadConversations() {
  const found = read(localStorage, CONVERSATIONS, []);
  const whole = Array.isArray(found) ? found.filter((each) => each && Array.isArray(each.messages)) : [];
  return whole.map((each) => ({ ...each, messages: each.messages.map(upgraded) }));
}

// Of a picture, the small copy is kept.
export function saveConversations(conversations) {
  const without = ({ picture, ...file }) => file;
  const small = (message) => (message.files ? { ...message, files: message.files.map(without) } : message);
  return write(localStorage, CONVERSATIONS, conversations.map((each) => ({ ...each, messages: each.messages.map(small) })));
}

export function loadSettings() {
  return { system: "", draft: "auto", theme: "", count: "1", ...read(localStorage, SETTINGS, {}), key: read(sessionStorage, KEY, "") };
}

export function saveSettings({ key, ...settings }) {
  write(localStorage, SETTINGS, settings);
  write(sessionStorage, KEY, key);
}
