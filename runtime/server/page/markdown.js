// Models' Markdown, to elements. Nothing is loaded: an image is its link.

import { copyButton, el } from "./dom.js";

const MOST_DEPTH = 8; // of quotes, lists and emphasis within each other
const MOST_EMPHASIS = 1000; // letters, lest many stars take long
const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^\s`]*)/;
const HEADING = /^ {0,3}(#{1,6})\s(.*)$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])(?:\s+|$)/;
const QUOTE = /^ {0,3}> ?/;
const DASHES = /^\|? *:?-+:? *(?:\| *:?-+:? *)*\|?$/;

/** Show `text` in `place`; blocks that were there already stay, so that a stream costs its last block only. */
export function show(place, text) {
  let number = 0;
  for (const [source, make] of blocks(text.split("\n"), 0)) {
    const old = place.children[number++];
    if (old?.source === source) continue;
    let made;
    try {
      made = make();
    } catch { // the rest of the page goes on
      made = el("p", {}, source);
    }
    made.source = source;
    old ? old.replaceWith(made) : place.append(made);
  }
  while (place.children.length > number) place.lastChild.remove();
}

/** Yield the text of each block, and what makes its element. */
function* blocks(lines, depth) {
  for (let start = 0; start < lines.length; ) {
    const [end, make] = lines[start].trim() ? readBlock(lines, start, depth) : [start + 1];
    if (make) yield [lines.slice(start, end).join("\n"), make];
    start = end;
  }
}

const renderAll = (lines, depth) => [...blocks(lines, depth)].map(([, make]) => make());

/** Where the block that begins at a line ends, and what makes its element. */
function readBlock(lines, start, depth) {
  const line = lines[start];
  let end = start + 1;
  let found;
  if ((found = FENCE.exec(line))) {
    const mark = found[1];
    while (end < lines.length && !isClosing(lines[end], mark)) end += 1;
    const text = lines.slice(start + 1, end).join("\n");
    return [Math.min(end + 1, lines.length), () => code(text, found[2])];
  }
  if ((found = HEADING.exec(line))) return [end, () => el(`h${Math.min(6, found[1].length + 2)}`, {}, inline(found[2].trim(), 0))];
  if (RULE.test(line)) return [end, () => el("hr")];
  if (depth < MOST_DEPTH && QUOTE.test(line)) {
    while (end < lines.length && QUOTE.test(lines[end])) end += 1;
    const inner = lines.slice(start, end).map((one) => one.replace(QUOTE, ""));
    return [end, () => el("blockquote", {}, renderAll(inner, depth + 1))];
  }
  if (depth < MOST_DEPTH && ITEM.test(line)) return readList(lines, start, depth);
  if (line.includes("|") && DASHES.test(lines[end]?.trim()) && cells(lines[end]).length === cells(line).length) {
    do end += 1;
    while (lines[end]?.includes("|"));
    return [end, () => table(lines.slice(start, end))];
  }
  while (end < lines.length && lines[end].trim() && !beginsBlock(lines[end])) end += 1;
  return [end, () => el("p", {}, inline(lines.slice(start, end).join("\n").trim(), 0))];
}

const isClosing = (line, mark) => line.trim().startsWith(mark) && !line.trim().replaceAll(mark[0], "");
const beginsBlock = (line) => [FENCE, HEADING, QUOTE, ITEM, RULE].some((pattern) => pattern.test(line));

function readList(lines, start, depth) {
  const [, indent, mark] = ITEM.exec(lines[start]);
  const isNumbered = /\d/.test(mark);
  const items = [];
  let end = start;
  for (; end < lines.length; end += 1) {
    const found = ITEM.exec(lines[end]);
    if (found && found[1].length <= indent.length + 1) {
      if (/\d/.test(found[2]) !== isNumbered) break;
      items.push([lines[end].slice(found[0].length)]);
    } else if (lines[end].trim() && !lines[end].startsWith(" ") && (!lines[end - 1].trim() || beginsBlock(lines[end]))) {
      break;
    } else {
      items.at(-1).push(lines[end]);
    }
  }
  const make = () =>
    el(isNumbered ? "ol" : "ul", { start: isNumbered && parseInt(mark, 10) }, items.map((item) => listItem(item, depth)));
  return [end, make];
}

/** An item of one paragraph is its text; lines after the first lose the indent that they share. */
function listItem([first, ...rest], depth) {
  const shared = Math.min(...rest.filter((line) => line.trim()).map((line) => line.search(/\S/)), 8);
  const made = renderAll([first, ...rest.map((line) => line.slice(shared))], depth + 1);
  return el("li", {}, made[0]?.tagName === "P" ? [...made[0].childNodes] : made[0], made.slice(1));
}

function code(text, language) {
  const head = el("div", { class: "code-head" }, el("span", {}, language || "text"), copyButton(() => text));
  return el("figure", { class: "code" }, head, el("pre", { tabindex: "0" }, el("code", {}, text)));
}

function table([head, dashes, ...rows]) {
  const sides = cells(dashes).map((cell) => (cell.endsWith(":") ? (cell.startsWith(":") ? "center" : "end") : null));
  const row = (kind) => (line) =>
    el("tr", {}, cells(line).slice(0, sides.length).map((cell, n) => el(kind, { class: sides[n] }, inline(cell, 0))));
  const made = el("table", {}, el("thead", {}, row("th")(head)), el("tbody", {}, rows.map(row("td"))));
  return el("div", { class: "wide", tabindex: "0", role: "group", "aria-label": "Table" }, made);
}

const cells = (line) =>
  line.trim().replace(/^\||\|$/g, "").replace(/\\\|/g, "\0").split("|").map((cell) => cell.replace(/\0/g, "\\|").trim());

const LINK = /!?\[([^[\]]{0,500})\]\(<?([^\s()<>]{1,2000}(?:\([^\s()]{0,500}\)[^\s()<>]{0,500})?)>?(?:\s+"[^"]{0,500}")?\)/y;
const ADDRESS = /https?:\/\/[^\s<>"]{1,2000}[^\s<>"'.,;:!?)\]*_]/y;
const SPECIAL = /[\\`*_~[!h\n]/g;
const EMPHASIS = { "**": "strong", __: "strong", "*": "em", _: "em", "~~": "del" };

/** The nodes of a text without blocks. */
function inline(text, depth) {
  const made = [];
  let done = 0;
  const add = (from, to, node) => {
    if (from > done) made.push(text.slice(done, from));
    if (node != null) made.push(node);
    done = to;
  };
  for (let at = 0; at < text.length; at = Math.max(at + 1, done)) {
    SPECIAL.lastIndex = at;
    const found = SPECIAL.exec(text);
    if (!found) break;
    at = found.index;
    if (found[0] === "\\" && /[!-/:-@[-`{-~]/.test(text[at + 1] ?? "")) add(at, at + 2, text[at + 1]);
    else if (found[0] === "\n") add(at, at + 1, el("br"));
    else if (found[0] === "`") codeSpan(text, at, add);
    else if (found[0] === "[" || found[0] === "!") linkAt(LINK, text, at, add);
    else if (found[0] === "h") linkAt(ADDRESS, text, at, add);
    else if (depth < MOST_DEPTH) emphasis(text, at, add, depth);
  }
  if (done < text.length) made.push(text.slice(done));
  return made;
}

function codeSpan(text, at, add) {
  const mark = /`+/y;
  mark.lastIndex = at;
  const [ticks] = mark.exec(text);
  const end = text.indexOf(ticks, at + ticks.length);
  if (end < 0 || text[end + ticks.length] === "`") return add(at, at + ticks.length, ticks);
  const inner = text.slice(at + ticks.length, end);
  add(at, end + ticks.length, el("code", {}, inner.trim() || inner));
}

/** A link whose text is not its place shows that; other kinds stay text. */
function linkAt(pattern, text, at, add) {
  pattern.lastIndex = at;
  const found = pattern.exec(text);
  if (!found) return;
  const [whole, label = whole, address = whole] = found;
  const url = URL.canParse(address) ? new URL(address) : null;
  if (!url || !["http:", "https:", "mailto:"].includes(url.protocol)) return;
  const place = url.host || url.pathname;
  const link = el("a", { href: url.href, target: "_blank", rel: "noopener noreferrer" }, label || url.href);
  const shown = [address, url.href, place, ""].includes(label) && !url.username ? "" : ` (${place})`;
  add(at, at + whole.length, el("span", {}, link, el("small", {}, shown)));
}

function emphasis(text, at, add, depth) {
  const mark = [text.slice(at, at + 2), text[at]].find((one) => one in EMPHASIS);
  const start = at + (mark?.length ?? 0);
  if (!mark || /\s/.test(text[start] ?? " ")) return;
  if (mark[0] === "_" && /\w/.test(text[at - 1] ?? "")) return;
  const near = text.slice(start, start + MOST_EMPHASIS);
  let end = 0;
  do end = near.indexOf(mark, end + 1);
  while (end > 0 && !closes(text, start + end, mark));
  if (end < 0) return mark.length > 1 ? add(at, start, mark) : undefined;
  add(at, start + end + mark.length, el(EMPHASIS[mark], {}, inline(near.slice(0, end), depth + 1)));
}

function closes(text, end, mark) {
  const after = text[end + mark.length] ?? "";
  if (/\s/.test(text[end - 1]) || (mark[0] === "_" && /\w/.test(after))) return false;
  return mark.length > 1 || (after !== mark && text[end - 1] !== mark);
}
