// What stays in this browser: conversations and settings; the API key only until the tab is closed.

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
  return Array.isArray(found) ? found.filter((each) => each && Array.isArray(each.messages)) : [];
}

export function saveConversations(conversations) {
  return write(localStorage, CONVERSATIONS, conversations);
}

export function loadSettings() {
  return { system: "", draft: "auto", theme: "", ...read(localStorage, SETTINGS, {}), key: read(sessionStorage, KEY, "") };
}

export function saveSettings({ key, ...settings }) {
  write(localStorage, SETTINGS, settings);
  write(sessionStorage, KEY, key);
}

export function newConversation() {
  return { id: crypto.randomUUID?.() ?? `${Date.now()}-${Math.random()}`, messages: [] };
}

export function titleOf(conversation) {
  const first = conversation.messages.find((message) => message.role === "user");
  return first ? first.content.slice(0, 60) : "New conversation";
}
