// The server: one way to ask it, with the key where it wants one, and its streams as documents.

const KEY = "edge-run/key";

/** What the server refused, in its words. */
export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** The server is not there, or went away while it answered. */
export class Gone extends Error {}

let askKey = async () => "";
let asking = null; // several requests that lack the key wait for one

/** Have `ask(why)` return a key; why: what is wrong with the last one, or nothing. */
export function onKeyNeeded(ask) {
  askKey = ask;
}

export const hasKey = () => Boolean(sessionStorage.getItem(KEY));
export const forgetKey = () => sessionStorage.removeItem(KEY);

/** Return the response. body: a document to be posted. limitMs: beside the wait for a key. Throws Refused, Gone, AbortError. */
export async function ask(path, { body, signal, limitMs } = {}) {
  for (;;) {
    const key = sessionStorage.getItem(KEY);
    const headers = { ...(key && { authorization: `Bearer ${key}` }), ...(body && { "content-type": "application/json" }) };
    const how = { method: body ? "POST" : "GET", headers, body: body && JSON.stringify(body), cache: "no-store" };
    const response = await fetch(path, { ...how, signal: limitMs ? AbortSignal.timeout(limitMs) : signal }).catch(gone);
    if (response.status === 401) {
      if (key === sessionStorage.getItem(KEY)) await newKey(key ? "That is none of the server's keys." : "");
      continue;
    }
    if (!response.ok) {
      const error = (await response.json().catch(() => ({}))).error;
      throw new Refused(response.status, error?.message ?? `The server answered with status ${response.status}.`);
    }
    return response;
  }
}

async function newKey(why) {
  asking ??= askKey(why).finally(() => (asking = null));
  const key = await asking;
  if (/[^!-~]/.test(key)) return newKey("A key has letters, digits and signs of ASCII only.");
  sessionStorage.setItem(KEY, key);
}

/** Yield the documents of a stream. Throws Gone where it ends before its end was said. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read().catch(gone);
    if (done) throw new Gone();
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line === "data: [DONE]") return;
      if (line.startsWith("data: ")) yield JSON.parse(line.slice(6));
    }
  }
}

function gone(error) {
  throw error.name === "AbortError" ? error : new Gone();
}
