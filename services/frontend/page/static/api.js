// Requests to the server that serves this page. The API key is in the memory of this module only.

let key = "";

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export function setKey(value) {
  key = value;
}

// Paths are relative, so that the page also works below a path of a proxy.
export async function request(path, options = {}) {
  const headers = { ...(options.body ? { "Content-Type": "application/json" } : {}) };
  if (key) headers.Authorization = `Bearer ${key}`;
  const response = await fetch(path, { ...options, headers, cache: "no-store" });
  if (!response.ok) throw new Refused(response.status, await reason(response));
  return response;
}

export async function getJSON(path) {
  return (await request(path)).json();
}

async function reason(response) {
  const text = await response.text();
  try {
    return JSON.parse(text).error.message;
  } catch {
    return `status ${response.status}`;
  }
}

// Yields the data of each server-sent event as an object, until [DONE]. Leaving the loop closes the connection.
export async function* eventData(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        const data = part.startsWith("data: ") ? part.slice(6) : "";
        if (data === "[DONE]") return;
        if (data) yield JSON.parse(data);
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // the stream may have failed
  }
}
