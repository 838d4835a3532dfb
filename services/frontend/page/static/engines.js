// The engines of the server, where each stream runs, and moves. Only for servers with --enable-admin-routes.

import { getJSON } from "./api.js";
import { byId, count, element, table } from "./dom.js";

const REFRESH_MS = 1000;
const SHOWN = 200; // streams, the oldest ones

export class Engines {
  // Runs until the page is closed. Without the routes, the engines stay hidden.
  async run() {
    for (;;) {
      try {
        if (!byId("engine").offsetParent || document.hidden) continue;
        const [{ engines }, streams] = await Promise.all([getJSON("engines"), getJSON(`engines/streams?limit=${SHOWN}`)]);
        show(engines, streams);
      } catch (error) {
        if (error.status === 404) return;
        byId("engines-state").textContent = "no connection; trying again";
      } finally {
        await new Promise((resolve) => setTimeout(resolve, REFRESH_MS));
      }
    }
  }
}

function show(engines, { open, streams, moves }) {
  byId("engines").hidden = false;
  byId("engines-state").textContent = "";
  const rows = engines.map((engine) => [
    engine.name, engine.role, engine.state, engine.streams, engine.queue_seconds.toFixed(1), engine.endpoint,
    engine.pids.join(" "), tiers(engine.kv_tiers), engine.detail === engine.state ? "" : engine.detail,
  ]);
  const head = ["engine", "role", "state", "streams", "queue, s", "endpoint", "process ids", "KV blocks; tokens found", ""];
  byId("engine-list").replaceChildren(table(head, rows, [3, 4]));
  const runs = streams.map((stream) => [
    stream.request_id, stream.engine || "waits", stream.engines.join(", "), stream.output_tokens,
  ]);
  const rest = open > streams.length ? `, the ${streams.length} oldest` : "";
  byId("stream-list").replaceChildren(
    element("h4", { text: `${count(open, "open stream")}${rest}` }),
    ...(runs.length ? [table(["request", "engine", "has been on", "tokens"], runs, [3])] : []),
  );
  const moved = moves.reverse().map((move) => [
    new Date(1000 * move.at).toLocaleTimeString(), move.request_id, `${move.source} → ${move.target}`, move.reason,
    move.output_tokens,
  ]);
  byId("move-list").replaceChildren(
    element("h4", { text: moved.length ? "Moves" : "No stream has moved" }),
    ...(moved.length ? [table(["time", "request", "engines", "reason", "after tokens"], moved, [4])] : []),
  );
}

function tiers(found) {
  const sizes = Object.entries(found).map(([name, { bytes, hit_tokens }]) =>
    `${name} ${(bytes / 2 ** 20).toFixed(1)} MiB; ${hit_tokens.toLocaleString("en")}`);
  return sizes.join(", ");
}
