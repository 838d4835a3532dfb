// One answer of the model, while it arrives and afterwards.

import { copyButton, element } from "./dom.js";
import { render } from "./markdown.js";

export class Answer {
  #text = "";
  #reasoning = "";
  #calls = [];
  #finish = "";
  #hasBegun = false;
  #scheduled = false;
  #hasEnded = false;

  constructor(node) {
    this.node = node;
    this.content = element("div", { className: "markdown" });
    this.thoughts = element("details", { className: "reasoning" }, element("summary", { text: "Reasoning" }));
    this.thoughtText = element("p");
    this.thoughts.append(this.thoughtText);
    this.thoughts.hidden = true;
    this.tools = element("div", { className: "calls" });
    this.foot = element("p", { className: "note" });
    node.append(this.thoughts, this.content, this.tools, this.foot);
  }

  get text() {
    return this.#text;
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

  // Shows a message of an earlier conversation.
  restore({ content, tool_calls: calls = [] }) {
    this.#hasBegun = true;
    this.#append({ content, tool_calls: calls.map((call, index) => ({ ...call, index })) });
    this.end("");
  }

  note(text) {
    if (this.foot.textContent !== text) this.foot.textContent = text;
  }

  fail(reason) {
    this.foot.before(element("p", { className: "error", role: "alert", text: reason }));
  }

  end(note) {
    this.#render();
    for (const code of this.content.querySelectorAll("pre")) {
      const block = element("div", { className: "block" });
      code.replaceWith(block);
      block.append(code, copyButton(() => code.textContent));
    }
    this.#hasEnded = true;
    const ended = this.#finish && this.#finish !== "stop" ? `ended by ${this.#finish.replace("_", " ")}` : "";
    this.note([note, ended].filter(Boolean).join(", "));
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
      if (!this.#hasEnded) this.#render();
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

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}
