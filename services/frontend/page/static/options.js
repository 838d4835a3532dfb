// The options below the prompt as fields of a request. What is not valid is named beside its field.

import { byId, element } from "./dom.js";

const NUMBERS = [
  "temperature", "top_p", "top_k", "min_p", "max_tokens", "seed", "frequency_penalty", "presence_penalty",
  "repetition_penalty",
];

export class InvalidOption extends Error {
  constructor(field, message) {
    super(message);
    this.field = field;
  }

  // Shows the message beside the field until the field changes.
  show() {
    const { field } = this, text = element("span", { className: "error", role: "alert", text: this.message });
    field.nextElementSibling?.matches(".error") && field.nextElementSibling.remove();
    field.after(text);
    field.setAttribute("aria-invalid", "true");
    field.addEventListener("input", () => {
      text.remove();
      field.removeAttribute("aria-invalid");
    }, { once: true });
    field.focus();
    text.scrollIntoView({ block: "nearest" });
  }
}

// Returns fields of a request's body. Throws InvalidOption.
export function options() {
  const body = { n: number("parallel") ?? 1 };
  for (const name of NUMBERS) {
    const value = number(name);
    if (value !== null) body[name] = value;
  }
  const tools = parsed("tools", "Tools");
  if (tools) body.tools = tools;
  if (tools && byId("tool_choice").value) body.tool_choice = byId("tool_choice").value;
  const schema = parsed("schema", "Structured output");
  if (schema) body.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
  return body;
}

// The number in a field, null if it is empty. The browser knows the limits; its own message cannot be seen in a form
// that is closed.
function number(id) {
  const field = byId(id), { validity, min, max, step } = field;
  const name = field.parentElement.firstChild.textContent;
  if (validity.badInput) throw new InvalidOption(field, `${name}: this is not a number`);
  if (validity.rangeUnderflow) throw new InvalidOption(field, `${name}: at least ${min}`);
  if (validity.rangeOverflow) throw new InvalidOption(field, `${name}: at most ${max}`);
  if (step === "1" && validity.stepMismatch) throw new InvalidOption(field, `${name}: a whole number`);
  return field.value === "" ? null : Number(field.value);
}

function parsed(id, name) {
  const text = byId(id).value.trim();
  if (!text) return null;
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new InvalidOption(byId(id), `${name}: this is not valid JSON: ${error.message}`);
  }
}
