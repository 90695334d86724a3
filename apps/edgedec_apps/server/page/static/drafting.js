// Speed and acceptance of an answer, while it comes: samples, a small graph of them, and what drafting did in a sentence.

const STEP_S = 0.25; // between two samples
const MOST_SAMPLES = 80;
const [WIDTH, HEIGHT, LEFT, RIGHT, TOP] = [320, 64, 58, 46, 6];
const SVG = "http://www.w3.org/2000/svg";

// Keep the counts so far of an answer in meta.samples: [seconds, tokens, drafted, accepted] since its first token.
export function sample(meta, nowMs, isLast = false) {
  meta.begunMs ??= nowMs;
  meta.samples ??= [];
  const seconds = (nowMs - meta.begunMs) / 1000;
  const before = meta.samples.at(-1);
  if (before && seconds - before[0] < STEP_S && !isLast) return;
  if (before && before[1] === meta.predicted_n) return;
  if (meta.samples.length > 1 && seconds - before[0] < STEP_S / 2) meta.samples.pop(); // too short a step says nothing
  meta.samples.push([Number(seconds.toFixed(3)), meta.predicted_n ?? 0, meta.draft_n ?? 0, meta.draft_n_accepted ?? 0]);
  if (meta.samples.length > MOST_SAMPLES) meta.samples = meta.samples.filter((_, i) => i % 2 === 0 || i === meta.samples.length - 1);
}

// Between each two samples: {from, to in seconds, speed in tokens/s, accepted: share of what was drafted, or null}.
export function rates(samples) {
  return samples.slice(1).map(([seconds, n, drafted, accepted], i) => {
    const [seconds0, n0, drafted0, accepted0] = samples[i];
    const share = drafted > drafted0 ? Math.min(1, (accepted - accepted0) / (drafted - drafted0)) : null;
    return { from: seconds0, to: seconds, speed: seconds > seconds0 ? (n - n0) / (seconds - seconds0) : 0, accepted: share };
  });
}

function shape(name, attributes, text = "") {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.textContent = text;
  return node;
}

// Tokens per second (filled, the scale on the left) and the share of accepted drafts (a line, 0 to 100 % on the right),
// in steps from sample to sample, as a list of one picture; empty for fewer than two steps.
export function graph(meta) {
  const points = rates(meta.samples ?? []);
  if (points.length < 2) return [];
  const end = points.at(-1).to;
  const most = Math.max(...points.map(({ speed }) => speed), 1);
  const x = (seconds) => (LEFT + (seconds / end) * (WIDTH - LEFT - RIGHT)).toFixed(1);
  const y = (share) => (HEIGHT - TOP - share * (HEIGHT - 2 * TOP)).toFixed(1);
  const steps = (of) => points.map((point) => `${x(point.from)},${y(of(point))} ${x(point.to)},${y(of(point))}`).join(" ");
  const base = y(0);
  const svg = shape("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT + 14}`, role: "img", class: "graph" });
  const now = points.at(-1).speed.toFixed(1);
  svg.setAttribute("aria-label", `${now} tokens per second at the end, at most ${most.toFixed(1)}; ${acceptance(meta)}`);
  const outline = `${x(0)},${base} ${steps(({ speed }) => speed / most)} ${x(end)},${base}`;
  svg.append(shape("polygon", { class: "speed", points: outline }));
  if (meta.draft_n) {
    svg.append(shape("polyline", { class: "accepted", points: steps(({ accepted }) => accepted ?? 0) }));
    svg.append(shape("text", { x: WIDTH - RIGHT + 4, y: 2 * TOP, class: "accepted-label" }, "100 %"));
    svg.append(shape("text", { x: WIDTH - RIGHT + 4, y: base, class: "accepted-label" }, "0 %"));
  }
  svg.append(shape("text", { x: LEFT - 4, y: 2 * TOP, "text-anchor": "end" }, `${most.toFixed(0)} tok/s`));
  svg.append(shape("text", { x: LEFT - 4, y: base, "text-anchor": "end" }, "0"));
  svg.append(shape("text", { x: LEFT, y: HEIGHT + 10 }, "0 s"));
  svg.append(shape("text", { x: WIDTH - RIGHT, y: HEIGHT + 10, "text-anchor": "end" }, `${end.toFixed(1)} s`));
  return [svg];
}

function acceptance({ draft_n: drafted, draft_n_accepted: accepted }) {
  return drafted ? `${Math.round((100 * accepted) / drafted)} % of the drafted tokens were accepted` : "nothing was drafted";
}

// What drafting did, in sentences.
export function whatDraftingDid({ predicted_n: n, draft_n: drafted, draft_n_accepted: accepted, isOff }) {
  if (!n) return "";
  if (!drafted) return `Nothing was drafted, so the model ran once for each token.${isOff ? " Drafting is off in the settings." : ""}`;
  return (
    `Drafting guessed ${drafted} tokens, and the model agreed with ${accepted} of them (${Math.round((100 * accepted) / drafted)} %): ` +
    `it ran about ${Math.max(1, n - accepted)} times for ${n} tokens. The text is the same as without drafts.`
  );
}
