// The page: which conversation is shown, which answer is generated, and whether the server is there.

import { GONE, OPEN, SETTINGS, generate } from "./answering.js";
import { Chat } from "./chat.js";
import * as kept from "./conversations.js";
import { at, el, isOther, say, size } from "./dom.js";
import { Machine } from "./machine.js";
import { Gone, ask, forgetKey, hasKey, onKeyNeeded } from "./server.js";

const POLL_MS = 1000, POLL_LIMIT_MS = 20000, SAVE_MS = 400;
const FULL = "The browser's storage is full: delete a chat, or this one is lost.";

const on = (id, kind, act) => at(id).addEventListener(kind, act);
const chat = new Chat(at("log"), at("said"), () => answerAnew());
const machine = new Machine(at("machine"));
let conversation = kept.current();
let running = null; // { conversation, answer, before, abort }, of the answer that is being generated
let isChat = true; // the model has a chat template
let isThere = true; // the server is
let isLeaving = false; // the page is about to go, which ends its requests
let status = null;

function open(found) {
  if (found.id === running?.conversation.id) found = running.conversation;
  conversation = found;
  kept.setCurrent(found);
  if (status) drawModels();
  chat.draw(found, running?.answer, about());
  drawList();
  closeSides();
}

/** What the server says of the model that the conversation is with. */
function asked() {
  const named = (name) => status?.models.find((one) => one.name === name);
  return named(conversation.model) ?? named(status?.model?.name) ?? status?.models[0];
}

function about() {
  const model = asked();
  return el("div", { class: "about" }, el("h2", {}, model?.name ?? "edge-run"), el("p", {}, model
    ? `${size(model.size_bytes)} of weights. What you write stays on the machine that serves this page.`
    : "Connecting …"), isChat ? null : el("p", {}, "This model has no chat template: it continues your text."));
}

function drawList() {
  const all = kept.all();
  if (!all.some(({ id }) => id === conversation.id)) all.unshift(conversation);
  if (!isOther(at("list"), [conversation.id, all.map((one) => [one.id, kept.title(one)])])) return;
  at("list").replaceChildren(...all.map((one) => {
    const title = kept.title(one);
    const show = el("button", { class: "quiet", "aria-current": one.id === conversation.id && "true", onclick: () => {
      open(kept.load(one.id) ?? one);
      at("text").focus();
    } }, title);
    const remove = el("button", { class: "quiet remove", "aria-label": `Delete ${title}` }, "×");
    remove.addEventListener("click", () => (remove.textContent === "×" ? sure(remove) : forget(one)));
    return el("li", {}, show, remove);
  }));
}

function sure(button) {
  say(button, "Delete?");
  chat.tell("Press again to delete.");
  button.addEventListener("blur", () => say(button, "×"), { once: true });
}

function forget({ id }) {
  if (running?.conversation.id === id) stop();
  kept.remove(id);
  open(id === conversation.id ? (kept.all()[0] ?? kept.begin(conversation)) : conversation);
  if (isFull()) keep(conversation);
  at(at("new").offsetParent ? "new" : SIDES[0][0]).focus();
}

// Answers

function send(event) {
  event.preventDefault();
  const text = isChat ? at("text").value.trim() : at("text").value;
  if (!text.trim() || running || !isThere) return;
  const message = { role: "user", content: text };
  conversation.messages.push(message);
  at("text").value = "";
  fit();
  chat.add(message, null);
  answer();
}

/** before: a kept answer, which stays if nothing comes. */
async function answer(before) {
  const reply = { role: "assistant", content: "" };
  const answering = { conversation, answer: reply, before, abort: new AbortController() };
  running = answering;
  conversation.messages.push(reply);
  const shown = () => conversation === answering.conversation;
  let frame = 0, saved = 0;
  const changed = () => {
    frame ||= requestAnimationFrame(() => {
      frame = 0;
      if (!shown() || running !== answering) return;
      chat.update(reply);
      chat.readOut(reply, false);
    });
    saved ||= setTimeout(() => {
      saved = 0;
      keepAnswer();
    }, SAVE_MS);
  };
  chat.add(reply, reply);
  drawButtons();
  if (!before) keep(conversation);
  drawList();
  await generate(answering.conversation, reply, asked()?.name, isChat, answering.abort.signal, changed);
  clearTimeout(saved);
  if (isLeaving && reply.state === GONE) reply.state = OPEN;
  const { content, state, why } = reply;
  if (before && state && !content) {
    Object.assign(reply, { thoughts: "" }, before, { state, why });
    chat.read = reply.content.length;
  }
  keepAnswer();
  running = null;
  chat.running = null;
  if (shown()) {
    chat.update(reply);
    chat.readOut(reply, true);
  }
  drawButtons();
}

function answerAnew() {
  if (running || !isThere || conversation.messages.at(-1)?.role !== "assistant") return;
  const before = conversation.messages.pop();
  chat.draw(conversation, null, about());
  answer(before);
  at("text").focus();
}

function keep(one) {
  const { id } = one;
  if (one.messages.length && !kept.save(one)) notify(FULL);
  else if (isFull()) notify("");
  if (one.id === id) return;
  kept.setCurrent(conversation);
  drawList();
}

/** Keep what is answered, unless it was deleted meanwhile. */
function keepAnswer() {
  const { conversation: one, answer, before } = running ?? {};
  if (before && !answer.content) return;
  if (one && (!one.changed || kept.load(one.id))) keep(one);
}

const isFull = () => at("notice").textContent === FULL;
const stop = () => running?.abort.abort();

function drawButtons() {
  const focused = document.activeElement;
  at("send").hidden = Boolean(running);
  at("stop").hidden = !running;
  at("send").disabled = !isThere;
  if (focused.hidden || focused.disabled) at("text").focus();
}

// The server

let timer = 0;

async function poll() {
  clearTimeout(timer);
  if (document.visibilityState === "hidden") return;
  try {
    const response = await ask("edge-run/status", { limitMs: POLL_LIMIT_MS });
    connected(await response.json());
  } catch (error) {
    if (isThere) lost(error instanceof Gone ? "The server does not answer. Asking again every second …" : error.message);
  }
  clearTimeout(timer);
  timer = setTimeout(poll, POLL_MS);
}

function connected(found) {
  const isFirst = status?.started_s !== found.started_s || status.model?.name !== found.model?.name;
  status = found;
  drawModels();
  if (found.model) machine.show(found);
  if (!isThere) notify("");
  isThere = true;
  if (isFirst) {
    drawServer();
    if (!conversation.messages.length) chat.draw(conversation, null, about());
  }
  drawButtons();
}

function lost(why) {
  isThere = false;
  notify(why);
  drawButtons();
}

const WAYS = { resident: "all in memory", streamed: "streamed from the drive" };

/** Offer the models, where there are several. */
function drawModels() {
  const { name, has_chat_template } = asked() ?? {};
  isChat = has_chat_template ?? true;
  document.title = `${name} · edge-run`;
  say(at("model"), name);
  if (!isOther(at("models"), [status.models, name])) return;
  const isOne = status.models.length < 2;
  at("models").hidden = isOne;
  at("model").classList.toggle("unseen", !isOne);
  at("models").replaceChildren(...status.models.map((one) =>
    el("option", { value: one.name, selected: one.name === name }, one.name + (one.state === "unloaded" ? "" : ` (${one.state})`))));
}

on("models", "change", () => {
  conversation.model = at("models").value;
  if (conversation.messages.length) keep(conversation);
  else open(conversation);
});

function drawServer() {
  const { model, memory, sampling } = status;
  say(at("mode"), model ? `${WAYS[model.mode] ?? "llama.cpp's loader"}, ${size(memory.budget_bytes)}` : "no model is open");
  for (const [name] of SETTINGS) at(name).placeholder = sampling[name] ?? "any";
  at("forget-key").hidden = !hasKey();
}

function notify(text) {
  say(at("notice"), text);
  at("notice").hidden = !text;
}

at("fields").append(...SETTINGS.map(([name, label, bounds]) =>
  el("div", {}, el("label", { for: name }, label), el("input", { id: name, type: "number", inputmode: "decimal", ...bounds }))));

on("show-settings", "click", () => {
  at("system").value = conversation.system;
  for (const [name] of SETTINGS) at(name).value = conversation.settings[name] ?? "";
  at("settings").showModal();
});

on("settings", "input", () => {
  conversation.system = at("system").value;
  const given = SETTINGS.map(([name]) => at(name)).filter((field) => field.value && field.checkValidity());
  conversation.settings = Object.fromEntries(given.map((field) => [field.id, field.valueAsNumber]));
  keep(conversation);
});

on("forget-key", "click", () => {
  forgetKey();
  at("settings").close();
  poll();
});

onKeyNeeded((why) => new Promise((give) => {
  if (why) say(at("key-why"), why);
  at("key-text").value = "";
  at("settings").close();
  at("key").showModal();
  at("key").onclose = () => give(at("key-text").value.trim());
}));

const SIDES = [["show-conversations", "conversations"], ["show-machine", "machine"]];

const isOpen = ([, side]) => at(side).classList.contains("open");

function closeSides(but) {
  for (const one of SIDES) {
    const isShown = one === but && !isOpen(one);
    at(one[1]).classList.toggle("open", isShown);
    at(one[0]).setAttribute("aria-expanded", isShown);
  }
}

for (const one of SIDES) on(one[0], "click", () => closeSides(one));

function fit() {
  const field = at("text");
  field.style.height = "auto";
  field.style.height = `${field.scrollHeight + 2}px`;
}

on("text", "input", fit);
on("text", "keydown", (event) => event.key === "Enter" && !event.shiftKey && event.keyCode !== 229 && send(event));
on("composer", "submit", send);
on("stop", "click", stop);
addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || event.isComposing || document.querySelector("dialog[open]")) return;
  const open = SIDES.find(isOpen);
  closeSides();
  if (open) at(open[0]).focus();
  else stop();
});
on("new", "click", () => {
  open(conversation.messages.length ? kept.begin(conversation) : conversation);
  at("text").focus();
});

addEventListener("beforeunload", () => (isLeaving = true));
addEventListener("pageshow", () => (isLeaving = false));
addEventListener("pagehide", keepAnswer);
document.addEventListener("visibilitychange", poll);
kept.watch((id) => {
  if (id === conversation.id && running?.conversation !== conversation) open(kept.load(id) ?? kept.begin(conversation));
  else drawList();
});

open(conversation);
if (matchMedia("(hover: hover)").matches) at("text").focus();
poll();
