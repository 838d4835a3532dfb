// Facts about the selected step: its times on every rank, and its requests.

import { getJSON } from "./api.js";
import { byId, count, element, table } from "./dom.js";
import { keyOf } from "./history.js";

const ms = (seconds) => (seconds * 1000).toFixed(2);

export class Detail {
  #history;
  #shown = "";

  constructor(history) {
    this.#history = history;
    byId("detail").replaceChildren(hint());
  }

  show(step) {
    const key = step ? keyOf(step) : "";
    if (key === this.#shown) return;
    this.#shown = key;
    const title = byId("detail-title"), body = byId("detail");
    if (!step) {
      title.textContent = "No step selected";
      body.replaceChildren(hint());
      return;
    }
    title.textContent = `Step ${step.step_id} of epoch ${step.epoch}`;
    body.replaceChildren(facts(step), times(step));
    this.#addRows(step, key, body);
  }

  // Rows are fetched for one step at a time; the live view does without them.
  async #addRows(step, key, body) {
    let found;
    try {
      const answer = await getJSON(`debug/steps?since=${step.sequence - 1}&limit=1`);
      found = answer.entries[0];
    } catch {
      return;
    }
    if (this.#shown !== key || found?.sequence !== step.sequence) return;
    const rows = found.requests.map((name, i) => [
      name, this.#history.requests.get(name)?.request_id ?? "", found.prefills[i] ? "prefill" : "decode",
      found.scheduled[i], found.drafted[i], found.generated[i],
    ]);
    const head = ["request", "id", "phase", "tokens", "drafts", "output"];
    body.append(element("div", { className: "scroll" }, table(head, rows, [3, 4, 5])));
  }
}

const hint = () =>
  element("p", { className: "note", text: "A click on a step, or an arrow key, shows its requests, tokens and times." });

function facts(step) {
  const drafts = step.draft_tokens ? `, ${step.accepted_tokens} of ${count(step.draft_tokens, "draft")} accepted` : "";
  return element("p", {
    text: `${count(step.rows, "request")}, ${count(step.prefill_tokens, "prefill token")} and ` +
      `${count(step.decode_tokens, "decode token")}, ` +
      `${count(step.output_tokens, "output token")}${drafts}. ${count(step.steps_in_flight, "step")} in flight, ` +
      `${count(step.num_running, "request")} running, ${step.num_waiting} waiting, ` +
      `${(100 * step.kv_cache_usage).toFixed(1)} % of the KV cache in use.`,
  });
}

// Times in milliseconds since the scheduler began to plan the step.
function times(step) {
  const since = (moment) => (moment ? ms(moment - step.planned) : "–");
  const ranks = step.ranks.map((rank) => [
    rank.rank, since(rank.received), since(rank.forward_began), since(rank.forward_ended), since(rank.sampled),
    since(rank.sent), ms(rank.plan_wait),
  ]);
  const scheduler = [0, step.dispatched - step.planned, step.result_received - step.planned, step.applied - step.planned];
  return element("div", { className: "scroll" },
    table(["scheduler, ms", "planned", "sent", "result", "applied"], [["", ...scheduler.map(ms)]], [1, 2, 3, 4]),
    table(["rank, ms", "received", "began", "ended", "sampled", "sent", "waited for plan"], ranks, [1, 2, 3, 4, 5, 6]));
}
