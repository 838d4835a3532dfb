// Charts below the lanes, on the same axis of time: what the batch queue, the steps and the cache hold.

const GAP = 8;

export class Strips {
  top = 0;
  #tops = []; // text of the largest value that each strip shows

  constructor(history) {
    this.history = history;
  }

  get strips() {
    return this.history.steps.some((step) => step.draft_tokens) ? ALL : WITHOUT_DRAFTS;
  }

  get height() {
    return this.strips.reduce((sum, strip) => sum + strip.height + GAP, 0);
  }

  draw(pen, view, colours, steps, selected) {
    let y = this.top;
    this.#tops = [];
    for (const strip of this.strips) {
      pen.fillStyle = colours.panel;
      pen.fillRect(view.left, y, view.right - view.left, strip.height);
      this.#tops.push(strip.draw(pen, view, colours, steps, y, strip.height));
      if (selected) {
        const [began, ended] = extent(selected);
        pen.fillStyle = colours.ink;
        pen.globalAlpha = 0.1;
        pen.fillRect(view.x(began), y, Math.max(2, view.x(ended) - view.x(began)), strip.height);
        pen.globalAlpha = 1;
      }
      y += strip.height + GAP;
    }
  }

  // Names, a long and a short one, and value of each strip, for the step that is selected or the latest one.
  labels(step) {
    let y = this.top;
    return this.strips.map((strip) => {
      const label = { text: strip.name, short: strip.short, value: step ? strip.value(step) : "", y: y + strip.height / 2 };
      y += strip.height + GAP;
      return label;
    });
  }

  // The scale of each strip, for its right side.
  scale() {
    let y = this.top;
    return this.strips.flatMap(({ height }, i) => {
      const ends = [{ text: this.#tops[i], y: y + 6 }, { text: "0", y: y + height - 5 }];
      y += height + GAP;
      return ends;
    });
  }

  hit(view, steps, x) {
    const time = view.time(x);
    return steps.findLast((step) => extent(step)[0] <= time) ?? null;
  }
}

// The time of a step's forward pass on the first rank that measured it.
function extent(step) {
  const rank = step.ranks.find((times) => times.forward_began);
  return rank ? [rank.forward_began, rank.forward_ended] : [step.dispatched, step.result_received];
}

function bars(pen, view, steps, y, height, parts) {
  const most = Math.max(1, ...steps.map((step) => parts.reduce((sum, [value]) => sum + value(step), 0)));
  for (const step of steps) {
    const [began, ended] = extent(step), x = view.x(began), full = view.x(ended) - x;
    const width = Math.max(1.5, full - (full > 6 ? 1 : 0));
    let base = y + height - 2;
    for (const [value, colour] of parts) {
      const tall = (value(step) / most) * (height - 6);
      pen.fillStyle = colour;
      pen.fillRect(x, base - tall, width, tall);
      base -= tall;
    }
  }
  return String(most);
}

// A value holds from one dispatch to the next.
function stairs(pen, view, steps, y, height, value, most, colour, filled) {
  if (!steps.length) return;
  const at = (step) => y + height - 3 - (value(step) / most) * (height - 8);
  pen.beginPath();
  steps.forEach((step, i) => {
    const x = view.x(step.dispatched);
    if (i) pen.lineTo(x, at(steps[i - 1]));
    if (i) pen.lineTo(x, at(step));
    else pen.moveTo(x, at(step));
  });
  const last = steps.at(-1), end = Math.min(view.right, view.x(last.applied));
  pen.lineTo(Math.max(end, view.x(last.dispatched)), at(last));
  pen.strokeStyle = colour;
  pen.lineWidth = 1.5;
  pen.stroke();
  if (!filled) return;
  pen.lineTo(Math.max(end, view.x(last.dispatched)), y + height);
  pen.lineTo(view.x(steps[0].dispatched), y + height);
  pen.fillStyle = colour;
  pen.globalAlpha = 0.15;
  pen.fill();
  pen.globalAlpha = 1;
}

const most = (steps, value, least) => Math.max(least, ...steps.map(value));

const ALL = [
  {
    name: "steps in flight", short: "in flight", height: 30, value: (step) => String(step.steps_in_flight),
    draw(pen, view, colours, steps, y, height) {
      const depth = (step) => step.steps_in_flight;
      const top = most(steps, depth, 2);
      stairs(pen, view, steps, y, height, depth, top, colours.accent, true);
      return String(top);
    },
  },
  {
    name: "prefill + decode", short: "tokens", height: 44, value: (step) => `${step.prefill_tokens} + ${step.decode_tokens}`,
    draw(pen, view, colours, steps, y, height) {
      return bars(pen, view, steps, y, height, [
        [(step) => step.decode_tokens, colours.decode], [(step) => step.prefill_tokens, colours.prefill],
      ]);
    },
  },
  {
    name: "drafts accepted", short: "drafts", height: 30, value: (step) => `${step.accepted_tokens} of ${step.draft_tokens}`,
    draw(pen, view, colours, steps, y, height) {
      return bars(pen, view, steps, y, height, [
        [(step) => step.accepted_tokens, colours.decode],
        [(step) => step.draft_tokens - step.accepted_tokens, colours.line],
      ]);
    },
  },
  {
    name: "KV cache in use", short: "KV use", height: 30, value: (step) => `${(100 * step.kv_cache_usage).toFixed(1)} %`,
    draw(pen, view, colours, steps, y, height) {
      const use = (step) => step.kv_cache_usage;
      const top = most(steps, use, 0.01);
      stairs(pen, view, steps, y, height, use, top, colours.accent, true);
      return `${(100 * top).toFixed(top < 0.1 ? 1 : 0)} %`;
    },
  },
  {
    name: "running + waiting", short: "requests", height: 34, value: (step) => `${step.num_running} + ${step.num_waiting}`,
    draw(pen, view, colours, steps, y, height) {
      const running = (step) => step.num_running, waiting = (step) => step.num_waiting;
      const top = Math.max(most(steps, running, 1), most(steps, waiting, 1));
      stairs(pen, view, steps, y, height, running, top, colours.accent, false);
      stairs(pen, view, steps, y, height, waiting, top, colours.waiting, false);
      return String(top);
    },
  },
];
const WITHOUT_DRAFTS = ALL.filter((strip) => strip.short !== "drafts");
