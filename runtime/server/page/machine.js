// The machine at work: memory, drive, answers, devices.

import { amount, digits, el, isOther, say, seconds, svg } from "./dom.js";

const POINTS = 60; // of a chart, one a second
const DRIVE_S = 3, TOKENS_S = 8; // what a rate is taken over
const STALE_S = 5; // a longer gap, as of a hidden page, begins a chart anew

/** What holds the budget: a class that has the colour, a label, and the items of the plan in it. */
const HOLDERS = [
  ["pinned", "Weights that stay", ["pinned"]],
  ["window", "Weights that pass through", ["window"]],
  ["experts", "Experts at hand", ["experts"]],
  ["kv", "Context", ["kv"]],
  ["buffers", "Buffers", ["buffers", "work"]],
  ["draft", "Draft model", ["draft"]],
  ["gpu", "On the GPU", ["gpu", "upload"]],
];
const MIB = 2 ** 20, GIB = 2 ** 30;

export class Machine {
  constructor(place) {
    this.samples = [];
    this.rows = {};
    this.names = new Map(); // of devices that computed layers since the page was opened
    this.bar = svg("svg", { class: "memory", role: "img", viewBox: "0 0 1000 20", preserveAspectRatio: "none" });
    this.holders = el("dl");
    this.drive = new Chart("Read from the drive in the last minute");
    this.tokens = new Chart("Tokens made in the last minute");
    this.nodes = el("ol", { class: "nodes" });
    this.notices = el("ul", { class: "notices" });
    this.mesh = section("Devices", this.nodes);
    place.replaceChildren(
      el("h2", {}, "The machine at work"),
      section("Memory", this.#figure("memory"), this.bar, this.holders),
      section("Drive", this.#figure("drive"), this.drive.place, this.#list("limit", "Limit", "pass", "For each token", "read", "Since the start")),
      section("Answers", this.#figure("tokens"), this.tokens.place, this.#list(
        "running", "Answered now", "waiting", "Waiting", "first", "Time to first token", "prefill", "Reading a prompt",
        "guesses", "Guesses accepted", "perPass", "Tokens in a pass", "experts", "Experts found in memory")),
      this.mesh,
      this.notices,
    );
  }

  /** Show what the server says of itself. */
  show(status) {
    const last = this.samples.at(-1);
    if (last && (last.model.name !== status.model.name || status.now_s < last.now_s || status.now_s - last.now_s > STALE_S)) this.samples = [];
    this.samples.push(status);
    if (this.samples.length > POINTS + TOKENS_S) this.samples.shift();
    this.#showMemory(status);
    this.#showDrive(status);
    this.#showAnswers(status);
    this.#showMesh(status.mesh);
    if (isOther(this.notices, status.notices)) this.notices.replaceChildren(...status.notices.map((text) => el("li", {}, text)));
  }

  #showMemory({ memory }) {
    const [unit, bytes, places] = memory.budget_bytes >= GIB ? ["GiB", GIB, 2] : ["MiB", MIB, 0];
    const shown = (held) => (held / bytes).toFixed(places);
    this.#figureIs("memory", shown(memory.resident_bytes), `of ${shown(memory.budget_bytes)} ${unit}`);
    if (isOther(this.bar, [memory.items, memory.lent_bytes, memory.budget_bytes])) this.#drawMemory(memory, shown, unit);
    const at = Math.min(1, memory.resident_bytes / memory.budget_bytes) * 1000;
    this.mark.setAttribute("x", Math.max(0, at - 3));
  }

  #drawMemory(memory, shown, unit) {
    const known = new Set(HOLDERS.flatMap(([, , names]) => names));
    const sum = (test) => memory.items.filter(({ what }) => test(what)).reduce((all, one) => all + one.size_bytes, 0);
    const held = [
      ...HOLDERS.map(([kind, label, names]) => [kind, label, sum((what) => names.includes(what))]),
      ["program", "Program and reserve", sum((what) => !known.has(what))],
    ].filter(([, , bytes]) => bytes);
    const free = memory.budget_bytes - sum(() => true);
    const shapes = [];
    let from = 0;
    for (const [kind, , bytes] of held) {
      const width = (1000 * bytes) / memory.budget_bytes;
      shapes.push(svg("rect", { class: kind, x: from, width: Math.max(1, width - 3), height: 20 }));
      if (kind === "buffers" && memory.lent_bytes) { // of the context and the buffers, which lie side by side
        const lent = (1000 * memory.lent_bytes) / memory.budget_bytes;
        shapes.push(svg("rect", { class: "lent", x: from + width - lent, width: Math.max(1, lent - 3), y: 13, height: 7 }));
      }
      from += width;
    }
    this.mark = svg("rect", { class: "mark", y: 0, width: 6, height: 20 });
    this.bar.replaceChildren(...shapes, this.mark);
    const lines = [...held];
    if (memory.lent_bytes) lines.splice(lines.findIndex(([kind]) => kind === "buffers") + 1, 0, ["lent", "of these lent to weights", memory.lent_bytes]);
    if (free > 0.005 * memory.budget_bytes) lines.push(["free", "Free", free]);
    this.bar.setAttribute("aria-label", lines.map(([, label, bytes]) => `${label}: ${shown(bytes)} ${unit}`).join(", "));
    this.holders.replaceChildren(...lines.map(([kind, label, bytes]) =>
      el("div", { class: kind === "lent" ? "part" : null }, el("dt", {}, el("i", { class: kind }), label), el("dd", {}, shown(bytes)))));
  }

  #showDrive({ model, io }) {
    const rates = this.#rates(DRIVE_S, ({ io }) => io.bytes_read);
    const limit = io.limit_bytes_per_s, now = digits(rates.at(-1) / 1e6);
    this.#figureIs("drive", now, "MB/s");
    this.drive.show(rates, limit, `${now} MB/s${limit ? `, of ${digits(limit / 1e6)} at most` : ""}`);
    this.#row("limit", limit ? `${digits(limit / 1e6)} MB/s` : "not measured");
    this.#row("pass", model.mode === "resident" ? "nothing: all is in memory" : amount(io.streamed_bytes_per_pass));
    this.#row("read", amount(io.bytes_read));
  }

  #showAnswers({ requests, speed, speculation, experts }) {
    const rates = this.#rates(TOKENS_S, ({ tokens }) => tokens.generated);
    const now = digits(rates.at(-1));
    this.#figureIs("tokens", now, "tokens/s");
    this.tokens.show(rates, 0, `${now} tokens a second`);
    this.#row("running", `${requests.running} of ${requests.most_parallel}`);
    this.#row("waiting", `${requests.waiting}`);
    this.#row("first", speed.first_token_s && seconds(speed.first_token_s));
    this.#row("prefill", speed.prefill_tokens_per_s && `${digits(speed.prefill_tokens_per_s)} tokens/s`);
    const { drafted, accepted, tokens_per_pass } = speculation;
    this.#row("guesses", drafted && `${Math.round((100 * accepted) / drafted)} % of ${digits(drafted)}`);
    this.#row("perPass", drafted && digits(tokens_per_pass));
    this.#row("experts", experts && `${Math.round(100 * experts.hit_rate)} %`);
  }

  #showMesh(mesh) {
    this.mesh.hidden = !mesh;
    if (!isOther(this.nodes, [mesh?.nodes, mesh?.left_out])) return;
    const nodes = (mesh?.nodes ?? []).map(({ name, blocks, streamed_bytes }) =>
      el("li", {}, el("b", {}, name), el("span", {}, `layers ${ranges(blocks)}`), el("small", {}, streamed_bytes ? `reads ${amount(streamed_bytes)} a token` : "all in memory")));
    for (const { node, name } of mesh?.nodes ?? []) this.names.set(node, name);
    const absent = new Map([...this.names.keys()].map((node) => [node, "has no layers any more"]));
    for (const [node, why] of Object.entries(mesh?.left_out ?? {})) absent.set(node, why);
    for (const { node } of mesh?.nodes ?? []) absent.delete(node);
    const lost = [...absent].map(([node, why]) =>
      el("li", { class: "lost" }, el("b", {}, this.names.get(node) ?? node.slice(0, 12)), el("small", {}, why)));
    this.nodes.replaceChildren(...nodes, ...lost);
  }

  /** Return by how much a counter grew in a second, at each sample, taken over the last `over_s` seconds. */
  #rates(over_s, counter) {
    const found = this.samples.map((sample, number) => {
      let first = number;
      while (first > 0 && sample.now_s - this.samples[first - 1].now_s <= over_s + 0.5) first -= 1;
      const passed = sample.now_s - this.samples[first].now_s;
      return passed ? (counter(sample) - counter(this.samples[first])) / passed : 0;
    });
    return found.slice(-POINTS);
  }

  #figure(name) {
    const number = el("b"), unit = el("span");
    this.rows[name] = { number, unit };
    return el("p", { class: "figure" }, number, " ", unit);
  }

  #figureIs(name, number, unit) {
    say(this.rows[name].number, number);
    say(this.rows[name].unit, unit);
  }

  #list(...named) {
    const list = el("dl");
    for (let at = 0; at < named.length; at += 2) {
      const text = el("dd");
      const line = el("div", {}, el("dt", {}, named[at + 1]), text);
      this.rows[named[at]] = { line, text };
      list.append(line);
    }
    return list;
  }

  /** Show a row's text, or no row where there is none. */
  #row(name, text) {
    this.rows[name].line.hidden = !text;
    say(this.rows[name].text, text || "");
  }
}

const section = (title, ...children) => el("section", {}, el("h3", {}, title), ...children);

/** Lines of a minute, with a dashed one at the limit. */
class Chart {
  constructor(label) {
    this.label = label;
    this.area = svg("polygon");
    this.line = svg("polyline");
    this.limit = svg("line", { x1: 0, x2: POINTS - 1 });
    this.place = svg("svg", { class: "chart", role: "img", viewBox: `0 0 ${POINTS - 1} 30`, preserveAspectRatio: "none" }, this.area, this.line, this.limit);
  }

  show(values, limit, now) {
    const most = Math.max(...values, limit) * 1.1 || 1;
    const height = (value) => (29 - (28 * value) / most).toFixed(2);
    const points = values.map((value, number) => `${POINTS - values.length + number},${height(value)}`);
    this.line.setAttribute("points", points.join(" "));
    this.area.setAttribute("points", `${POINTS - values.length},30 ${points.join(" ")} ${POINTS - 1},30`);
    this.limit.setAttribute("y1", height(limit));
    this.limit.setAttribute("y2", height(limit));
    this.limit.toggleAttribute("hidden", !limit);
    this.place.setAttribute("aria-label", `${this.label}: ${now}`);
  }
}

/** Return numbers as ranges: 0–3, 7. */
function ranges(numbers) {
  const found = [];
  for (const number of numbers) {
    const last = found.at(-1);
    if (last && last[1] === number - 1) last[1] = number;
    else found.push([number, number]);
  }
  return found.map(([first, last]) => (first === last ? `${first}` : `${first}–${last}`)).join(", ") || "none";
}
