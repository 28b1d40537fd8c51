// The conversation on the screen, and what a screen reader says of it.

import { GONE, OPEN, REFUSED, STOPPED } from "./answering.js";
import { amount, copyButton, digits, el, say, seconds } from "./dom.js";
import { show } from "./markdown.js";

const NEAR = 80; // pixels from the end within which the end is followed
const READ_OUT_MS = 1500;

const WHY = {
  [STOPPED]: () => "Stopped.",
  [GONE]: () => "The server went away in mid-answer. What it had said is kept.",
  [REFUSED]: (answer) => answer.why,
  [OPEN]: () => "Cut off when the page was left. What was said is kept.",
};

/**
 * Draws one conversation.
 *
 * log: where. said: the live region, which gets whole sentences, as they are finished.
 * again: called to answer the last message anew.
 */
export class Chat {
  constructor(log, said, again) {
    Object.assign(this, { log, said, again, parts: new Map(), isFollowed: true });
    log.addEventListener("scroll", () => (this.isFollowed = log.scrollHeight - log.scrollTop - log.clientHeight < NEAR));
    new ResizeObserver(() => this.#follow()).observe(log);
  }

  /** Draw a conversation. running: the answer that is being generated, if any. */
  draw(conversation, running, about) {
    Object.assign(this, { conversation, running, parts: new Map() });
    this.log.replaceChildren(...(conversation.messages.length ? conversation.messages.map((one) => this.#make(one)) : [about]));
    for (const answer of this.parts.keys()) this.update(answer);
    this.#follow(true);
  }

  /** Add a message. */
  add(message, running) {
    this.running = running;
    if (!this.log.querySelector("article")) this.log.replaceChildren();
    this.log.append(this.#make(message));
    this.update(message);
    this.#follow(true);
    this.read = 0;
  }

  /** Draw an answer as it is now. */
  update(answer) {
    const part = this.parts.get(answer);
    if (!part) return;
    const isRunning = answer === this.running;
    show(part.text, answer.content);
    part.thoughts.hidden = !answer.thoughts;
    if (answer.thoughts) show(part.thoughtText, answer.thoughts);
    part.wait.hidden = !isRunning || Boolean(answer.content);
    if (!part.wait.hidden) drawWait(part, answer);
    say(part.state, isRunning ? "" : (WHY[answer.state]?.(answer) ?? (answer.isShort ? "It reached the most tokens it may have." : "")));
    part.state.classList.toggle("bad", answer.state === GONE || answer.state === REFUSED);
    say(part.figures, isRunning || !answer.timings ? "" : figures(answer.timings));
    part.foot.hidden = isRunning;
    part.copy.hidden = !answer.content;
    say(part.again, answer.state && answer.state !== STOPPED ? "Try again" : "Answer anew");
    this.#follow();
  }

  /** Have the sentences read out that were finished since; all that is left where the answer is over. */
  readOut(answer, isOver) {
    if (!isOver && performance.now() < (this.readNext ?? 0)) return;
    const rest = answer.content.slice(this.read);
    const whole = isOver ? rest : (/^[^]*[.!?:\n](?=\s)/.exec(rest)?.[0] ?? "");
    const why = isOver && answer.state ? WHY[answer.state](answer) : "";
    if (!(whole + why).trim()) return;
    this.read += whole.length;
    this.readNext = performance.now() + READ_OUT_MS;
    this.tell(`${whole} ${why}`);
  }

  tell(text) {
    this.said.append(el("p", {}, text));
    while (this.said.children.length > 5) this.said.firstChild.remove();
  }

  #follow(isFollowed = this.isFollowed) {
    this.isFollowed = isFollowed;
    if (isFollowed) this.log.scrollTop = this.log.scrollHeight;
  }

  #make(message) {
    if (message.role === "user") {
      return el("article", { class: "mine" }, el("h2", { class: "unseen" }, "You"), el("div", { class: "text" }, message.content));
    }
    const part = {
      text: el("div", { class: "text" }),
      thoughtText: el("div", { class: "text" }),
      wait: el("div", { class: "wait" }),
      waitBar: el("progress", { max: 1, "aria-label": "Until the first token" }),
      waitText: el("span"),
      state: el("p", { class: "state" }),
      figures: el("p", { class: "figures" }),
      copy: copyButton(() => message.content),
      again: el("button", { type: "button", class: "quiet again", onclick: () => this.again() }),
      foot: el("footer"),
    };
    part.thoughts = el("details", { class: "thoughts" }, el("summary", {}, "Thoughts"), part.thoughtText);
    part.wait.append(part.waitBar, part.waitText);
    part.foot.append(part.state, part.copy, part.again, part.figures);
    this.parts.set(message, part);
    return el("article", {}, el("h2", { class: "unseen" }, "Answer"), part.thoughts, part.text, part.wait, part.foot);
  }
}

function drawWait(part, { progress, thoughts }) {
  if (progress?.share) part.waitBar.value = progress.share;
  else part.waitBar.removeAttribute("value");
  const what = progress?.stage === "reading" ? "Reads the model for the first time" : "Reads the prompt";
  const left = progress?.remaining_s ? `, ${seconds(progress.remaining_s)} left` : "";
  say(part.waitText, thoughts ? "Thinks" : progress ? `${what}, ${Math.round(100 * progress.share)} %${left}` : "Waits for the first token");
}

function figures(timings) {
  const read = timings.bytes_read ? ` · ${amount(timings.bytes_read)} read` : "";
  const speed = timings.predicted_per_second ? ` · ${digits(timings.predicted_per_second)} tokens/s` : "";
  return `${timings.predicted_n} tokens${speed}${read}`;
}
