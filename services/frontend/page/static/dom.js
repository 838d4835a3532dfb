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
