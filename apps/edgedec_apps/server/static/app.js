// The web chat: conversations on the left, the one at hand in the middle, an answer that comes as it is made.

import { answer, isReady, modelCard } from "/static/api.js";
import { messageNode, show } from "/static/messages.js";
import { loadConversations, loadSettings, newConversation, saveConversations, saveSettings, titleOf } from "/static/store.js";

const find = (id) => document.getElementById(id);
const [log, prompt, send, stop, state, announce] = ["log", "prompt", "send", "stop", "state", "announce"].map(find);
const settingsDialog = find("settings");

let settings = loadSettings();
let conversations = loadConversations();
let current = conversations[0] ?? newConversation();
let running = null; // {controller, conversation} of the answer that comes

function save() {
  const kept = conversations.filter((each) => each.messages.length);
  if (!saveConversations(kept)) state.textContent = "This browser has no room for more conversations.";
}

function drawConversations() {
  const list = find("conversations");
  list.replaceChildren();
  for (const conversation of conversations) {
    const title = document.createElement("button");
    title.type = "button";
    title.className = "title";
    title.textContent = titleOf(conversation);
    title.setAttribute("aria-current", String(conversation === current));
    title.addEventListener("click", () => open(conversation));
    const remove = document.createElement("button");
    remove.type = "button";
    remove.textContent = "×";
    remove.setAttribute("aria-label", `Delete ${titleOf(conversation)}`);
    remove.addEventListener("click", () => removeConversation(conversation));
    const item = document.createElement("li");
    item.append(title, remove);
    list.append(item);
  }
}

function drawMessages() {
  log.replaceChildren();
  current.messages.forEach((message, i) => {
    log.append(
      messageNode(message, {
        isLast: i === current.messages.length - 1,
        onEdit: (text) => ask(text, i),
        onRegenerate: () => regenerate(),
      }),
    );
  });
  log.scrollTop = log.scrollHeight;
}

function draw() {
  drawConversations();
  drawMessages();
}

function open(conversation) {
  current = conversation;
  draw();
  prompt.focus();
}

function removeConversation(conversation) {
  if (running?.conversation === conversation) running.controller.abort();
  conversations = conversations.filter((each) => each !== conversation);
  if (current === conversation) current = conversations[0] ?? newConversation();
  save();
  draw();
  prompt.focus();
}

// Ask, in place of message `at` and what followed it where one is given.
function ask(text, at = current.messages.length) {
  if (!text.trim() || running) return;
  current.messages.splice(at);
  current.messages.push({ role: "user", content: text });
  if (!conversations.includes(current)) conversations.unshift(current);
  void generate(current);
}

function regenerate() {
  if (running || current.messages.at(-1)?.role !== "assistant") return;
  current.messages.pop();
  void generate(current);
}

function setRunning(value) {
  running = value;
  send.hidden = Boolean(value);
  stop.hidden = !value;
  log.setAttribute("aria-busy", String(Boolean(value)));
}

async function generate(conversation) {
  const controller = new AbortController();
  const sent = conversation.messages.map(({ role, content }) => ({ role, content }));
  const message = { role: "assistant", content: "", meta: {} };
  conversation.messages.push(message);
  setRunning({ controller, conversation });
  save();
  draw();
  let begun = 0;
  let due = false;
  const redraw = () => {
    due = false;
    if (conversation !== current || !log.lastElementChild) return;
    const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 80;
    show(log.lastElementChild, message);
    if (atEnd) log.scrollTop = log.scrollHeight;
  };
  const onPart = (part) => {
    message.content += part.text;
    if (part.timings) Object.assign(message.meta, part.timings);
    begun ||= part.text ? performance.now() : 0;
    const seconds = (performance.now() - begun) / 1000;
    if (part.timings?.predicted_per_second) message.meta.speed = part.timings.predicted_per_second;
    else if (begun && seconds > 0.3) message.meta.speed = (message.meta.predicted_n - 1) / seconds;
    if (part.reason) message.meta.reason = part.reason;
    const told = part.edgedec?.generations?.[0];
    if (told) message.meta.explanation = [...told.explanation, ...told.reasons, ...drafters(told), `seed ${told.seed}`];
    if (!due) {
      due = true;
      requestAnimationFrame(redraw);
    }
  };
  try {
    await answer(sent, settings, controller.signal, onPart);
  } catch (error) {
    if (error.name === "AbortError") message.meta.reason = "stopped";
    else message.error = error instanceof TypeError ? "The server can't be reached." : error.message;
  }
  setRunning(null);
  save();
  if (conversation === current) draw();
  else drawConversations();
  announce.textContent = message.error ? `Error: ${message.error}` : `Answer: ${message.content}`; // read out once, whole
  prompt.focus();
}

function drafters(told) {
  return Object.entries(told.drafters)
    .filter(([, counts]) => counts.nodes)
    .map(([name, counts]) => `${name}: ${counts.nodes} tokens proposed, ${counts.right} of ${counts.tried} judged were right`);
}

function applyTheme() {
  if (settings.theme) document.documentElement.dataset.theme = settings.theme;
  else delete document.documentElement.dataset.theme;
}

function openSettings() {
  for (const field of settingsDialog.querySelectorAll("[name]")) field.value = settings[field.name] ?? "";
  settingsDialog.showModal();
}

function closeSettings() {
  if (settingsDialog.returnValue !== "save") return;
  for (const field of settingsDialog.querySelectorAll("[name]")) settings[field.name] = field.value;
  saveSettings(settings);
  applyTheme();
  void connect();
}

let attempts = 0; // of connect, so that only the latest goes on asking

async function connect() {
  const mine = ++attempts;
  while (mine === attempts) {
    try {
      const { ready, message, failed } = await isReady();
      if (ready) {
        const card = await modelCard(settings);
        settings.model = card.id;
        find("model").textContent = card.id;
        document.title = `${card.id} · edgedec`;
        const context = card.ready ? `${card.meta.n_ctx} tokens of context` : "It is loaded when you write.";
        state.textContent = card.meta.chat ? context : "This model has no chat template.";
        return;
      }
      state.textContent = message;
      if (failed) return;
    } catch (error) {
      state.textContent = error instanceof TypeError ? "The server can't be reached." : error.message;
      if (!(error instanceof TypeError)) return;
    }
    await new Promise((resolve) => setTimeout(resolve, 1000));
  }
}

find("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  if (running || !prompt.value.trim()) return;
  const text = prompt.value;
  prompt.value = "";
  ask(text);
});
prompt.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    find("composer").requestSubmit();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && running && !settingsDialog.open) running.controller.abort();
});
stop.addEventListener("click", () => running?.controller.abort());
find("new").addEventListener("click", () => open(newConversation()));
find("open-settings").addEventListener("click", openSettings);
settingsDialog.addEventListener("close", closeSettings);
find("delete-all").addEventListener("click", () => {
  if (!confirm("Delete all conversations of this browser?")) return;
  running?.controller.abort();
  conversations = [];
  current = newConversation();
  save();
  draw();
  settingsDialog.close("");
});
find("toggle-side").addEventListener("click", (event) => {
  const narrow = document.body.classList.toggle("narrow");
  event.currentTarget.setAttribute("aria-expanded", String(!narrow));
});

if (matchMedia("(max-width: 44rem)").matches) {
  document.body.classList.add("narrow");
  find("toggle-side").setAttribute("aria-expanded", "false");
}
applyTheme();
draw();
void connect();
prompt.focus();
