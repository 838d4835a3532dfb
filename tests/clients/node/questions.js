// What every client asks. The environment has the addresses; MODEL is the name of the model.

import assert from "node:assert/strict";
import { z } from "zod";

export const model = process.env.MODEL;
export const ask = "Name one colour.";
export const messages = [{ role: "user", content: ask }];
// Few possible values: a small model would write a text without end.
export const Person = z.object({ name: z.enum(["Ann", "Bob"]), age: z.int().min(0).max(150) });
export const Place = z.object({ city: z.enum(["Paris", "Rome"]) });
export const weather = { name: "get_weather", description: "Returns the weather of a city." };

// Collects an asynchronous iterable. A stream must arrive in pieces.
export async function pieces(stream) {
  const found = [];
  for await (const piece of stream) found.push(piece);
  assert.ok(found.length > 1, "the answer came in one piece");
  return found;
}
