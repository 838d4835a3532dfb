// A conversation over /v1/chat/completions, streamed. It survives a reload of the tab, in the session storage.

import { Answer } from "./answer.js";
import { eventData, request } from "./api.js";
import { actions, byId, copyButton, count, element } from "./dom.js";
import { InvalidOption, options } from "./options.js";

const STORED = "chat"; // key in the session storage

export class Chat {
  #model;
  #turns = []; // {message, nodes}: of the conversation, oldest first
  #running = null; // {controller, progress}
  #phase = "ready"; // of the engine

  constructor(model) {
    this.#model = model;
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#send();
    });
    byId("prompt").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.#send();
      }
    });
    byId("stop").addEventListener("click", () => this.#running?.controller.abort());
    byId("clear").addEventListener("click", () => this.#clear());
    byId("options-toggle").addEventListener("click", () => showOptions(byId("options").hidden));
    this.#showEmpty();
    this.#restore();
    byId("prompt").focus();
  }

  // Takes the phase of the engine, which an open answer waits for.
  setPhase(phase) {
    this.#phase = phase;
    this.#running?.progress.show(phase);
  }

  #send() {
    const text = byId("prompt").value.trim();
    if (!text || this.#running) return;
    if (this.#answer({ role: "user", content: text })) byId("prompt").value = "";
  }

  // Sends the conversation, with a new message at its end if there is one. Returns whether the options are valid.
  #answer(message) {
    let body;
    try {
      body = { ...options(), model: this.#model, stream: true };
    } catch (error) {
      if (!(error instanceof InvalidOption)) throw error;
      showOptions(true);
      error.show();
      return false;
    }
    if (message) this.#addUser(message);
    body.messages = [...this.#system(), ...this.#turns.map((turn) => turn.message)];
    body.stream_options = { include_usage: true, continuous_usage_stats: true };
    this.#receive(body);
    return true;
  }

  async #receive(body) {
    const turns = this.#turns; // a new chat has another list
    const answers = Array.from({ length: body.n }, () => this.#newAnswer());
    const progress = new Progress(answers);
    this.#setRunning({ controller: new AbortController(), progress });
    progress.show(this.#phase);
    await receive(body, this.#running.controller.signal, progress, () => {
      progress.show(this.#phase);
      this.#follow();
    });
    const { message } = answers[0];
    if (message) turns.push({ message, nodes: answers.map((answer) => answer.node) });
    else if (turns === this.#turns) this.#giveBack(turns.pop());
    this.#setRunning(null);
    if (turns === this.#turns) this.#store();
    if (document.activeElement === document.body) byId("prompt").focus();
  }

  // Puts a message that was not answered into the prompt again.
  #giveBack({ message, nodes }) {
    nodes[0].querySelector(".actions").remove();
    byId("prompt").value ||= message.content;
  }

  #addUser(message) {
    const node = element("div", { className: "turn user" }, element("p", { text: message.content }));
    node.append(actions(this.#button("Edit", node, () => {
      byId("prompt").value = message.content;
      byId("prompt").focus();
    }, "Change this message; what follows it is removed")));
    if (!this.#turns.length) byId("messages").replaceChildren();
    this.#add(node);
    this.#turns.push({ message, nodes: [node] });
    this.#store();
  }

  #newAnswer() {
    const node = this.#add(element("div", { className: "turn answer" }));
    const answer = new Answer(node);
    const again = this.#button("Regenerate", node, () => this.#answer(null), "Answer again, in place of this answer");
    again.classList.add("again");
    node.append(actions(copyButton(() => answer.text), again));
    return answer;
  }

  // A button that removes the turn of a node, and what follows it, and then acts.
  #button(text, node, act, title) {
    const button = element("button", { type: "button", text, title });
    button.addEventListener("click", () => {
      const at = this.#turns.findIndex((turn) => turn.nodes.includes(node));
      if (this.#running || at < 0) return;
      for (const turn of this.#turns.splice(at)) for (const gone of turn.nodes) gone.remove();
      this.#store();
      act();
    });
    return button;
  }

  #system() {
    const content = byId("system").value.trim();
    return content ? [{ role: "system", content }] : [];
  }

  #setRunning(running) {
    this.#running = running;
    byId("stop").hidden = !running;
    byId("send").hidden = !!running;
    byId("messages").setAttribute("aria-busy", String(!!running));
  }

  #clear() {
    this.#running?.controller.abort();
    this.#turns = [];
    this.#store();
    this.#showEmpty();
    byId("prompt").focus();
  }

  #showEmpty() {
    byId("messages").replaceChildren(
      element("p", { className: "empty", text: "Send a message, and watch the steps that compute the answer." }));
  }

  #store() {
    const messages = this.#turns.map((turn) => turn.message);
    try {
      if (messages.length) sessionStorage.setItem(STORED, JSON.stringify(messages));
      else sessionStorage.removeItem(STORED);
    } catch {
      // it is full, or switched off
    }
  }

  #restore() {
    for (const message of stored()) {
      if (message.role === "user") {
        this.#addUser(message);
        continue;
      }
      const answer = this.#newAnswer();
      answer.restore(message);
      this.#turns.push({ message, nodes: [answer.node] });
    }
    this.#store();
  }

  #add(node) {
    byId("messages").append(node);
    this.#follow(true);
    return node;
  }

  // Keeps the end in view, unless the user has scrolled up.
  #follow(always = false) {
    const box = byId("messages");
    if (always || box.scrollHeight - box.scrollTop - box.clientHeight < 120) box.scrollTop = box.scrollHeight;
  }
}

function stored() {
  try {
    return JSON.parse(sessionStorage.getItem(STORED) ?? "[]");
  } catch {
    return []; // it is switched off
  }
}

function showOptions(shown) {
  byId("options-toggle").setAttribute("aria-expanded", String(shown));
  byId("options").hidden = !shown;
}

// Sends a request and shows its choices in the answers. All of them are in one response: a browser opens few connections
// to a server, and the stream of steps needs one.
async function receive(body, signal, progress, onChange) {
  let stopped = false;
  try {
    const response = await request("v1/chat/completions", { method: "POST", body: JSON.stringify(body), signal });
    for await (const event of eventData(response)) {
      if (event.error) throw new Error(event.error.message);
      progress.take(event, onChange);
    }
  } catch (error) {
    stopped = error.name === "AbortError";
    if (!stopped) progress.answers[0].fail(error.message);
  }
  progress.end(stopped);
  onChange();
}

// The numbers below the answers to one request.
class Progress {
  #began = performance.now();
  #first = 0;
  #tokens = 0;
  #hasEnded = false;

  constructor(answers) {
    this.answers = answers;
  }

  take(event, onChange) {
    this.#tokens = event.usage?.completion_tokens ?? this.#tokens;
    for (const choice of event.choices ?? []) {
      this.#first ||= performance.now();
      this.answers[choice.index].add(choice, onChange);
    }
  }

  show(phase) {
    if (this.#hasEnded) return;
    const state = phase !== "ready" && phase !== "draining" ? "recovering; the answer goes on" :
      this.#first ? `streaming, ${this.#counts()}` : "waiting for the first token …";
    for (const answer of this.answers) answer.note(answer === this.answers[0] ? state : "");
  }

  end(stopped) {
    this.#hasEnded = true;
    const latency = `first after ${Math.round(this.#first - this.#began)} ms`;
    const numbers = this.#first ? `${this.#counts()}, ${latency}` : "no answer";
    for (const answer of this.answers) answer.end(stopped ? "stopped" : answer === this.answers[0] ? numbers : "");
  }

  #counts() {
    const copies = this.answers.length, later = this.#tokens - copies, seconds = (performance.now() - this.#first) / 1000;
    const speed = later > 0 && seconds > 0 ? `, ${(later / seconds).toFixed(1)} tokens/s` : "";
    return `${count(this.#tokens, "token")}${copies > 1 ? ` in ${copies} answers` : ""}${speed}`;
  }
}
