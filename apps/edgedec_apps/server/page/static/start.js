// The empty page: three things to try, and the models that are here or can be fetched, with what is done to one of them.

import { fetchModel, loadModel, offeredModels } from "/static/api.js";
import { button, element, find, patch } from "/static/dom.js";
import { problem, tell } from "/static/models.js";

const QUIET_S = 10; // without news, after which a fetch says so
const FETCHING = "edgedec.fetching"; // the name of a model whose fetch goes on where this page is opened again
const PHASES = { verify: "checking the file", wait: "waiting for another fetch of this model" };
const [list, start, tries, announce] = ["models", "start", "tries", "announce"].map(find);

// The smallest model of the catalogue does these well, by its most probable tokens (temperature 0).
const CODE = "def mean(numbers):\n    total = 0\n    for number in numbers:\n        total += number\n    return total / len(numbers)";
const TRIES = [
  ["Sum up a text", "Summarize this text in one or two sentences:\n\nThe town library was built in 1911. After the flood of 2019 it was closed for two years. Volunteers dried 12,000 books by hand, and a new roof was paid for by donations. It opened again in May, and now has a café and a room for children."],
  ["Shorten some code", `Write this function again, but shorter:\n\n\`\`\`python\n${CODE}\n\`\`\``],
  ["Turn a text into JSON", "Write this as JSON with the keys name, age, city and job:\n\nMaria is 34 years old. She lives in Porto and works as a nurse. Her brother is called Paulo."],
];

const size = (bytes) => (bytes >= 1e9 ? `${(bytes / 1e9).toFixed(2)} GB` : `${Math.round(bytes / 1e6)} MB`);

// `models` has the cards of the server's models; onAsk(text) is called where a thing is tried.
export class Start {
  constructor(settings, models, onAsk) {
    Object.assign(this, { settings, models, offers: [], work: null, wrong: {} });
    for (const [title, text] of TRIES) {
      const node = button("", () => onAsk(text));
      node.append(element("strong", "", title), element("span", "", text.replace(/\n\n(```\w*\n)?|\n```/g, "\n")));
      tries.append(node);
    }
    list.addEventListener("click", ({ target: { value, localName } }) => localName === "button" && this.press(value));
  }

  // Show the models that the server has by now; a fetch that the page was left with goes on.
  async refresh() {
    this.offers = await offeredModels(this.settings());
    const name = sessionStorage.getItem(FETCHING);
    if (name && !this.work) void this.begin(name, false);
    this.draw();
  }

  draw() {
    const focused = list.contains(document.activeElement) ? document.activeElement.value : null;
    const names = new Set([...this.models.cards.map(({ id }) => id), ...this.offers.map(({ name }) => name)]);
    [...names].forEach((name, i) => patch(list.children[i] ?? list.appendChild(element("li")), this.row(name)));
    while (list.children.length > names.size) list.lastChild.remove();
    if (focused) list.querySelector(`[value="${CSS.escape(focused)}"]`)?.focus(); // its button may be another by now
    tries.hidden = !this.models.cards.length;
    find("start-title").textContent = tries.hidden ? "Fetch a model to begin" : "Try one of these, or write a message";
    if (this.work && start.hidden) tell(`${this.work.name}: ${progressOf(this.work)}`);
  }

  row(name) {
    const [card, offer] = [this.models.cards.find(({ id }) => id === name), this.offers.find((each) => each.name === name)];
    const [isUsed, isBusy] = [card?.ready && card === this.models.card, this.work?.name === name];
    const press = element("button", "", isBusy ? "Cancel" : isUsed ? "In use" : card?.ready || (card && this.work) ? "Use" : card ? "Load" : offer.n_there ? "Fetch the rest" : "Fetch");
    press.value = name;
    press.disabled = !card && !isBusy && this.work !== null;
    press.setAttribute("aria-disabled", String(Boolean(isUsed)));
    press.setAttribute("aria-label", `${press.textContent}: ${name}`);
    const facts = [offer && size(offer.n_bytes), card?.ready && "loaded", offer?.note].filter((fact) => fact);
    const row = element("li", "", element("strong", "", name), press, element("p", "facts", facts.join(" · ")));
    if (isBusy) {
      const bar = element("progress");
      bar.setAttribute("aria-label", `How far ${name} is`);
      if (this.work.total) [bar.max, bar.value] = [this.work.total, this.work.done];
      row.append(bar, element("p", "how-far", progressOf(this.work)));
    }
    if (this.wrong.name === name) row.append(element("p", "error", this.wrong.text));
    return row;
  }

  press(name) {
    const card = this.models.cards.find(({ id }) => id === name);
    if (this.work?.name === name) return this.work.controller.abort();
    if (card) this.models.pick(name);
    if (!this.work && !card?.ready) void this.begin(name, card !== undefined);
  }

  // Load a model that is here, or fetch another.
  async begin(name, isHere) {
    const now = performance.now();
    const run = { name, isHere, controller: new AbortController(), phase: "", done: 0, total: 0, begunMs: now, newsMs: now };
    const { signal } = run.controller;
    Object.assign(this, { work: run, wrong: {} });
    if (!isHere) sessionStorage.setItem(FETCHING, name);
    const clock = setInterval(() => this.draw(), 1000);
    this.draw();
    try {
      if (isHere) await loadModel(name, this.settings(), signal);
      else await fetchModel(name, this.settings(), signal, (part) => takeNews(run, part));
      announce.textContent = `${name} is ${isHere ? "loaded" : "on this machine now"}.`;
      sessionStorage.removeItem(FETCHING);
    } catch (error) {
      if (!(error instanceof TypeError)) sessionStorage.removeItem(FETCHING); // else it goes on when the server is back
      if (error.name !== "AbortError") this.wrong = { name, text: problem(error) };
      announce.textContent = `${name} was not ${isHere ? "loaded" : "fetched"}: ${this.wrong.text ?? "cancelled"}`;
    }
    clearInterval(clock);
    this.work = null;
    this.draw();
    await this.models.after();
  }
}

function takeNews(run, { status, total, completed = 0 }) {
  const phase = status.split(" ")[0];
  if (phase !== run.phase || completed !== run.done) [run.newsMs, run.phase] = [performance.now(), phase]; // else no news
  if (!total) return;
  if (!run.total) [run.begunMs, run.before] = [run.newsMs, completed];
  [run.done, run.total] = [completed, total];
}

// How far the work on a model is, in words.
function progressOf({ isHere, phase, done, total, before, begunMs, newsMs }) {
  const seconds = (performance.now() - begunMs) / 1000;
  if (isHere) return `loading, ${seconds.toFixed(0)} s`;
  const quiet = (performance.now() - newsMs) / 1000;
  if (quiet > QUIET_S) return `nothing came for ${quiet.toFixed(0)} s; it goes on when the network does`;
  if (PHASES[phase] || !total) return PHASES[phase] ?? "asking for the file";
  const rate = (done - before) / seconds;
  const left = (total - done) / rate;
  const rest = seconds < 3 || !rate ? "" : `, ${size(rate)}/s, ${left < 90 ? `${Math.ceil(left)} s` : `${Math.ceil(left / 60)} min`} left`;
  return `${Math.floor((100 * done) / total)} %${rest}`;
}
