// Tools of other programs, where the server has some: the question before each call, and running it.

import { callTool, listTools } from "/static/api.js";
import { element, find } from "/static/dom.js";

export const MOST_ROUNDS = 10; // in which the model may call tools before a person writes again
const UNSEEN = /[\p{C}\p{Zl}\p{Zp}]/gu;
const dialog = find("tool");

// A text whose characters that are not seen are written as numbers.
export const visible = (text) => text.replace(UNSEEN, (sign) => `\\u{${sign.codePointAt(0).toString(16)}}`);

export class Tools {
  constructor(settings) {
    this.settings = settings;
    this.always = new Set(); // what the user allowed until the tab is closed
    this.found = [];
  }

  // The definitions for a model's card; none for a model that knows no tools.
  async definitions(card, signal) {
    if (!card?.meta.tools) return [];
    try {
      this.found = await listTools(this.settings(), signal);
    } catch {
      this.found = []; // what is wrong is said where an answer is asked for
    }
    return this.found.map(({ definition }) => definition);
  }

  // Run the calls of an answer one after another, and keep in each what came of it: result, failed and note.
  async run(calls, signal, onChange) {
    for (const call of calls) {
      if (signal.aborted) return;
      Object.assign(call, await this.one(call, signal));
      onChange();
    }
  }

  async one(call, signal) {
    const tool = this.found.find(({ definition }) => definition.function.name === call.name);
    const allowed = `${tool?.server}/${call.name}`; // servers of a later list may have other tools of that name
    if (tool?.ask && !this.always.has(allowed)) {
      const wish = await asked(call, tool.server, signal);
      if (wish === "always") this.always.add(allowed);
      else if (wish !== "run") return { result: "The user declined this call.", failed: true };
    }
    try {
      const { text, failed, note } = await callTool(call.name, call.arguments, this.settings(), signal);
      return { result: text, failed, note };
    } catch (error) {
      const stopped = error.name === "AbortError";
      return { result: stopped ? "The user stopped this call." : `The call failed: ${error.message}`, failed: true };
    }
  }
}

// What the user decides: "run", "always", or "" and "no" for neither.
function asked({ name, arguments: given }, server, signal) {
  find("tool-name").textContent = visible(name);
  find("tool-server").textContent = visible(server);
  // A number keeps its digits where the browser can say its text.
  const exact = (_, value, { source } = {}) => (typeof value === "number" && JSON.rawJSON?.(source)) || value;
  const rows = Object.entries(JSON.parse(given || "{}", exact));
  const shown = rows.flatMap(([key, value]) => [
    element("dt", "", visible(key)),
    element("dd", "", element("pre", "", visible(JSON.stringify(value)))),
  ]);
  find("tool-arguments").replaceChildren(...(shown.length ? shown : [element("dt", "", "no arguments")]));
  dialog.returnValue = "";
  dialog.showModal();
  const close = () => dialog.close("no");
  signal.addEventListener("abort", close);
  return new Promise((resolve) => {
    dialog.addEventListener(
      "close",
      () => {
        signal.removeEventListener("abort", close);
        resolve(dialog.returnValue);
      },
      { once: true },
    );
  });
}
