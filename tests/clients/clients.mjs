// The first examples of a client from npm, against a server: node clients.mjs FOLDER CLIENT URL VECTORS_URL
// FOLDER: where `npm install` put the clients. VECTORS_URL: of a server that makes embeddings. Fails at what is wrong.

import assert from "node:assert/strict";
import { createRequire } from "node:module";

const [folder, name, url, vectorsUrl] = process.argv.slice(2);
const load = createRequire(`${folder}/`);
const QUESTION = "Tell me of the fox.";
const MESSAGES = [{ role: "user", content: QUESTION }];
const FORM = { type: "object", properties: { red: { type: "boolean" } }, required: ["red"], additionalProperties: false };

const isRed = (text) => assert.equal(typeof JSON.parse(text).red, "boolean");

async function joined(stream, textOf) {
  let text = "";
  for await (const part of stream) text += textOf(part) ?? "";
  return text;
}

async function openai() {
  const { OpenAI } = load("openai");
  const to = (base, more) => new OpenAI({ baseURL: `${base}/v1`, apiKey: "none", maxRetries: 0, ...more });
  const client = to(url);
  const asked = { model: "kit", messages: MESSAGES, max_tokens: 8, temperature: 0 };
  const whole = (await client.chat.completions.create(asked)).choices[0].message.content;
  const stream = await client.chat.completions.create({ ...asked, stream: true });
  assert.equal(await joined(stream, (part) => part.choices[0]?.delta.content), whole);
  const form = { type: "json_schema", json_schema: { name: "fox", schema: FORM, strict: true } };
  const fox = await client.chat.completions.create({ model: "kit", messages: MESSAGES, response_format: form });
  isRed(fox.choices[0].message.content);
  const tools = [{ type: "function", function: { name: "paint", parameters: FORM } }];
  const forced = { model: "kit", messages: MESSAGES, tools, tool_choice: "required" };
  const [call] = (await client.chat.completions.create(forced)).choices[0].message.tool_calls;
  assert.equal(call.function.name, "paint");
  isRed(call.function.arguments);
  const told = await client.chat.completions.create({ model: "kit", max_tokens: 4, messages: [
    ...MESSAGES, { role: "assistant", tool_calls: [call] }, { role: "tool", tool_call_id: call.id, content: "done" }] });
  assert.equal(told.usage.completion_tokens, 4);
  const response = await client.responses.create({ model: "kit", input: QUESTION, max_output_tokens: 8, temperature: 0 });
  assert.equal(response.output_text, whole);
  const vectors = await to(vectorsUrl).embeddings.create({ model: "kit", input: ["fox", "hen"] });
  assert.equal(vectors.data.length, 2);
  assert.ok(vectors.data[0].embedding.length > 1);
  await assert.rejects(client.chat.completions.create({ ...asked, temperature: -1 }), { status: 400, param: "temperature" });
  await assert.rejects(client.models.retrieve("hen"), { status: 404, code: "model_not_found" });
  await assert.rejects(to(url, { timeout: 1 }).chat.completions.create({ ...asked, max_tokens: 200 }), /timed out/);
  const ended = await client.chat.completions.create({ ...asked, max_tokens: 200, stream: true });
  for await (const part of ended) { assert.ok(part.id); break; } // leaving ends the answer
  assert.equal((await client.chat.completions.create(asked)).choices[0].message.content, whole);
}

async function anthropic() {
  const { Anthropic } = load("@anthropic-ai/sdk");
  const client = new Anthropic({ baseURL: url, apiKey: "none", maxRetries: 0 });
  const asked = { model: "kit", messages: MESSAGES, max_tokens: 8, temperature: 0 };
  const whole = await client.messages.create(asked);
  assert.equal(whole.stop_reason, "max_tokens");
  const stream = client.messages.stream(asked);
  assert.equal(await joined(stream, (event) => event.delta?.text), whole.content[0].text);
  assert.equal((await stream.finalMessage()).usage.output_tokens, 8);
  const counted = await client.messages.countTokens({ model: "kit", messages: MESSAGES });
  assert.equal(counted.input_tokens, whole.usage.input_tokens + whole.usage.cache_read_input_tokens);
  const tools = [{ name: "paint", description: "Paints.", input_schema: FORM }];
  const forced = { ...asked, max_tokens: 200, tools, tool_choice: { type: "tool", name: "paint" } };
  const call = (await client.messages.create(forced)).content.find((block) => block.type === "tool_use");
  assert.equal(typeof call.input.red, "boolean");
  const result = { role: "user", content: [{ type: "tool_result", tool_use_id: call.id, content: "done" }] };
  const told = await client.messages.create({ ...asked, messages: [...MESSAGES, { role: "assistant", content: [call] }, result] });
  assert.equal(told.usage.output_tokens, 8);
  const listed = [];
  for await (const model of client.models.list()) listed.push(model.id);
  assert.equal(listed.length, 1);
  await assert.rejects(client.messages.create({ ...asked, temperature: -1 }), { status: 400 });
  const hasty = new Anthropic({ baseURL: url, apiKey: "none", maxRetries: 0, timeout: 1 });
  await assert.rejects(hasty.messages.create({ ...asked, max_tokens: 200 }), /timed out/);
  assert.equal((await client.messages.create(asked)).content[0].text, whole.content[0].text);
}

async function ollama() {
  const { Ollama } = load("ollama");
  const client = new Ollama({ host: url });
  const options = { temperature: 0, num_predict: 8 };
  const asked = { model: "kit", messages: MESSAGES, options };
  const whole = (await client.chat(asked)).message.content;
  assert.equal(await joined(await client.chat({ ...asked, stream: true }), (part) => part.message.content), whole);
  assert.equal((await client.generate({ model: "kit", prompt: QUESTION, options })).eval_count, 8);
  isRed((await client.chat({ model: "kit", messages: MESSAGES, format: FORM })).message.content);
  const tools = [{ type: "function", function: { name: "paint", description: "Paints.", parameters: FORM } }];
  assert.ok((await client.chat({ ...asked, tools })).done);
  assert.equal((await client.list()).models.length, 1);
  assert.equal((await client.ps()).models.length, 1);
  assert.ok((await client.show({ model: "kit" })).template);
  const vectors = await new Ollama({ host: vectorsUrl }).embed({ model: "kit", input: ["fox", "hen"] });
  assert.equal(vectors.embeddings.length, 2);
  await assert.rejects(client.delete({ model: "kit" }), /no such path/);
  await assert.rejects(client.chat({ ...asked, options: { temperature: -1 } }), /temperature/);
  const ended = await client.chat({ ...asked, options: { num_predict: 200 }, stream: true });
  setTimeout(() => ended.abort(), 50);
  await assert.rejects(joined(ended, () => ""), { name: "AbortError" });
  assert.equal((await client.chat(asked)).message.content, whole);
}

await { openai, anthropic, ollama }[name]();
