// The canvas with lanes and charts: drawing, pointer and keyboard.

import { byId, count } from "./dom.js";
import { Lanes } from "./lanes.js";
import { Palette } from "./palette.js";
import { Strips } from "./strips.js";
import { View } from "./view.js";

const AXIS = 24, GUTTER = 108, NARROW_GUTTER = 76, MARGIN = 34;

export class Timeline {
  selected = null;
  #canvas = byId("timeline");
  #pen = this.#canvas.getContext("2d");
  #view = new View();
  #history;
  #lanes;
  #strips;
  #colours = new Palette(() => this.invalidate());
  #onSelect;
  #pending = false;
  #drag = null;

  // onSelect is called with the selected step, or null.
  constructor(history, onSelect) {
    this.#history = history;
    this.#onSelect = onSelect;
    this.#lanes = new Lanes(history);
    this.#strips = new Strips(history);
    new ResizeObserver(() => this.invalidate()).observe(this.#canvas.parentElement);
    this.#canvas.addEventListener("keydown", (event) => this.#onKey(event));
    this.#canvas.addEventListener("pointerdown", (event) => this.#onDown(event));
    this.#canvas.addEventListener("pointermove", (event) => this.#onMove(event));
    this.#canvas.addEventListener("pointerup", (event) => this.#onUp(event));
    this.#canvas.addEventListener("pointercancel", () => (this.#drag = null));
    this.#canvas.addEventListener("wheel", (event) => this.#onWheel(event), { passive: false });
    byId("pause").addEventListener("click", () => this.#setLive(!this.#view.live));
    byId("zoom-in").addEventListener("click", () => this.#zoom(0.5));
    byId("zoom-out").addEventListener("click", () => this.#zoom(2));
    byId("fit").addEventListener("click", () => this.#fit());
  }

  get live() {
    return this.#view.live;
  }

  // Draws in the next frame.
  invalidate() {
    if (this.#pending) return;
    this.#pending = true;
    requestAnimationFrame(() => {
      this.#pending = false;
      this.#draw();
    });
  }

  // Shows an interval of time and stops following.
  show(began, ended) {
    const least = 4 * this.#history.period();
    const more = Math.max(0, (least - (ended - began)) / 2);
    this.#view.show(began - more, ended + more);
    this.#changed();
  }

  select(step) {
    this.selected = step;
    if (step) this.#view.reveal(step.planned, step.applied);
    this.#onSelect(step);
    this.#changed();
  }

  #changed() {
    byId("pause").setAttribute("aria-pressed", String(!this.#view.live));
    byId("pause").textContent = this.#view.live ? "Pause" : "Live";
    this.invalidate();
  }

  #setLive(live) {
    this.#view.live = live;
    this.#changed();
  }

  #zoom(factor) {
    const step = this.selected;
    this.#view.zoom(factor, step ? (step.planned + step.applied) / 2 : this.#view.live ? this.#view.end : undefined);
    this.#changed();
  }

  #fit() {
    this.#view.reset();
    this.#changed();
  }

  // -- input

  #onKey(event) {
    const steps = this.#history.steps;
    const at = this.selected ? steps.indexOf(this.selected) : steps.length;
    const actions = {
      ArrowLeft: () => this.select(steps[Math.max(0, at - 1)] ?? null),
      ArrowRight: () => this.select(steps[Math.min(steps.length - 1, at + 1)] ?? null),
      Home: () => this.select(steps[0] ?? null),
      End: () => this.select(steps.at(-1) ?? null),
      "+": () => this.#zoom(0.5),
      "=": () => this.#zoom(0.5),
      "-": () => this.#zoom(2),
      0: () => this.#fit(),
      " ": () => this.#setLive(!this.#view.live),
      Escape: () => (this.selected ? this.select(null) : this.#fit()),
    };
    if (!(event.key in actions) || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    actions[event.key]();
  }

  #onDown(event) {
    this.#canvas.setPointerCapture(event.pointerId);
    this.#drag = { x: event.offsetX, moved: false };
  }

  #onMove(event) {
    if (!this.#drag) return;
    const pixels = this.#drag.x - event.offsetX;
    if (!this.#drag.moved && Math.abs(pixels) < 4) return;
    this.#drag = { x: event.offsetX, moved: true };
    this.#view.pan((pixels / (this.#view.right - this.#view.left)) * this.#view.span);
    this.#changed();
  }

  #onUp(event) {
    const dragged = this.#drag?.moved;
    this.#drag = null;
    if (dragged || event.offsetX < this.#view.left) return;
    const { offsetX: x, offsetY: y } = event, steps = this.#visible();
    this.select(y < this.#strips.top - 4 ? this.#lanes.hit(this.#view, steps, x, y) : this.#strips.hit(this.#view, steps, x));
  }

  #onWheel(event) {
    if (!event.ctrlKey && !event.shiftKey && Math.abs(event.deltaX) <= Math.abs(event.deltaY)) return;
    event.preventDefault();
    if (event.ctrlKey) this.#view.zoom(Math.exp(event.deltaY / 300), this.#view.time(event.offsetX));
    else this.#view.pan(((event.deltaX || event.deltaY) / (this.#view.right - this.#view.left)) * this.#view.span);
    this.#changed();
  }

  // -- drawing

  // Steps that overlap the view, and a few more on both sides for lines that lead out of it.
  #visible() {
    const { steps } = this.#history, begin = Math.max(0, this.#history.indexAt(this.#view.begin) - 1);
    const visible = [];
    for (let i = begin; i < steps.length; i++) {
      visible.push(steps[i]);
      if (steps[i].planned > this.#view.end && visible.length > 2) break;
    }
    return visible;
  }

  #draw() {
    const width = this.#canvas.parentElement.clientWidth;
    this.#lanes.top = AXIS;
    this.#strips.top = AXIS + this.#lanes.height + 10;
    this.#resize(width, this.#strips.top + this.#strips.height);
    const pen = this.#pen, view = this.#view, colours = this.#colours;
    view.left = width < 560 ? NARROW_GUTTER : GUTTER;
    view.right = width - MARGIN;
    view.follow(this.#history);
    pen.clearRect(0, 0, width, this.#canvas.clientHeight);
    const steps = this.#visible();
    pen.save();
    pen.beginPath();
    pen.rect(view.left, 0, view.right - view.left, this.#canvas.clientHeight);
    pen.clip();
    this.#drawAxis();
    this.#lanes.draw(pen, view, colours, steps, this.selected);
    this.#strips.draw(pen, view, colours, steps, this.selected);
    this.#drawRecoveries();
    pen.restore();
    this.#drawLabels();
    this.#describe();
  }

  #resize(width, height) {
    const ratio = window.devicePixelRatio || 1;
    const wanted = [Math.round(width * ratio), Math.round(height * ratio)];
    if (this.#canvas.width !== wanted[0] || this.#canvas.height !== wanted[1]) {
      [this.#canvas.width, this.#canvas.height] = wanted;
      this.#canvas.style.width = `${width}px`;
      this.#canvas.style.height = `${height}px`;
    }
    this.#pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  }

  #drawAxis() {
    const pen = this.#pen, view = this.#view, colours = this.#colours;
    if (!this.#history.steps.length) return;
    const origin = this.#history.steps[0].planned;
    const tick = niceTick((view.span / (view.right - view.left)) * 96);
    pen.font = `11px ${colours.font}`;
    pen.textAlign = "left";
    pen.textBaseline = "middle";
    for (let i = Math.ceil((view.begin - origin) / tick); origin + i * tick <= view.end; i++) {
      const x = Math.round(view.x(origin + i * tick)) + 0.5;
      pen.strokeStyle = colours.line;
      pen.lineWidth = 1;
      pen.beginPath();
      pen.moveTo(x, 6);
      pen.lineTo(x, this.#canvas.clientHeight);
      pen.stroke();
      pen.fillStyle = colours.muted;
      pen.fillText(timeText(i * tick, tick), x + 4, 12);
    }
  }

  #drawRecoveries() {
    const pen = this.#pen, view = this.#view, colours = this.#colours;
    for (const { began, ended } of this.#history.recoveries) {
      const until = ended || Math.max(view.end, began);
      if (!view.shows(began, until)) continue;
      const x = view.x(began), width = Math.max(2, view.x(until) - x);
      pen.fillStyle = colours.lost;
      pen.globalAlpha = 0.16;
      pen.fillRect(x, AXIS, width, this.#canvas.clientHeight - AXIS);
      pen.globalAlpha = 1;
      pen.fillRect(x, AXIS, 1.5, this.#canvas.clientHeight - AXIS);
      pen.font = `600 12px ${colours.font}`;
      pen.textAlign = "left";
      const text = ended ? `recovery, ${(ended - began).toFixed(2)} s` : "recovery";
      if (width > pen.measureText(text).width + 12) pen.fillText(text, Math.max(view.left, x) + 8, AXIS + 20);
    }
  }

  #drawLabels() {
    const pen = this.#pen, colours = this.#colours, view = this.#view;
    pen.textBaseline = "middle";
    for (const { text, y } of this.#lanes.labels()) {
      pen.font = `500 12px ${colours.font}`;
      pen.textAlign = "left";
      pen.fillStyle = colours.ink;
      pen.fillText(text, 4, y);
    }
    const isNarrow = view.left < GUTTER;
    for (const { text, short, value, y } of this.#strips.labels(this.selected ?? this.#history.steps.at(-1))) {
      pen.font = `11px ${colours.font}`;
      pen.textAlign = "left";
      pen.fillStyle = colours.muted;
      pen.fillText(isNarrow ? short : text, 4, y - 7);
      pen.font = `500 11px ${colours.font}`;
      pen.fillStyle = colours.ink;
      pen.textAlign = "right";
      pen.fillText(value, view.left - 8, y + 7);
    }
    pen.font = `10px ${colours.font}`;
    pen.textAlign = "left";
    pen.fillStyle = colours.muted;
    for (const { text, y } of this.#strips.scale()) pen.fillText(text, view.right + 4, y);
  }

  #describe() {
    const { steps, numRanks } = this.#history, last = steps.at(-1), step = this.selected;
    const text = step ? `Step ${step.step_id} of epoch ${step.epoch} is selected.` :
      last ? `${count(steps.length, "step")} on ${count(numRanks, "rank")}; ${last.steps_in_flight} in flight, ${count(last.num_running, "request")}.` :
        "No steps yet.";
    if (this.#canvas.getAttribute("aria-label") !== text) this.#canvas.setAttribute("aria-label", text);
  }
}

// The least of 1, 2, 5, 10, ... that is not below a number of seconds.
function niceTick(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].map((factor) => factor * power).find((tick) => tick >= least);
}

function timeText(seconds, tick) {
  const digits = Math.max(0, -Math.floor(Math.log10(tick) + 1e-9));
  return tick >= 1 ? `${seconds.toFixed(0)} s` : `${seconds.toFixed(Math.min(6, digits))} s`;
}
