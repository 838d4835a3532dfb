import assert from "node:assert/strict";
import test from "node:test";
import OpenAI from "openai";
import { zodFunction, zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { Person, Place, ask, messages, model, pieces, weather } from "./questions.js";

const client = new OpenAI();
const brief = { model, temperature: 0 };
const tools = [zodFunction({ ...weather, parameters: Place })];

test("a stream has the text of the whole answer", async () => {
  const request = { ...brief, messages, max_completion_tokens: 8 };
  const whole = await client.chat.completions.create(request);
  const chunks = await pieces(await client.chat.completions.create({ ...request, stream: true }));
  const text = chunks.map((chunk) => chunk.choices[0]?.delta.content ?? "").join("");
  assert.equal(text, whole.choices[0].message.content);
});

test("a required tool is called, in one answer and in a stream", async () => {
  const request = { ...brief, messages, tools, tool_choice: "required", max_completion_tokens: 256 };
  const whole = await client.chat.completions.parse(request);
  const [call] = whole.choices[0].message.tool_calls;
  assert.equal(call.function.name, weather.name);
  Place.parse(call.function.parsed_arguments);
  const streamed = await client.chat.completions.stream(request).finalChatCompletion();
  assert.equal(streamed.choices[0].message.tool_calls[0].function.arguments, call.function.arguments);
});

test("the result of a tool is answered", async () => {
  const runner = client.chat.completions.runTools(
    {
      ...brief,
      messages,
      max_completion_tokens: 256,
      tool_choice: "auto",
      tools: [
        { type: "function", function: { ...weather, function: () => "sunny", parameters: { type: "object" } } },
      ],
    },
    { maxChatCompletions: 3 },
  );
  await runner.done();
  assert.ok(runner.messages.some((message) => message.role === "assistant"));
});

test("structured output is parsed", async () => {
  const format = zodResponseFormat(Person, "person");
  const request = { ...brief, messages, response_format: format, max_completion_tokens: 256 };
  const answer = await client.chat.completions.parse(request);
  Person.parse(answer.choices[0].message.parsed);
});

test("responses: text, events, tools, structure and a second turn", async () => {
  const request = { ...brief, input: ask, max_output_tokens: 8 };
  const first = await client.responses.create(request);
  const stream = client.responses.stream(request);
  const events = await pieces(stream);
  assert.equal(events.at(-1).type, `response.${first.status}`);
  assert.equal((await stream.finalResponse()).output_text, first.output_text);
  const next = await client.responses.create({ ...request, input: "Why?", previous_response_id: first.id });
  assert.ok(next.usage.input_tokens > first.usage.input_tokens);
  const parameters = { type: "object", properties: { city: { type: "string", maxLength: 20 } }, required: ["city"] };
  const called = await client.responses.create({
    ...request,
    max_output_tokens: 256,
    tools: [{ type: "function", strict: false, ...weather, parameters }],
    tool_choice: "required",
  });
  assert.equal(called.output.at(-1).name, weather.name);
  const text = { format: zodTextFormat(Person, "person") };
  const parsed = await client.responses.parse({ ...request, text, max_output_tokens: 256 });
  Person.parse(parsed.output_parsed);
});

test("an error has its class, and a request can be aborted", async () => {
  await assert.rejects(client.chat.completions.create({ messages, model: "other" }), OpenAI.NotFoundError);
  await assert.rejects(client.chat.completions.create({ ...brief, messages, top_p: 7 }), OpenAI.BadRequestError);
  const stream = await client.chat.completions.create({ ...brief, messages, stream: true });
  for await (const _ of stream) break;
  assert.ok(stream.controller.signal.aborted);
});
