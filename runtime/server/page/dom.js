// Elements made by hand. Text goes in as text only: nothing on the page parses markup.

const SVG = "http://www.w3.org/2000/svg";

export const at = (id) => document.getElementById(id);

export const el = (tag, given = {}, ...children) => fill(document.createElement(tag), given, children);

export const svg = (tag, given = {}, ...children) => fill(document.createElementNS(SVG, tag), given, children);

/** Set attributes, of which `on…` are listeners, and add children, or lists of them; what is false or null is left out. */
function fill(made, given, children) {
  for (const [name, value] of Object.entries(given)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value != null) made.setAttribute(name, value);
  }
  for (const child of children.flat()) if (child != null && child !== false) made.append(child);
  return made;
}

/** Return whether `place` showed something else so far: what is not drawn anew keeps its focus, and what it asks. */
export function isOther(place, what) {
  const last = place.shown;
  place.shown = JSON.stringify(what);
  return place.shown !== last;
}

/** Write a text only where it is another one: what does not change is not painted, and not read out. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const field = el("textarea", { class: "unseen", "aria-hidden": "true" }); // a page without TLS has no clipboard
  field.value = text;
  document.body.append(field);
  field.select();
  document.execCommand("copy");
  field.remove();
}

/** A button that copies what `text` returns, and says so for a moment. */
export function copyButton(text) {
  const button = el("button", { type: "button", class: "quiet" }, "Copy");
  button.addEventListener("click", async () => {
    await copy(text()).then(() => say(button, "Copied"), () => say(button, "Not allowed"));
    setTimeout(() => say(button, "Copy"), 1500);
  });
  return button;
}

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

/** Memory, in powers of two, with three digits. */
export function size(bytes) {
  const power = bytes < 1 ? 0 : Math.min(UNITS.length - 1, Math.floor(Math.log2(bytes) / 10));
  return `${digits(bytes / 1024 ** power)} ${UNITS[power]}`;
}

/** What was read, in the powers of ten that drives are sold by. */
export function amount(bytes) {
  const power = bytes < 1e9 ? 2 : bytes < 1e12 ? 3 : 4;
  return `${digits(bytes / 1000 ** power)} ${"MGT"[power - 2]}B`;
}

/** A number with about three digits. */
export function digits(value) {
  return value >= 100 ? Math.round(value).toLocaleString("en") : value.toFixed(value >= 10 ? 1 : 2).replace(/\.?0+$/, "");
}

export function seconds(value) {
  if (value < 90) return `${value < 10 ? value.toFixed(1) : Math.round(value)} s`;
  return value < 5400 ? `${Math.round(value / 60)} min` : `${(value / 3600).toFixed(1)} h`;
}
