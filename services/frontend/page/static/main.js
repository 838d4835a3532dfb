// Starts the page: asks for a key if one is needed, then shows the chat and the engine.

import { eventData, getJSON, request, setKey } from "./api.js";
import { Chat } from "./chat.js";
import { Detail } from "./detail.js";
import { byId, count, element } from "./dom.js";
import { Engines } from "./engines.js";
import { History } from "./history.js";
import { Timeline } from "./timeline.js";

const RETRY_MS = 1000; // between the end of the stream of steps and the next attempt
const NO_KEY = "This server shows data only to holders of a key.";
const WRONG_KEY = "This key is not valid.";

let hasTriedKey = false;

class Engine {
  #history = new History();
  #detail = new Detail(this.#history);
  #timeline = new Timeline(this.#history, (step) => this.#detail.show(step));
  #newestEvent = -1;
  #onPhase;

  // onPhase is called with the engine's phase.
  constructor(onPhase) {
    this.#onPhase = onPhase;
  }

  async run() {
    for (;;) {
      try {
        for await (const answer of eventData(await request(`debug/steps/stream${this.#history.query}`))) {
          const isOther = this.#history.isOfAnotherServer(answer);
          if (this.#history.add(answer)) this.#timeline.invalidate();
          this.#showState();
          if (isOther) break; // a stream from its first entry on follows
        }
      } catch (error) {
        if (error.status === 401) return location.reload(); // the key is no longer valid
        if (error.status === 404) return this.#say(error.message);
      }
      byId("live").dataset.state = "lost";
      this.#say("no connection; trying again");
      await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
    }
  }

  #showState() {
    const { engine, steps, missed } = this.#history, last = steps.at(-1), now = this.#history.now();
    this.#onPhase(engine.phase);
    const idle = !last || now === null || now - last.applied > 1;
    const paused = this.#timeline.live ? "" : ", view paused";
    const lost = missed ? `, ${count(missed, "record")} missed` : "";
    this.#say(`${engine.phase === "ready" ? (idle ? "idle" : "live") : engine.phase.replaceAll("_", " ")}${paused}${lost}`);
    byId("live").dataset.state = engine.phase !== "ready" ? "lost" : idle ? "idle" : "live";
    const { events } = this.#history;
    const newest = events.length ? events.at(-1).at : 0;
    if (newest === this.#newestEvent) return;
    this.#newestEvent = newest;
    byId("events").replaceChildren(...(events.length ? [...events].reverse().map((event) => this.#entry(event)) :
      [element("li", { className: "note", text: "none so far" })]));
  }

  #entry(event) {
    const button = element("button", { type: "button", text: event.text, className: event.kind });
    button.addEventListener("click", () => {
      this.#timeline.show(event.since, event.at);
      byId("timeline").focus();
    });
    return element("li", {}, button);
  }

  #say(text) {
    if (byId("live").textContent !== text) byId("live").textContent = text;
  }
}

function lock(reason) {
  byId("main").hidden = true;
  byId("lock").hidden = false;
  byId("server").textContent = "locked";
  byId("lock-reason").textContent = reason;
  byId("key").value = "";
  byId("key").focus();
}

async function start() {
  let info;
  try {
    info = await getJSON("server_info");
  } catch (error) {
    if (error.status === 401) return lock(hasTriedKey ? WRONG_KEY : NO_KEY);
    byId("server").textContent = "no connection; trying again";
    setTimeout(start, 2000);
    return;
  }
  byId("lock").hidden = true;
  byId("main").hidden = false;
  describe(info);
  const chat = new Chat(info.served_model_names[0]);
  new Engine((phase) => chat.setPhase(phase)).run();
  new Engines().run();
}

// Shows model and engine; the engine's features are known when it is ready.
function describe(info) {
  const { backend, batch_queue_depth: depth, ...features } = info.features;
  const ranks = Number(features.tensor_parallel_size) * Number(features.pipeline_parallel_size);
  const text = backend
    ? ` on ${count(ranks, "rank")}, ${backend} backend, batch queue depth ${depth}`
    : `: ${info.detail}`;
  byId("server").replaceChildren(element("strong", { text: info.served_model_names[0] }), text);
  if (!backend) setTimeout(async () => describe(await getJSON("server_info").catch(() => info)), 1000);
}

function showTab(name) {
  for (const tab of ["chat", "engine"]) {
    byId(`tab-${tab}`).setAttribute("aria-selected", String(tab === name));
    byId(tab).classList.toggle("chosen", tab === name);
  }
}

for (const tab of ["chat", "engine"]) byId(`tab-${tab}`).addEventListener("click", () => showTab(tab));
showTab("chat");
byId("lock").addEventListener("submit", (event) => {
  event.preventDefault();
  setKey(byId("key").value);
  byId("key").value = "";
  hasTriedKey = true;
  start();
});
start();
