// Elements by id, and new elements whose text is never read as HTML.

export const byId = (id) => document.getElementById(id);

export function element(tag, { className = "", text = "", ...attributes } = {}, ...children) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text) made.textContent = text;
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

export function table(head, rows, numeric = []) {
  const cells = (tag, values) =>
    values.map((value, i) => element(tag, { text: String(value), className: numeric.includes(i) ? "number" : "" }));
  return element("table", {},
    element("thead", {}, element("tr", {}, ...cells("th", head))),
    element("tbody", {}, ...rows.map((row) => element("tr", {}, ...cells("td", row)))));
}

export const count = (number, noun) => `${number} ${noun}${number === 1 ? "" : "s"}`;

export const actions = (...buttons) => element("div", { className: "actions" }, ...buttons);

// A button that copies a text; it says so for a moment.
export function copyButton(text) {
  const button = element("button", { type: "button", text: "Copy", className: "copy" });
  button.addEventListener("click", async () => {
    button.textContent = (await copied(text())) ? "Copied" : "Not allowed";
    setTimeout(() => (button.textContent = "Copy"), 1500);
  });
  return button;
}

// A page over HTTP from another machine has no clipboard of its own; the old command works there.
async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const area = element("textarea", { className: "hidden" });
    area.value = text;
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done;
  }
}
