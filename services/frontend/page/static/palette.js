// Colours of the canvas, from the style sheet: they follow the light or dark scheme of the browser.

const NAMES = [
  "ink", "muted", "line", "ground", "panel", "even", "odd", "prefill", "decode", "waiting", "lost", "accent",
];

export class Palette {
  #onChange;

  constructor(onChange) {
    this.#onChange = onChange;
    this.#read();
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
      this.#read();
      this.#onChange();
    });
  }

  #read() {
    const style = getComputedStyle(document.documentElement);
    for (const name of NAMES) this[name] = style.getPropertyValue(`--${name}`).trim();
    this.font = style.getPropertyValue("--sans").trim();
  }

  // Neighbouring steps have different colours, so that one sees which step a plan, a pass and a result belong to.
  step(step) {
    return step.step_id % 2 ? this.odd : this.even;
  }
}
