// An answer: what is asked for, and what comes of it.

import { Gone, Refused, ask, events } from "./server.js";

/** The settings that a chat may have: name in the API, label, and the numbers that it takes. */
export const SETTINGS = [
  ["temperature", "Temperature", { min: 0, max: 5, step: 0.05 }],
  ["top_p", "Top p", { min: 0, max: 1, step: 0.01 }],
  ["top_k", "Top k", { min: 0, max: 1000, step: 1 }],
  ["min_p", "Min p", { min: 0, max: 1, step: 0.01 }],
  ["repeat_penalty", "Repeat penalty", { min: 0.5, max: 2, step: 0.01 }],
  ["max_tokens", "Most tokens", { min: 1, max: 1000000, step: 1 }],
  ["seed", "Seed", { min: 0, max: 4294967294, step: 1 }],
];

// How an incomplete answer stands. One that is open and that nobody generates was cut off by a reload.
export const OPEN = "open", STOPPED = "stopped", GONE = "gone", REFUSED = "refused";

/**
 * Answer a conversation, whose last message is `answer`; `changed` is called when that has changed.
 *
 * model: its name. isChat: whether the model has a template; without one it continues the text.
 */
export async function generate(conversation, answer, model, isChat, signal, changed) {
  const body = { model, stream: true, return_progress: true, ...conversation.settings };
  // Without what got no answer: of many templates, the roles must alternate.
  const answered = conversation.messages.slice(0, -1)
    .filter(({ content }, number, said) => content && said[number + 1]?.content !== "");
  if (isChat) {
    const system = conversation.system.trim() ? [{ role: "system", content: conversation.system }] : [];
    body.messages = [...system, ...answered.map(({ role, content }) => ({ role, content }))];
  } else {
    body.prompt = conversation.system + answered.map(({ content }) => content).join("");
    body.max_tokens ??= -1; // or it is 16, as OpenAI's
  }
  answer.state = OPEN;
  try {
    const path = isChat ? "v1/chat/completions" : "v1/completions";
    for await (const event of events(await ask(path, { body, signal }))) {
      if (event.error) throw new Refused(0, event.error.message);
      take(answer, event);
      changed();
    }
    delete answer.state;
  } catch (error) {
    if (error.name === "AbortError") answer.state = STOPPED;
    else if (error instanceof Gone) answer.state = GONE;
    else Object.assign(answer, { state: REFUSED, why: error.message });
  } finally {
    delete answer.progress;
    changed();
  }
}

function take(answer, event) {
  const [choice] = event.choices;
  answer.content += choice?.delta?.content ?? choice?.text ?? "";
  if (choice?.delta?.reasoning_content) answer.thoughts = (answer.thoughts ?? "") + choice.delta.reasoning_content;
  if (choice?.finish_reason === "length") answer.isShort = true;
  answer.progress = event.prompt_progress;
  if (event.timings) answer.timings = event.timings;
}
