// The web chat: conversations on the left, the one at hand in the middle, answers that come as they are made.

import { answer, passages } from "/static/api.js";
import { Attachments } from "/static/attachments.js";
import * as conversing from "/static/conversation.js";
import { button, copy, element, find } from "/static/dom.js";
import { sample } from "/static/drafting.js";
import { bindKeys, stepMessages } from "/static/keys.js";
import { messageNode, show } from "/static/messages.js";
import { Models, problem, tell } from "/static/models.js";
import { Start } from "/static/start.js";
import { MOST_ROUNDS, Tools } from "/static/tools.js";
import { loadConversations, loadSettings, saveConversations, saveSettings } from "/static/store.js";

const { newAnswer, newConversation, titleOf } = conversing;
const [log, prompt, send, stop, announce] = ["log", "prompt", "send", "stop", "announce"].map(find);
const [settingsDialog, keysDialog, exportMenu] = ["settings", "keys", "export-menu"].map(find);

const LEAST_SEARCHED = 2000; // characters of files; what is shorter is always sent whole
const small = matchMedia("(max-width: 44rem)");
const touch = matchMedia("(pointer: coarse)");

let settings = loadSettings();
let conversations = loadConversations();
let current = conversations[0] ?? newConversation();
let running = null; // {controller, conversation} of the answers that come

const attachments = new Attachments(() => settings);
const tools = new Tools(() => settings);
const models = new Models(() => settings, {
  onPick: (name) => {
    settings.model = name;
    saveSettings(settings);
    start.draw();
  },
  onMore: () => open(newConversation()),
  onChange: () => start.refresh(),
});
const start = new Start(() => settings, models, (text) => ask(text, [], 0, { temperature: 0 }));

const write = () => touch.matches || prompt.focus(); // a keyboard on the screen would cover what is to be read

function save() {
  const kept = saveConversations(conversations.filter((each) => each.messages.length));
  if (!kept) tell("This browser has no room for more conversations.");
  return kept;
}

function drawConversations() {
  const list = find("conversations");
  list.replaceChildren();
  for (const conversation of conversations) {
    const title = button(titleOf(conversation), () => open(conversation));
    title.className = "title";
    title.setAttribute("aria-current", String(conversation === current));
    const remove = button("×", () => removeConversation(conversation));
    remove.setAttribute("aria-label", `Delete ${titleOf(conversation)}`);
    list.append(element("li", "", title, remove));
  }
}

function scrollToEnd() {
  log.scrollTo({ top: log.scrollHeight, behavior: "instant" }); // on the way there it would not be at the end
}

function drawMessages() {
  const last = current.messages.length - 1;
  log.replaceChildren(
    ...current.messages.map((message, i) => {
      const node = messageNode(message, {
        onEdit: (text) => ask(text, message.files, i),
        onRegenerate: () => regenerate(),
        onChoose: (index) => choose(message, index),
      });
      if (message.role === "assistant" && i !== last) node.querySelector(".regenerate").remove();
      return node;
    }),
  );
  log.hidden = find("export").hidden = !current.messages.length;
  find("start").hidden = !log.hidden;
  scrollToEnd();
}

function draw() {
  drawConversations();
  drawMessages();
}

function open(conversation) {
  current = conversation;
  if (small.matches) showSide(false); // it covers the conversation
  draw();
  write();
}

function removeConversation(conversation) {
  if (running?.conversation === conversation) running.controller.abort();
  conversations = conversations.filter((each) => each !== conversation);
  if (current === conversation) current = conversations[0] ?? newConversation();
  save();
  draw();
  write();
}

// Ask, in place of message `at` and what followed it where one is given; `how` are settings of this message alone.
function ask(text, files = [], at = current.messages.length, how = undefined) {
  if (!(text.trim() || files.length) || running) return;
  current.messages.splice(at);
  current.messages.push({ role: "user", content: text, ...(files.length && { files }), ...(how && { how }) });
  if (!conversations.includes(current)) conversations.unshift(current);
  void generate(current);
}

function regenerate() {
  if (running || current.messages.at(-1)?.role !== "assistant") return;
  while (current.messages.at(-1)?.role === "assistant") current.messages.pop(); // calls of tools, and what followed them
  void generate(current);
}

function choose(message, index) {
  message.chosen = index;
  save();
  drawMessages();
  log.querySelectorAll(".message")[current.messages.indexOf(message)]?.querySelectorAll(".choose")[index]?.focus();
}

function setRunning(value) {
  running = value;
  send.hidden = Boolean(value);
  stop.hidden = !value;
  log.setAttribute("aria-busy", String(Boolean(value)));
}

// Add a part of an answer to it.
function take(answer, part) {
  const { meta } = answer;
  const now = performance.now();
  answer.content += part.text;
  answer.reasoning += part.reasoning;
  answer.calls.push(...part.calls);
  if (part.reading) meta.reading = { ...part.reading, left: part.edgedec?.prompt_left_ms };
  if (part.timings) Object.assign(meta, part.timings);
  if (meta.predicted_n) sample(meta, now, Boolean(part.reason));
  const seconds = (now - meta.begunMs) / 1000;
  if (part.timings?.predicted_per_second) meta.speed = part.timings.predicted_per_second;
  else if (seconds > 0.3) meta.speed = (meta.predicted_n - 1) / seconds;
  if (part.reason) meta.reason = part.reason;
  const told = part.edgedec?.generations?.[0];
  if (!told) return;
  const reused = meta.cache_n ? [`${meta.cache_n} tokens of the prompt were read before`] : [];
  meta.gain = told.speedup;
  meta.explanation = [...told.explanation, ...told.reasons, ...drafters(told), ...reused, `seed ${told.seed}`];
  meta.isOff = settings.draft === "off";
}

// Answer the last message of the user; where the model calls tools, it goes on with what they answered.
async function generate(conversation) {
  const controller = new AbortController();
  setRunning({ controller, conversation });
  let answers = [];
  for (let round = 0; round < MOST_ROUNDS; round++) {
    answers = await generateOne(conversation, controller.signal);
    const [{ calls, meta, error }] = answers;
    if (answers.length > 1 || !calls.length || error || meta.reason !== "tool_calls") break;
    await tools.run(calls, controller.signal, () => redraw(conversation));
    save();
    if (controller.signal.aborted) break;
  }
  setRunning(null);
  redraw(conversation);
  drawConversations();
  announce.textContent = spoken(answers); // read out once, whole
  write();
  if (save()) await models.after(); // else it would take away what save says
}

// Show what the last message says by now.
function redraw(conversation) {
  if (conversation !== current || log.lastElementChild === null) return;
  const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 80;
  show(log.lastElementChild, conversation.messages.at(-1), running !== null);
  if (atEnd) scrollToEnd();
}

async function generateOne(conversation, signal) {
  const earlier = [...conversation.messages];
  const check = find("check").value;
  const count = check ? 1 : Number(settings.count || 1);
  const answers = Array.from({ length: count }, () => newAnswer(settings.model));
  conversation.messages.push({ role: "assistant", answers, chosen: 0 });
  save();
  draw();
  let due = false;
  const onFrame = () => {
    due = false;
    redraw(conversation);
  };
  for (const { meta } of answers) meta.askedMs = performance.now();
  const clock = setInterval(onFrame, 1000);
  onFrame();
  try {
    await search(earlier, signal);
    redraw(conversation);
    const messages = conversing.sentMessages(earlier);
    const offered = check ? [] : await tools.definitions(models.card, signal); // a checked answer calls none
    const wanted = { messages, settings: { ...settings, ...earlier.at(-1).how }, count, check, tools: offered };
    await answer(wanted, signal, (part) => {
      take(answers[part.index], part);
      if (!due) requestAnimationFrame(onFrame);
      due = true;
    });
  } catch (error) {
    for (const each of answers.filter(({ meta }) => !meta.reason)) {
      if (error.name === "AbortError") each.meta.reason = "stopped";
      else each.error = problem(error);
    }
  }
  clearInterval(clock);
  for (const { meta } of answers) for (const name of ["askedMs", "begunMs", "reading"]) delete meta[name]; // times of this page's clock
  return answers;
}

// Note what is to be read of the files of the last message where they are longer than the context.
async function search(messages, signal) {
  const last = messages.at(-1);
  const files = (last.files ?? []).filter(({ text }) => text).map(({ name, text }) => ({ name, text }));
  if (last.found || files.reduce((sum, { text }) => sum + text.length, 0) < LEAST_SEARCHED) return;
  const before = conversing.sentMessages([...messages.slice(0, -1), { ...last, found: {} }]).slice(0, -1);
  last.found = await passages(before, files, last.content, settings, signal);
  drawMessages();
}

function spoken(answers) {
  return answers
    .map(({ content, error }, i) => (error ? `Error: ${error}` : `Answer${answers.length > 1 ? ` ${i + 1}` : ""}: ${content}`))
    .join("\n");
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

function showSide(value) {
  document.body.classList.toggle("narrow", !value);
  find("toggle-side").setAttribute("aria-expanded", String(value));
}

function openSettings() {
  for (const field of settingsDialog.querySelectorAll("[name]")) field.value = settings[field.name] ?? "";
  settingsDialog.returnValue = "";
  settingsDialog.showModal();
}

function closeSettings() {
  if (settingsDialog.returnValue !== "save") return;
  for (const field of settingsDialog.querySelectorAll("[name]")) settings[field.name] = field.value;
  saveSettings(settings);
  applyTheme();
  void models.connect();
}

function saveAs(ending, type, text) {
  exportMenu.hidePopover();
  conversing.download(text, conversing.fileName(current, ending), type);
}

const pressLast = (selector) => [...log.querySelectorAll(selector)].at(-1)?.click();

find("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  if (running || !(prompt.value.trim() || attachments.files.length)) return;
  if (attachments.reading) return tell("A file is still being read; send the message when it is there.");
  const text = prompt.value;
  prompt.value = "";
  ask(text, attachments.take());
});
prompt.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing && !touch.matches) {
    event.preventDefault();
    find("composer").requestSubmit();
  } else if (event.key === "ArrowUp" && !prompt.value && !running) {
    event.preventDefault();
    pressLast(".message.user .tools button:last-child");
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !document.querySelector("dialog[open], :popover-open")) running?.controller.abort();
});
log.addEventListener("click", (event) => {
  const pressed = event.target.closest?.(".copy-code");
  if (pressed) void copy(pressed.closest(".code").querySelector("code").textContent, pressed);
});
stop.addEventListener("click", () => running?.controller.abort());
find("new").addEventListener("click", () => open(newConversation()));
find("open-settings").addEventListener("click", openSettings);
find("open-keys").addEventListener("click", () => keysDialog.showModal());
settingsDialog.addEventListener("close", closeSettings);
for (const dialog of [settingsDialog, keysDialog, find("tool")]) {
  dialog.addEventListener("close", () => {
    if (document.activeElement !== prompt) return;
    prompt.blur(); // Chromium gives the focus back without a caret where a dialog was closed by the mouse
    prompt.focus();
  });
}
find("export-markdown").addEventListener("click", () => saveAs("md", "text/markdown", conversing.asMarkdown(current)));
find("export-json").addEventListener("click", () => saveAs("json", "application/json", conversing.asJson(current)));
find("delete-all").addEventListener("click", () => {
  if (!confirm("Delete all conversations of this browser?")) return;
  running?.controller.abort();
  conversations = [];
  current = newConversation();
  save();
  draw();
  settingsDialog.close("");
});
find("toggle-side").addEventListener("click", () => showSide(document.body.classList.contains("narrow")));
find("close-side").addEventListener("click", () => {
  showSide(false);
  find("toggle-side").focus();
});
bindKeys([
  ["N", "New conversation", () => open(newConversation())],
  ["M", "Choose the model", () => find("model").focus()],
  ["P", "Write a message", () => prompt.focus()],
  ["U", "Attach files", () => find("attach").click()],
  ["K", "The message before", () => stepMessages(log, -1)],
  ["J", "The message after", () => stepMessages(log, 1)],
  ["C", "Copy the last block of code", () => pressLast(".copy-code")],
  ["X", "Export the conversation", () => current.messages.length && (exportMenu.showPopover(), find("export-markdown").focus())],
  ["S", "Settings", openSettings],
  ["H", "These keys", () => keysDialog.showModal()],
]);

small.addEventListener("change", () => showSide(!small.matches));
showSide(!small.matches);
applyTheme();
draw();
void models.connect();
write();
