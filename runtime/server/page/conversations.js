// Conversations in the browser's storage, each under its own key: two tabs do not overwrite each other's.

const PREFIX = "edge-run/chat/";
const CURRENT = "edge-run/current"; // of this tab
const TITLE_LETTERS = 60;

/** All conversations, that which changed last first. What cannot be read is left out. */
export function all() {
  const found = [];
  for (let number = 0; number < localStorage.length; number++) {
    const key = localStorage.key(number);
    if (key.startsWith(PREFIX)) found.push(load(key.slice(PREFIX.length)));
  }
  return found.filter(Boolean).sort((one, other) => other.changed - one.changed);
}

export function load(id) {
  try {
    const found = JSON.parse(localStorage.getItem(PREFIX + id));
    return Array.isArray(found?.messages) ? found : null;
  } catch {
    return null;
  }
}

const newId = () => `${Date.now().toString(36)}-${Math.random().toString(36).slice(2, 8)}`;

/** A conversation without messages, with the settings of `like`. */
export function begin(like) {
  return { id: newId(), changed: 0, system: like?.system ?? "", settings: { ...like?.settings }, messages: [] };
}

/** The conversation that this tab had, else the latest, else a new one. */
export function current() {
  return load(sessionStorage.getItem(CURRENT)) ?? all()[0] ?? begin();
}

export const setCurrent = (conversation) => sessionStorage.setItem(CURRENT, conversation.id);

/** Keep a conversation, under a new id where another tab went on with it; return whether there was room for it. */
export function save(conversation) {
  const there = load(conversation.id);
  if (there && there.changed !== conversation.changed) conversation.id = newId();
  const changed = Date.now();
  try {
    localStorage.setItem(PREFIX + conversation.id, JSON.stringify({ ...conversation, changed }));
    conversation.changed = changed;
    return true;
  } catch {
    return false;
  }
}

export const remove = (id) => localStorage.removeItem(PREFIX + id);

export function title(conversation) {
  const text = conversation.messages.find((message) => message.role === "user")?.content.trim() ?? "";
  const line = text.split("\n", 1)[0];
  return line.length > TITLE_LETTERS ? `${line.slice(0, TITLE_LETTERS)}…` : line || "New chat";
}

/** Have `changed` called when another tab changes a conversation. */
export function watch(changed) {
  addEventListener("storage", (event) => event.key?.startsWith(PREFIX) && changed(event.key.slice(PREFIX.length)));
}
