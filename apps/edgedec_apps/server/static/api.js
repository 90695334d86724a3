// The server's interface, as far as the page uses it.

function headers(settings) {
  const base = { "content-type": "application/json" };
  return settings.key ? { ...base, authorization: `Bearer ${settings.key}` } : base;
}

async function failure(response) {
  let message = `${response.status} ${response.statusText}`;
  try {
    message = (await response.json()).error.message ?? message;
  } catch {
    // no JSON: the status has to do
  }
  const wait = response.headers.get("retry-after");
  return new Error(wait && response.status === 429 ? `${message} (in about ${wait} s)` : message);
}

export async function isReady() {
  const response = await fetch("/health", { cache: "no-store" });
  if (response.ok) return { ready: true, message: "" };
  const body = await response.json();
  return { ready: false, message: body.error.message, failed: body.error.code === "model_failed" };
}

export async function modelCard(settings) {
  const response = await fetch("/v1/models", { headers: headers(settings) });
  if (!response.ok) throw await failure(response);
  const [card] = (await response.json()).data;
  if (!card) throw new Error("No model is on this machine yet: edgedec pull NAME fetches one.");
  return card;
}

function request(messages, settings) {
  const system = settings.system?.trim();
  const body = {
    model: settings.model,
    messages: [...(system ? [{ role: "system", content: system }] : []), ...messages],
    stream: true,
    stream_options: { include_usage: true },
    timings_per_token: true,
    reuse: "longest", // as edgedec chat does: a next turn evaluates what is new
    speculative: { draft: settings.draft },
  };
  for (const name of ["temperature", "top_p", "max_tokens", "seed"]) {
    if (settings[name] !== undefined && settings[name] !== "") body[name] = Number(settings[name]);
  }
  return body;
}

// Calls onPart({text, timings, edgedec, reason}) for every part of the answer; throws what the server says went wrong.
export async function answer(messages, settings, signal, onPart) {
  const response = await fetch("/v1/chat/completions", {
    method: "POST",
    headers: headers(settings),
    body: JSON.stringify(request(messages, settings)),
    signal,
  });
  if (!response.ok) throw await failure(response);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const events = (held + value).split("\n\n");
    held = events.pop();
    for (const event of events) {
      const data = event.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const part = JSON.parse(data);
      if (part.error) throw new Error(part.error.message);
      const choice = part.choices[0];
      onPart({
        text: choice?.delta?.content ?? "",
        reason: choice?.finish_reason ?? null,
        timings: part.timings,
        edgedec: part.edgedec,
        usage: part.usage,
      });
    }
  }
}
