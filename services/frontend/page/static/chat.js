// A conversation over /v1/chat/completions, streamed.

import { eventData, request } from "./api.js";
import { byId, element } from "./dom.js";
import { render } from "./markdown.js";

const NUMBERS = [
  "temperature", "top_p", "top_k", "min_p", "max_tokens", "seed", "frequency_penalty", "presence_penalty",
  "repetition_penalty",
];

export class Chat {
  #model;
  #messages = [];
  #running = null;

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
    byId("stop").addEventListener("click", () => this.#running?.abort());
    byId("clear").addEventListener("click", () => this.#clear());
    byId("options-toggle").addEventListener("click", ({ currentTarget: button }) => {
      const shown = button.getAttribute("aria-expanded") !== "true";
      button.setAttribute("aria-expanded", String(shown));
      byId("options").hidden = !shown;
    });
    this.#showEmpty();
  }

  async #send() {
    const text = byId("prompt").value.trim();
    if (!text || this.#running) return;
    let body;
    try {
      body = this.#body(text);
    } catch (error) {
      this.#notice(error.message);
      return;
    }
    byId("prompt").value = "";
    if (!this.#messages.length) byId("messages").replaceChildren();
    const messages = this.#messages; // a new chat has another list
    messages.push({ role: "user", content: text });
    this.#add(element("div", { className: "turn user" }, element("p", { text })));
    this.#setRunning(new AbortController());
    const answers = Array.from({ length: body.n }, () => new Answer(this.#add(element("div", { className: "turn" }))));
    await receive(body, this.#running.signal, answers, () => this.#follow());
    this.#setRunning(null);
    if (answers[0].message) messages.push(answers[0].message);
    else messages.pop();
  }

  // Throws an Error with a text for the user if an option is not valid.
  #body(text) {
    const body = {
      model: this.#model,
      messages: [...this.#system(), ...this.#messages, { role: "user", content: text }],
      stream: true,
      stream_options: { include_usage: true },
      n: this.#copies(),
    };
    for (const name of NUMBERS) if (byId(name).value !== "") body[name] = Number(byId(name).value);
    const tools = parsed("tools", "Tools");
    if (tools) body.tools = tools;
    if (tools && byId("tool_choice").value) body.tool_choice = byId("tool_choice").value;
    const schema = parsed("schema", "Structured output");
    if (schema) body.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
    return body;
  }

  #copies() {
    const { value, max } = byId("parallel");
    return Math.min(Math.max(1, Math.trunc(Number(value))), Number(max));
  }

  #system() {
    const content = byId("system").value.trim();
    return content ? [{ role: "system", content }] : [];
  }

  #setRunning(controller) {
    this.#running = controller;
    byId("stop").hidden = !controller;
    byId("send").hidden = !!controller;
  }

  #clear() {
    this.#running?.abort();
    this.#messages = [];
    this.#showEmpty();
  }

  #showEmpty() {
    byId("messages").replaceChildren(
      element("p", { className: "empty", text: "Send a message, and watch the steps that compute the answer." }));
  }

  #notice(text) {
    this.#add(element("p", { className: "error", role: "alert", text }));
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

// Sends a request and shows its choices in the answers. All of them are in one response: a browser opens few connections
// to a server, and the stream of steps needs one.
async function receive(body, signal, answers, onChange) {
  const began = performance.now();
  let first = 0, usage = null, stopped = false;
  try {
    const response = await request("v1/chat/completions", { method: "POST", body: JSON.stringify(body), signal });
    for await (const event of eventData(response)) {
      if (event.error) throw new Error(event.error.message);
      usage = event.usage ?? usage;
      for (const choice of event.choices ?? []) {
        first ||= performance.now();
        answers[choice.index].add(choice, onChange);
      }
    }
  } catch (error) {
    stopped = error.name === "AbortError";
    if (!stopped) answers[0].fail(error.message);
  }
  const speed = first ? summary(answers.length, began, first, usage) : "no answer";
  for (const answer of answers) answer.end(stopped ? "stopped" : answer === answers[0] ? speed : "");
  onChange();
}

// One answer of the model, while it arrives and afterwards.
class Answer {
  #node;
  #text = "";
  #reasoning = "";
  #calls = [];
  #finish = "";
  #hasBegun = false;
  #scheduled = false;

  constructor(node) {
    this.#node = node;
    this.content = element("div", { className: "markdown" });
    this.thoughts = element("details", { className: "reasoning" }, element("summary", { text: "Reasoning" }));
    this.thoughtText = element("p");
    this.thoughts.append(this.thoughtText);
    this.thoughts.hidden = true;
    this.tools = element("div", { className: "calls" });
    this.foot = element("p", { className: "note", text: "waiting for the first token …" });
    node.append(this.thoughts, this.content, this.tools, this.foot);
  }

  // The answer as a message of the conversation; null if nothing has arrived.
  get message() {
    if (!this.#hasBegun) return null;
    const calls = this.#calls.filter(Boolean);
    return { role: "assistant", content: this.#text, ...(calls.length ? { tool_calls: calls } : {}) };
  }

  add(choice, onChange) {
    this.#hasBegun = true;
    this.#finish = choice.finish_reason ?? this.#finish;
    this.#append(choice.delta);
    this.#draw(onChange);
  }

  fail(reason) {
    this.#node.append(element("p", { className: "error", role: "alert", text: reason }));
  }

  end(note) {
    this.#render();
    const ended = this.#finish && this.#finish !== "stop" ? `ended by ${this.#finish.replace("_", " ")}` : "";
    this.foot.textContent = [note, ended].filter(Boolean).join(", ");
  }

  #append(delta) {
    this.#text += delta.content ?? "";
    this.#reasoning += delta.reasoning ?? delta.reasoning_content ?? "";
    for (const part of delta.tool_calls ?? []) {
      const call = (this.#calls[part.index] ??= { id: "", type: "function", function: { name: "", arguments: "" } });
      call.id ||= part.id ?? "";
      call.function.name += part.function?.name ?? "";
      call.function.arguments += part.function?.arguments ?? "";
    }
  }

  // Draws at most once per frame: parsing the whole answer for every token would be quadratic.
  #draw(onChange) {
    if (this.#scheduled) return;
    this.#scheduled = true;
    requestAnimationFrame(() => {
      this.#scheduled = false;
      this.#render();
      onChange();
    });
  }

  #render() {
    render(this.content, this.#text);
    this.thoughts.hidden = !this.#reasoning;
    this.thoughtText.textContent = this.#reasoning;
    this.tools.replaceChildren(...this.#calls.filter(Boolean).map((call) =>
      element("div", { className: "call" },
        element("h4", { text: `calls ${call.function.name}` }),
        element("pre", {}, element("code", { text: pretty(call.function.arguments) })))));
  }
}

function summary(copies, began, first, usage) {
  const tokens = usage?.completion_tokens ?? 0;
  const seconds = (performance.now() - first) / 1000;
  const speed = tokens > copies && seconds > 0 ? `${((tokens - copies) / seconds).toFixed(1)} tokens/s, ` : "";
  const answers = copies > 1 ? ` in ${copies} answers` : "";
  return `${tokens} tokens${answers}, ${speed}first after ${Math.round(first - began)} ms`;
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

function parsed(id, name) {
  const text = byId(id).value.trim();
  if (!text) return null;
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`${name}: this is not valid JSON: ${error.message}`);
  }
}
