// The server's interface, as far as the page uses it.

const CUT = "The connection ended early.";

function headers(settings, type = "application/json") {
  const base = { "content-type": type };
  return settings.key ? { ...base, authorization: `Bearer ${settings.key}` } : base;
}

async function failure(response) {
  let message = `${response.status} ${response.statusText}`;
  try {
    const { error } = await response.json();
    message = (typeof error === "string" ? error : error.message) ?? message;
  } catch {
    // no JSON: the status has to do
  }
  const wait = response.headers.get("retry-after");
  return new Error(wait && response.status === 429 ? `${message} (in about ${wait} s)` : message);
}

async function post(path, body, settings, signal, type) {
  const response = await fetch(path, { method: "POST", headers: headers(settings, type), body, signal });
  if (!response.ok) throw await failure(response);
  return response;
}

async function get(path, settings, signal) {
  const response = await fetch(path, { headers: headers(settings), cache: "no-store", signal });
  if (!response.ok) throw await failure(response);
  return response.json();
}

// The parts of a response, each of which ends with the separator, as they come.
async function* pieces(response, separator) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const whole = (rest + value).split(separator);
    rest = whole.pop();
    yield* whole;
  }
}

export async function isReady() {
  const response = await fetch("/health", { cache: "no-store" });
  if (response.ok) return { ready: true, message: "" };
  const body = await response.json();
  return { ready: false, message: body.error.message, failed: body.error.code === "model_failed" };
}

// The cards of all models, loaded or not; those of the command line first.
export const modelCards = async (settings) => (await get("/v1/models", settings)).data;

// The models of the catalogue: {name, note, n_bytes, n_there}.
export const offeredModels = async (settings) => (await get("/page/models", settings)).models;

// Fetch a model; a request that is aborted ends that, and the next one goes on. Calls onPart({status, total, completed}).
export async function fetchModel(model, settings, signal, onPart) {
  const response = await post("/api/pull", JSON.stringify({ model }), settings, signal);
  for await (const line of pieces(response, "\n")) {
    const part = JSON.parse(line);
    if (part.error) throw new Error(part.error);
    if (part.status === "success") return;
    onPart(part);
  }
  throw new Error(CUT);
}

// Load a model; a request that is aborted ends the load.
export async function loadModel(model, settings, signal) {
  await (await post("/api/generate", JSON.stringify({ model, stream: false }), settings, signal)).json();
}

// The text of a PDF: {text, n_pages, cut}.
export async function pdfText(file, settings) {
  return (await post("/page/pdf", file, settings, undefined, "application/pdf")).json();
}

// What is to be read of files, {name, text}, for a question behind earlier messages: {content, note}; both are null where
// the files fit the context.
export async function passages(messages, files, question, settings, signal) {
  const { model, messages: before } = request(messages, settings, 1, []);
  const body = JSON.stringify({ model, messages: before, files, question });
  return (await post("/page/passages", body, settings, signal)).json();
}

// The tools that the server has for this page: {definition, server, ask}.
export const listTools = async (settings, signal) => (await get("/page/tools", settings, signal)).tools;

// Run a tool: {text, failed, note}.
export async function callTool(name, given, settings, signal) {
  return (await post("/page/tools", JSON.stringify({ name, arguments: given }), settings, signal)).json();
}

const LIVE = { stream: true, stream_options: { include_usage: true }, timings_per_token: true, return_progress: true };

function request(messages, settings, count, tools, check) {
  const system = settings.system?.trim();
  const body = {
    model: settings.model,
    messages: [...(system ? [{ role: "system", content: system }] : []), ...messages],
    ...(check ? { refine: { check, n: 4 } } : LIVE), // what is checked comes whole
    reuse: "longest", // as edgedec chat does: a next turn evaluates what is new
    speculative: { draft: settings.draft },
  };
  if (count > 1) body.n = count;
  else if (tools.length) body.tools = tools; // of several answers none could go on
  if (settings.reasoning_effort && !check) body.reasoning_effort = settings.reasoning_effort;
  for (const name of ["temperature", "top_p", "max_tokens", "seed"]) {
    if (settings[name] !== undefined && settings[name] !== "") body[name] = Number(settings[name]);
  }
  return body;
}

// Ask for `count` answers, of a model that may call `tools`, or for one that the server refines by its `check`. Calls
// onPart({index, text, reasoning, calls, reason, timings, reading, edgedec}) for every part of an answer; throws what the
// server says went wrong.
export async function answer({ messages, settings, count, tools, check }, signal, onPart) {
  const body = JSON.stringify(request(messages, settings, count, tools, check));
  const response = await post("/v1/chat/completions", body, settings, signal);
  if (check) return onPart(wholePart(await response.json()));
  for await (const event of pieces(response, "\n\n")) {
    if (!event.startsWith("data: ")) continue; // a comment: the server is at work
    const data = event.slice(6);
    if (data === "[DONE]") return;
    const part = JSON.parse(data);
    if (part.error) throw new Error(part.error.message);
    const choice = part.choices[0];
    if (!choice) continue;
    onPart({
      index: choice.index,
      text: choice.delta?.content ?? "",
      reasoning: choice.delta?.reasoning_content ?? "",
      calls: (choice.delta?.tool_calls ?? []).map(({ id, function: { name, arguments: given } }) => ({ id, name, arguments: given })),
      reason: choice.finish_reason ?? null,
      timings: part.timings,
      reading: part.prompt_progress,
      edgedec: part.edgedec,
    });
  }
  throw new Error(CUT);
}

function wholePart({ choices: [{ index, message, finish_reason: reason }], timings, edgedec }) {
  return { index, text: message.content ?? "", reasoning: message.reasoning_content ?? "", calls: [], reason, timings, edgedec };
}
