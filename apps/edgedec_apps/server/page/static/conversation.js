// What a conversation is, and how it is sent and exported.
//
// A message of the user is {role, content, files: [{name, text, picture, thumbnail}], found}: the last two of a file are
// of a picture, and found, {content, note}, is what is read of files that are longer than the context. One of
// the assistant {role, answers, chosen}, whose answers, {content, reasoning, calls, meta, error}, stand side by side;
// the chosen one is what the conversation goes on with. A call of a tool is {id, name, arguments, result, failed, note};
// behind calls another answer follows.

import { sentUrl } from "/static/pictures.js";

const MOST_TITLE = 60;

export function newConversation() {
  return { id: crypto.randomUUID?.() ?? `${Date.now()}-${Math.random()}`, messages: [] };
}

export function newAnswer(model) {
  return { content: "", reasoning: "", calls: [], meta: { model } };
}

export function chosenOf(message) {
  return message.answers[message.chosen] ?? message.answers[0];
}

// A message as this version keeps it; earlier ones kept one answer as {content, meta, error}.
export function upgraded(message) {
  if (message.role !== "assistant" || Array.isArray(message.answers)) return message;
  const { content = "", meta = {}, error } = message;
  return { role: "assistant", answers: [{ content, reasoning: "", meta, ...(error && { error }) }], chosen: 0 };
}

// What the model is given of a message: pictures first, then files, each under its name, then what was typed.
export function contentOf(message) {
  if (message.role === "assistant") return chosenOf(message).content;
  const all = message.files ?? [];
  const files = all.filter(({ text }) => text).map(({ name, text }) => `File ${name}:\n\n${unpaged(text).trimEnd()}`);
  const text = message.found?.content ?? [...files, message.content].filter((part) => part).join("\n\n");
  const pictures = all.filter(sentUrl).map((file) => ({ type: "image_url", image_url: { url: sentUrl(file) } }));
  return pictures.length ? [...pictures, ...(text ? [{ type: "text", text }] : [])] : text;
}

// The text of a PDF, whose pages end in form feeds, as it is read whole.
function unpaged(text) {
  return text.includes("\f") ? text.split("\f").filter((page) => page).join("\n\n") : text;
}

// The messages of a chat. Passages that were found are left out once another file is searched: all would fill the context.
export function sentMessages(messages) {
  const last = messages.findLastIndex(({ found }) => found);
  return messages.flatMap((message, i) => {
    const isOld = message.found?.content && i < last;
    const sent = { role: message.role, content: isOld ? message.content : contentOf(message) };
    if (message.role !== "assistant") return [sent];
    const { reasoning, calls = [] } = chosenOf(message);
    if (reasoning) sent.reasoning_content = reasoning;
    if (calls.length) {
      sent.tool_calls = calls.map(({ id, name, arguments: given }) => ({ id, type: "function", function: { name, arguments: given } }));
    }
    return [sent, ...calls.map(({ id, name, result = "Not run." }) => ({ role: "tool", tool_call_id: id, name, content: result }))];
  });
}

export function titleOf(conversation) {
  const first = conversation.messages.find((message) => message.role === "user");
  const words = first?.content.trim() || first?.files?.map(({ name }) => name).join(", ");
  return words ? words.slice(0, MOST_TITLE) : "New conversation";
}

// A fence that no line of the text can close.
function fence(text) {
  const longest = Math.max(2, ...[...text.matchAll(/`+/g)].map(([ticks]) => ticks.length));
  return "`".repeat(longest + 1);
}

function fileAsMarkdown({ name, text, note, thumbnail }) {
  if (thumbnail) return `Picture ${name} (${note})`;
  return `File ${name}:\n\n${fence(text)}\n${text.trimEnd()}\n${fence(text)}`;
}

function answerAsMarkdown(answer, heading) {
  const thoughts = answer.reasoning.trim();
  const quoted = thoughts ? `> ${thoughts.replaceAll("\n", "\n> ")}\n\n` : "";
  const calls = (answer.calls ?? []).map(({ name, arguments: given, result = "Not run." }) => {
    const text = `${given}\n\n${result}`;
    return `\n\nTool ${name}:\n\n${fence(text)}\n${text}\n${fence(text)}`;
  });
  return `## ${heading}\n\n${quoted}${answer.content.trim()}${calls.join("")}\n`;
}

export function asMarkdown(conversation) {
  const parts = [`# ${titleOf(conversation).replaceAll("\n", " ")}\n`];
  for (const message of conversation.messages) {
    if (message.role === "user") {
      const files = (message.files ?? []).map(fileAsMarkdown);
      parts.push(`## You\n\n${[...files, message.content.trim()].join("\n\n")}\n`);
    } else {
      const several = message.answers.length > 1;
      message.answers.forEach((answer, i) => {
        const which = several ? `, answer ${i + 1} of ${message.answers.length}${i === message.chosen ? ", chosen" : ""}` : "";
        parts.push(answerAsMarkdown(answer, `${answer.meta.model ?? "Model"}${which}`));
      });
    }
  }
  return parts.join("\n");
}

export function asJson(conversation) {
  const { id, messages } = conversation;
  return `${JSON.stringify({ format: "edgedec chat 1", title: titleOf(conversation), id, messages }, null, 2)}\n`;
}

// Let the browser save a text as a file.
export function download(text, name, type) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

export function fileName(conversation, ending) {
  const words = titleOf(conversation).toLowerCase().replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-+|-+$/g, "");
  return `${words || "conversation"}.${ending}`;
}
