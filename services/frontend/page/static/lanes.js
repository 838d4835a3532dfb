// The lanes of the timeline: one for the scheduler, one per rank.

const SCHEDULER = 40;

export class Lanes {
  top = 0;

  constructor(history) {
    this.history = history;
  }

  get rankHeight() {
    const ranks = this.history.numRanks;
    return ranks > 4 ? 36 : ranks > 2 ? 38 : 46;
  }

  get height() {
    return SCHEDULER + Math.max(1, this.history.numRanks) * this.rankHeight;
  }

  rankTop(rank) {
    return this.top + SCHEDULER + rank * this.rankHeight;
  }

  draw(pen, view, colours, steps, selected) {
    this.#drawGround(pen, view, colours);
    for (const step of steps) this.#drawArrows(pen, view, colours, step, dimmed(step, selected));
    for (const step of steps) this.#drawStep(pen, view, colours, step, dimmed(step, selected));
    pen.globalAlpha = 1;
    if (selected) this.#outline(pen, view, colours, selected);
  }

  #drawGround(pen, view, colours) {
    const ranks = Math.max(1, this.history.numRanks);
    for (let rank = 0; rank < ranks; rank++) {
      pen.fillStyle = colours.panel;
      pen.fillRect(view.left, this.rankTop(rank) + 3, view.right - view.left, this.rankHeight - 6);
    }
    pen.fillStyle = colours.panel;
    pen.fillRect(view.left, this.top + 3, view.right - view.left, SCHEDULER - 6);
  }

  labels() {
    const ranks = Array.from({ length: Math.max(1, this.history.numRanks) }, (_, rank) => ({
      text: `rank ${rank}`, y: this.rankTop(rank) + this.rankHeight / 2,
    }));
    return [{ text: "scheduler", y: this.top + SCHEDULER / 2 }, ...ranks];
  }

  #drawArrows(pen, view, colours, step, alpha) {
    if (view.span > 400 * Math.max(1e-4, step.applied - step.planned)) return;
    pen.strokeStyle = colours.step(step);
    pen.globalAlpha = 0.55 * alpha;
    pen.lineWidth = 1;
    for (const rank of step.ranks) {
      if (!rank.forward_began) continue;
      const y = this.#queueY(rank.rank);
      line(pen, view.x(step.dispatched), this.top + 17, view.x(step.dispatched), y + 2);
      if (rank.returns_result) {
        const from = this.#passY(rank.rank), sent = rank.sent || rank.sampled || rank.forward_ended;
        line(pen, view.x(sent), from, view.x(step.result_received), this.top + 36);
      }
    }
  }

  #drawStep(pen, view, colours, step, alpha) {
    const colour = colours.step(step);
    pen.fillStyle = colour;
    pen.globalAlpha = alpha;
    block(pen, view, step.planned, step.dispatched, this.top + 7, 11);
    pen.globalAlpha = 0.5 * alpha;
    block(pen, view, step.result_received, step.applied, this.top + 23, 11);
    for (const rank of step.ranks) this.#drawPass(pen, view, colours, step, rank, alpha);
  }

  #drawPass(pen, view, colours, step, rank, alpha) {
    if (!rank.forward_began) return;
    const y = this.#passY(rank.rank), height = this.#passHeight;
    pen.fillStyle = colours.step(step);
    pen.globalAlpha = alpha;
    block(pen, view, rank.forward_began, rank.forward_ended, y, height);
    pen.globalAlpha = 0.4 * alpha;
    const done = Math.max(rank.forward_ended, rank.sent || rank.sampled);
    if (done > rank.forward_ended) block(pen, view, rank.forward_ended, done, y, height);
    pen.globalAlpha = 0.5 * alpha;
    if (step.dispatched < rank.forward_began)
      block(pen, view, step.dispatched, rank.forward_began, this.#queueY(rank.rank), 4);
    const width = view.x(rank.forward_ended) - view.x(rank.forward_began);
    if (width < 22) return;
    pen.globalAlpha = 1;
    pen.fillStyle = alpha < 1 ? colours.ink : colours.ground;
    pen.font = `600 11px ${colours.font}`;
    pen.textAlign = "left";
    pen.textBaseline = "middle";
    const text = String(step.step_id);
    const x = Math.max(view.left, view.x(rank.forward_began)) + 5;
    if (x + pen.measureText(text).width < view.x(rank.forward_ended) - 2) pen.fillText(text, x, y + height / 2 + 0.5);
  }

  get #passHeight() {
    return this.rankHeight - 20;
  }

  #passY(rank) {
    return this.rankTop(rank) + 6;
  }

  #queueY(rank) {
    return this.rankTop(rank) + this.rankHeight - 11;
  }

  #outline(pen, view, colours, step) {
    pen.strokeStyle = colours.ink;
    pen.lineWidth = 1.5;
    for (const rank of step.ranks) {
      if (!rank.forward_began) continue;
      const x = view.x(rank.forward_began), width = Math.max(3, view.x(rank.forward_ended) - x);
      pen.strokeRect(x - 1, this.#passY(rank.rank) - 1, width + 2, this.#passHeight + 2);
    }
    const x = view.x(step.planned);
    pen.strokeRect(x - 1, this.top + 6, Math.max(3, view.x(step.dispatched) - x) + 2, 13);
  }

  // Returns the step at a point; null if there is none.
  hit(view, steps, x, y) {
    const slack = (3 / (view.right - view.left)) * view.span;
    const time = view.time(x);
    const inside = (began, ended) => time >= began - slack && time <= ended + slack;
    if (y < this.top + SCHEDULER) {
      const upper = y < this.top + SCHEDULER / 2;
      return nearest(steps, time, 3 * slack, (step) =>
        upper ? [step.planned, step.dispatched] : [step.result_received, step.applied]);
    }
    const rank = Math.floor((y - this.top - SCHEDULER) / this.rankHeight);
    const waits = y > this.#queueY(rank) - 3;
    return steps.findLast((step) => step.ranks.some((times) =>
      times.rank === rank && times.forward_began &&
      (waits ? inside(step.dispatched, times.forward_began) : inside(times.forward_began, times.sent || times.forward_ended))))
      ?? null;
  }
}

function dimmed(step, selected) {
  return !selected || step === selected ? 1 : 0.45;
}

function block(pen, view, began, ended, y, height) {
  if (!view.shows(began, ended)) return;
  const x = view.x(began), width = Math.max(2, view.x(ended) - x - (view.x(ended) - x > 6 ? 1 : 0));
  pen.beginPath();
  pen.roundRect(x, y, width, height, Math.min(2, width / 2));
  pen.fill();
}

function line(pen, x1, y1, x2, y2) {
  pen.beginPath();
  pen.moveTo(Math.round(x1) + 0.5, y1);
  pen.lineTo(Math.round(x2) + 0.5, y2);
  pen.stroke();
}

function nearest(steps, time, most, interval) {
  let best = null, least = most;
  for (const step of steps) {
    const [began, ended] = interval(step);
    const distance = Math.max(began - time, time - ended, 0);
    if (distance <= least) [best, least] = [step, distance];
  }
  return best;
}
