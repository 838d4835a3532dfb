// The steps and events that the page has received, in order of time and bounded.

const MAX_STEPS = 4096;
const MAX_EVENTS = 256;
const MAX_REQUESTS = 4096;

export class History {
  steps = [];
  recoveries = []; // {began, ended, epoch, text}; ended 0: not over
  events = []; // newest last: {at, kind, text, since}
  requests = new Map(); // by name: what is known of a request
  numRanks = 0;
  engine = {};
  missed = 0;
  #ring = "";
  #next = null;
  #clock = null; // scheduler's seconds minus this page's

  // Query of a stream of the entries that are not here yet.
  get query() {
    return this.#next === null ? "" : `?since=${this.#next}`;
  }

  // The present time on the scheduler's clock; null before the first record.
  now() {
    return this.#clock === null ? null : performance.now() / 1000 + this.#clock;
  }

  // The frontend was started again: its entries are numbered from 1 again.
  isOfAnotherServer(answer) {
    return this.#ring !== "" && answer.ring !== this.#ring;
  }

  // Returns whether something has changed.
  add(answer) {
    this.engine = answer.engine;
    if (this.isOfAnotherServer(answer)) return this.#restart(answer.ring);
    this.#ring = answer.ring;
    if (answer.now !== null) this.#clock = answer.now - performance.now() / 1000;
    if (this.#next !== null) this.missed += answer.missed;
    this.#next = answer.next;
    for (const entry of answer.entries) this.#addEntry(entry);
    this.steps.splice(0, this.steps.length - MAX_STEPS);
    this.events.splice(0, this.events.length - MAX_EVENTS);
    this.recoveries.splice(0, this.recoveries.length - MAX_EVENTS);
    for (const name of this.requests.keys()) {
      if (this.requests.size <= MAX_REQUESTS) break;
      this.requests.delete(name);
    }
    return answer.entries.length > 0;
  }

  #restart(ring) {
    this.#ring = ring;
    this.steps = [];
    this.events = [];
    this.recoveries = [];
    this.requests.clear();
    this.numRanks = 0;
    this.#next = 0;
    return true;
  }

  #addEntry(entry) {
    switch (entry.kind) {
      case "step":
        this.#noteRestart(entry);
        this.steps.push(entry);
        this.numRanks = Math.max(this.numRanks, ...entry.ranks.map((rank) => rank.rank + 1));
        break;
      case "request":
        this.requests.set(entry.request, {
          ...entry, num_prompt_tokens: entry.num_prompt_tokens || this.requests.get(entry.request)?.num_prompt_tokens,
        });
        break;
      case "epoch_ended":
        this.recoveries.push({ began: entry.at, ended: 0, epoch: entry.epoch, text: entry.text });
        this.#note(entry.at, "lost", `Epoch ${entry.epoch} ended: ${entry.text}`);
        break;
      case "epoch_started":
        this.#onStart(entry);
        break;
      case "preempted":
        this.#note(entry.at, "preempted", `Request ${entry.text} was preempted`);
        break;
      case "dropped":
        this.missed += entry.count;
        break;
    }
  }

  #onStart(entry) {
    const open = this.recoveries.at(-1);
    if (open && !open.ended) {
      open.ended = entry.at;
      const seconds = (open.ended - open.began).toFixed(2);
      this.#note(entry.at, "started", `Epoch ${entry.epoch} started after ${seconds} s`, open.began);
    } else {
      this.#note(entry.at, "started", `Epoch ${entry.epoch} started`);
    }
  }

  // A scheduler that died reports no end of its epoch; the next one has another incarnation.
  #noteRestart(step) {
    const last = this.steps.at(-1);
    if (!last || last.incarnation === step.incarnation) return;
    const open = this.recoveries.at(-1);
    if (open && !open.ended) open.ended = last.applied;
    this.recoveries.push({ began: last.applied, ended: step.planned, epoch: last.epoch, text: "" });
    const seconds = (step.planned - last.applied).toFixed(2);
    this.#note(step.planned, "started", `Another scheduler continues after ${seconds} s`, last.applied);
  }

  #note(at, kind, text, since = at) {
    this.events.push({ at, kind, text, since });
  }

  // Index of the first step that was applied at or after a time.
  indexAt(time) {
    let low = 0, high = this.steps.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.steps[middle].applied < time) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  // Median seconds between the ends of the last steps; 0 if there are too few.
  period(count = 96) {
    const last = this.steps.slice(-count - 1);
    const gaps = last.slice(1).map((step, i) => step.applied - last[i].applied).sort((a, b) => a - b);
    return gaps.length ? gaps[gaps.length >> 1] : 0;
  }
}

export const keyOf = (step) => `${step.incarnation}/${step.epoch}/${step.step_id}`;
