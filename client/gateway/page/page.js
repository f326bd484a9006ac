// The form: pictures and a question go out, the answer streams in. Text from the model goes into textContent only.

import { watch } from "./panel.js";
import { headers, readEvents, refusal } from "./stream.js";

const find = (id) => document.getElementById(id);
const form = find("form");
const question = find("question");
const answer = find("answer");
const drop = find("drop");

/** The pictures to send: {name, uri}. */
let pictures = [];
let running = null; // the AbortController of the question that is being answered

function readAsUri(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}

async function addPictures(files) {
  for (const file of files) {
    if (!file.type.startsWith("image/")) {
      showError(`${file.name || "This"} is not a picture.`);
      continue;
    }
    pictures.push({ name: file.name || "pasted picture", uri: await readAsUri(file) });
  }
  showPictures();
}

function showPictures() {
  find("pictures").replaceChildren(
    ...pictures.map((picture, place) => {
      const item = document.createElement("li");
      const image = document.createElement("img");
      image.src = picture.uri;
      image.alt = picture.name;
      const remove = document.createElement("button");
      remove.type = "button";
      remove.textContent = "×";
      remove.setAttribute("aria-label", `Remove ${picture.name}`);
      remove.addEventListener("click", () => {
        pictures.splice(place, 1);
        showPictures();
        find("files").focus();
      });
      item.append(image, remove);
      return item;
    }),
  );
}

function showError(message) {
  find("error").textContent = message;
  find("error").hidden = !message;
}

function showRunning(isRunning) {
  find("send").disabled = isRunning;
  find("stop").disabled = !isRunning;
  answer.classList.toggle("growing", isRunning);
  answer.setAttribute("aria-busy", String(isRunning));
}

function bodyOf(words) {
  const images = pictures.map(({ uri }) => ({ type: "image_url", image_url: { url: uri } }));
  const body = {
    messages: [{ role: "user", content: [...images, { type: "text", text: words }] }],
    stream: true,
    stream_options: { include_usage: true },
  };
  const maxTokens = find("max-tokens").valueAsNumber;
  const temperature = find("temperature").valueAsNumber;
  if (Number.isFinite(maxTokens)) body.max_tokens = maxTokens;
  if (Number.isFinite(temperature)) body.temperature = temperature;
  return body;
}

async function ask() {
  const words = question.value.trim() || question.placeholder;
  const controller = new AbortController();
  running = controller;
  answer.textContent = "";
  find("facts").textContent = "";
  find("said").textContent = "Asking.";
  showError("");
  showRunning(true);
  const began = performance.now();
  const seen = { firstMs: null, usage: null, reason: null };
  try {
    const response = await fetch("/v1/chat/completions", {
      method: "POST",
      headers: headers(find("key").value, { "Content-Type": "application/json" }),
      body: JSON.stringify(bodyOf(words)),
      signal: controller.signal,
    });
    if (!response.ok) throw new Error(await refusal(response));
    await readEvents(response, (_kind, data) => addToAnswer(data, seen, began));
    if (seen.reason === null) throw new Error("The connection broke before the answer was complete.");
    find("said").textContent = `The answer: ${answer.textContent}`;
  } catch (error) {
    if (controller.signal.aborted) {
      seen.reason = "stopped by you";
      find("said").textContent = "Stopped.";
    } else {
      showError(error instanceof TypeError ? "The gateway does not answer." : error.message);
    }
  } finally {
    running = null;
    showRunning(false);
    showFacts(seen, performance.now() - began);
  }
}

function addToAnswer(data, seen, began) {
  if (data === "[DONE]") return;
  const chunk = JSON.parse(data);
  if (chunk.error) throw new Error(chunk.error.message);
  seen.usage = chunk.usage ?? seen.usage;
  const choice = chunk.choices[0];
  if (choice === undefined) return;
  seen.reason = choice.finish_reason ?? seen.reason;
  if (choice.delta.content) {
    seen.firstMs ??= performance.now() - began;
    const words = answer.textContent ? choice.delta.content : choice.delta.content.trimStart();
    answer.append(document.createTextNode(words));
  }
}

function showFacts(seen, totalMs) {
  const facts = [];
  if (seen.firstMs !== null) facts.push(`first token after ${seen.firstMs.toFixed(0)} ms`);
  if (seen.usage !== null) facts.push(`${seen.usage.prompt_tokens} tokens in, ${seen.usage.completion_tokens} out`);
  if (seen.reason !== null) facts.push(`${(totalMs / 1000).toFixed(2)} s in all`, reasonInWords(seen.reason));
  find("facts").textContent = facts.join(" · ");
}

function reasonInWords(reason) {
  return { stop: "complete", length: "cut at the longest answer" }[reason] ?? reason;
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  if (running === null) ask();
});
find("stop").addEventListener("click", () => running?.abort());
find("files").addEventListener("change", async (event) => {
  await addPictures(event.target.files);
  event.target.value = ""; // the same file may be chosen again
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
});
document.addEventListener("paste", (event) => {
  const files = [...event.clipboardData.files];
  if (files.length) {
    event.preventDefault();
    addPictures(files);
  }
});
for (const kind of ["dragover", "drop", "dragleave"]) {
  document.addEventListener(kind, (event) => {
    event.preventDefault();
    drop.classList.toggle("over", kind === "dragover");
    if (kind === "drop") addPictures(event.dataTransfer.files);
  });
}
watch(() => find("key").value);
