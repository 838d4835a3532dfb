// The visible part of the timeline: an interval on the scheduler's clock, and its pixels.

const LEAST = 0.0005, MOST = 600; // seconds
const STEPS = 9; // in a view whose span nobody has chosen

export class View {
  left = 0; // pixels
  right = 0;
  begin = 0; // seconds
  span = 0.2;
  live = true;
  #chosen = false;

  get end() {
    return this.begin + this.span;
  }

  x(time) {
    return this.left + ((time - this.begin) / this.span) * (this.right - this.left);
  }

  time(x) {
    return this.begin + ((x - this.left) / (this.right - this.left)) * this.span;
  }

  shows(began, ended) {
    return ended >= this.begin && began <= this.end;
  }

  // Follows the newest steps, and stands still while there are none.
  follow(history) {
    const last = history.steps.at(-1);
    if (!this.live || !last) return;
    const period = history.period();
    if (!this.#chosen && period) {
      const wanted = clamp(period * STEPS);
      if (wanted > this.span * 1.4 || wanted < this.span / 1.4) this.span = wanted;
    }
    this.begin = last.applied + 0.02 * this.span - this.span;
  }

  zoom(factor, around = this.begin + this.span / 2) {
    const span = clamp(this.span * factor);
    this.#chosen = true;
    this.begin = around - ((around - this.begin) / this.span) * span;
    this.span = span;
  }

  pan(seconds) {
    this.live = false;
    this.begin += seconds;
  }

  show(began, ended) {
    this.live = false;
    this.#chosen = true;
    const margin = Math.max(0.15 * (ended - began), LEAST);
    this.span = clamp(ended - began + 2 * margin);
    this.begin = began - margin;
  }

  // Moves as little as possible to show an interval.
  reveal(began, ended) {
    this.live = false;
    const margin = 0.05 * this.span;
    if (began < this.begin + margin) this.begin = began - margin;
    else if (ended > this.end - margin) this.begin = ended + margin - this.span;
  }

  // Returns to the newest steps, with a span that fits their pace.
  reset() {
    this.live = true;
    this.#chosen = false;
  }
}

const clamp = (span) => Math.min(MOST, Math.max(LEAST, span));
