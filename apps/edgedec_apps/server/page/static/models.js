// The model picker: all models of the server; start.js loads and fetches them.

import { isReady, modelCards } from "/static/api.js";
import { find } from "/static/dom.js";

const UNREACHABLE = "The server can't be reached.";
const [picker, state, check] = ["model", "state", "check"].map(find);

export const tell = (text) => (state.textContent = text);
export const problem = (error) => (error instanceof TypeError ? UNREACHABLE : error.message);

// `settings` is asked for the settings; onPick(name) is called when another model is picked, onMore() for one that is not
// here, and onChange() where the server may have other models.
export class Models {
  constructor(settings, { onPick, onMore, onChange }) {
    Object.assign(this, { settings, onPick, onMore, onChange });
    this.cards = [];
    this.attempts = 0; // of connect, so that only the latest goes on asking
    picker.addEventListener("change", () => (picker.value ? this.pick(picker.value) : (this.draw(), this.onMore())));
  }

  get card() {
    return this.cards.find((each) => each.id === this.settings().model);
  }

  // Ask until the server is ready; then show its models.
  async connect() {
    const mine = ++this.attempts;
    while (mine === this.attempts) {
      try {
        const { ready, message, failed } = await isReady();
        if (ready) return await this.refresh();
        tell(message);
        if (failed) return;
      } catch (error) {
        tell(problem(error));
        if (!(error instanceof TypeError)) return;
      }
      await new Promise((resolve) => setTimeout(resolve, 1000));
    }
  }

  async refresh() {
    this.cards = await modelCards(this.settings());
    if (!this.card && this.cards.length) this.onPick(this.cards[0].id);
    this.drawChecks(this.cards[0]?.checks ?? []);
    this.draw();
    await this.onChange();
  }

  // The checks that the server was started with, the same for all models.
  drawChecks(names) {
    find("checking").hidden = !names.length;
    if (check.options.length === names.length + 1) return; // what is picked stays
    check.replaceChildren(...["", ...names].map((name) => new Option(name || "none", name)));
  }

  pick(name) {
    this.onPick(name);
    this.draw();
  }

  draw() {
    const { card } = this;
    picker.replaceChildren(...this.cards.map(({ id }) => new Option(id, id)), new Option("More models …", ""));
    if (!card) return tell("No model is on this machine yet: fetch one, here or by edgedec pull NAME.");
    picker.value = card.id;
    document.title = `${card.id} · edgedec`;
    const loaded = card.ready ? `${card.meta.n_ctx.toLocaleString("en")} tokens of context` : "It is loaded when you write.";
    tell(card.meta.chat === false ? "This model has no chat template." : loaded);
  }

  // After a load or an answer other models may be loaded.
  async after() {
    try {
      await this.refresh();
    } catch (error) {
      tell(problem(error));
      if (error instanceof TypeError) void this.connect();
    }
  }
}
