// The empty page: three things to try, and the models that are here or can be fetched, with the progress of a fetch.

import { fetchModel, offeredModels } from "/static/api.js";
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
    Object.assign(this, { settings, models, offers: [], fetching: null, wrong: {} });
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
    if (name && !this.fetching) void this.fetch(name);
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
    if (this.fetching && start.hidden) tell(`Fetching ${this.fetching.name}: ${progressOf(this.fetching)}`);
  }

  row(name) {
    const [card, offer] = [this.models.cards.find(({ id }) => id === name), this.offers.find((each) => each.name === name)];
    const [isUsed, isFetched] = [card && card === this.models.card, this.fetching?.name === name];
    const press = element("button", "", isFetched ? "Cancel" : isUsed ? "In use" : card ? "Use" : offer.n_there ? "Fetch the rest" : "Fetch");
    press.value = name;
    press.disabled = !card && !isFetched && this.fetching !== null;
    press.setAttribute("aria-disabled", String(Boolean(isUsed)));
    press.setAttribute("aria-label", `${press.textContent}: ${name}`);
    const facts = [offer && size(offer.n_bytes), card?.ready && "loaded", offer?.note].filter((fact) => fact);
    const row = element("li", "", element("strong", "", name), press, element("p", "facts", facts.join(" · ")));
    if (isFetched) {
      const bar = element("progress");
      bar.setAttribute("aria-label", `Fetching ${name}`);
      if (this.fetching.total) [bar.max, bar.value] = [this.fetching.total, this.fetching.done];
      row.append(bar, element("p", "how-far", progressOf(this.fetching)));
    }
    if (this.wrong.name === name) row.append(element("p", "error", this.wrong.text));
    return row;
  }

  press(name) {
    if (this.fetching?.name === name) this.fetching.controller.abort();
    else if (this.models.cards.some(({ id }) => id === name)) this.models.pick(name);
    else void this.fetch(name);
  }

  async fetch(name) {
    const run = { name, controller: new AbortController(), phase: "", done: 0, total: 0, newsMs: performance.now() };
    Object.assign(this, { fetching: run, wrong: {} });
    sessionStorage.setItem(FETCHING, name);
    const clock = setInterval(() => this.draw(), 1000);
    this.draw();
    try {
      await fetchModel(name, this.settings(), run.controller.signal, ({ status, total, completed }) => {
        const phase = status.split(" ")[0];
        if (phase !== run.phase || (completed ?? 0) !== run.done) [run.newsMs, run.phase] = [performance.now(), phase]; // else no news
        if (!total) return;
        if (!run.total) [run.begunMs, run.before] = [run.newsMs, completed];
        [run.done, run.total] = [completed, total];
      });
      announce.textContent = `${name} is on this machine now.`;
      sessionStorage.removeItem(FETCHING);
    } catch (error) {
      if (!(error instanceof TypeError)) sessionStorage.removeItem(FETCHING); // else it goes on when the server is back
      if (error.name !== "AbortError") this.wrong = { name, text: problem(error) };
      announce.textContent = `${name} was not fetched: ${this.wrong.text ?? "cancelled"}`;
    }
    clearInterval(clock);
    this.fetching = null;
    this.draw();
    await this.models.after();
  }
}

// How far a fetch is, in words.
function progressOf({ phase, done, total, before, begunMs, newsMs }) {
  const quiet = (performance.now() - newsMs) / 1000;
  if (quiet > QUIET_S) return `nothing came for ${quiet.toFixed(0)} s; it goes on when the network does`;
  if (PHASES[phase] || !total) return PHASES[phase] ?? "asking for the file";
  const seconds = (performance.now() - begunMs) / 1000;
  const rate = (done - before) / seconds;
  const left = (total - done) / rate;
  const rest = seconds < 3 || !rate ? "" : `, ${size(rate)}/s, ${left < 90 ? `${Math.ceil(left)} s` : `${Math.ceil(left / 60)} min`} left`;
  return `${Math.floor((100 * done) / total)} %${rest}`;
}
