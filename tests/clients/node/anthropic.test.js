import assert from "node:assert/strict";
import test from "node:test";
import Anthropic from "@anthropic-ai/sdk";
import { Person, ask, messages, model, pieces, weather } from "./questions.js";
import { zodOutputFormat } from "@anthropic-ai/sdk/helpers/zod";

const client = new Anthropic();
const request = { model, messages, max_tokens: 8 };

test("a stream has the text of the whole answer", async () => {
  const whole = await client.messages.create({ ...request, top_k: 1 });
  const stream = client.messages.stream({ ...request, top_k: 1 });
  await pieces(stream);
  assert.equal(await stream.finalText(), whole.content[0].text);
  const { input_tokens } = await client.messages.countTokens({ model, messages });
  assert.equal(input_tokens, whole.usage.input_tokens + whole.usage.cache_read_input_tokens);
});

test("a required tool is called", async () => {
  const properties = { city: { type: "string", maxLength: 20 } };
  const answer = await client.messages.create({
    ...request,
    max_tokens: 256,
    tools: [{ ...weather, input_schema: { type: "object", properties, required: ["city"] } }],
    tool_choice: { type: "any" },
  });
  assert.equal(answer.stop_reason, "tool_use");
  assert.equal(typeof answer.content[0].input.city, "string");
});

test("structured output is parsed", async () => {
  const output_config = { format: zodOutputFormat(Person) };
  const answer = await client.messages.parse({ ...request, max_tokens: 256, output_config });
  Person.parse(answer.parsed_output);
});

test("an error has its class", async () => {
  await assert.rejects(client.messages.create({ ...request, model: "other", messages: [{ role: "user", content: ask }] }),
    Anthropic.NotFoundError);
});
