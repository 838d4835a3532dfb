// Vercel's AI SDK, over chat completions and over responses.

import assert from "node:assert/strict";
import test from "node:test";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { Output, generateText, stepCountIs, streamText, tool } from "ai";
import { Person, Place, ask, model, pieces, weather } from "./questions.js";

const baseURL = process.env.OPENAI_BASE_URL;
const compatible = createOpenAICompatible({
  name: "runahead",
  baseURL,
  apiKey: process.env.OPENAI_API_KEY,
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const models = { "chat completions": compatible.chatModel(model), responses: createOpenAI({ baseURL }).responses(model) };

for (const [route, served] of Object.entries(models)) {
  const request = { model: served, temperature: 0, maxRetries: 0 };

  test(`${route}: a stream has the text of the whole answer`, async () => {
    const whole = await generateText({ ...request, prompt: ask, maxOutputTokens: 8 });
    const stream = streamText({ ...request, prompt: ask, maxOutputTokens: 8 });
    assert.equal((await pieces(stream.textStream)).join(""), whole.text);
    assert.equal((await stream.usage).outputTokens, whole.usage.outputTokens);
  });

  test(`${route}: a required tool is called and its result is answered`, async () => {
    const asked = [];
    const result = await generateText({
      ...request,
      prompt: "How is the weather in Rome?",
      maxOutputTokens: 256,
      toolChoice: "required",
      prepareStep: ({ stepNumber }) => (stepNumber > 0 ? { toolChoice: "none" } : {}),
      stopWhen: stepCountIs(2),
      tools: {
        [weather.name]: tool({
          description: weather.description,
          inputSchema: Place,
          execute: (input) => (asked.push(input), "sunny"),
        }),
      },
    });
    assert.ok(asked.length > 0);
    Place.parse(asked[0]);
    assert.equal(result.steps.length, 2);
  });

  test(`${route}: structured output is parsed`, async () => {
    const output = Output.object({ schema: Person });
    const result = await generateText({ ...request, prompt: "Ann is seven.", output, maxOutputTokens: 256 });
    Person.parse(result.output);
  });
}
