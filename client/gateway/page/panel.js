// The living panel: it follows /scheduler/events and passes on what it is told.

import { showCurves } from "./curves.js";
import { forgetRequests, showGauges, showPipeline, showRequest } from "./pipeline.js";
import { headers, readEvents } from "./stream.js";

const SHOWN_REQUESTS = 8;
const KEPT_REQUESTS = 40;
const AGAIN_MS = 2000;
const TOTALS = {
  vlm_relay_embedding_hits_total: "images seen before",
  vlm_relay_embedding_misses_total: "images encoded",
  vlm_relay_generated_tokens_total: "tokens generated",
};

const find = (id) => document.getElementById(id);
const requests = new Map(); // key -> what is known, in order of arrival

/** Follows the gateway's events for as long as the page is open; `keyOf` gives the API key. */
export async function watch(keyOf) {
  for (;;) {
    try {
      const response = await fetch("/scheduler/events", { headers: headers(keyOf()) });
      if (response.status === 401) showLink("lost", "the live panel needs the API key");
      else if (!response.ok) showLink("lost", "the live panel is not available");
      else {
        showLink("live", "live");
        requests.clear();
        forgetRequests();
        await readEvents(response, take);
        showLink("lost", "connection lost");
      }
    } catch {
      showLink("lost", "connection lost");
    }
    await new Promise((resolve) => setTimeout(resolve, AGAIN_MS));
  }
}

function take(kind, data) {
  const value = JSON.parse(data);
  if (kind === "pipeline") showPipeline(value);
  if (kind === "gauges") {
    showGauges(value);
    showTotals(value);
  }
  if (kind === "request") {
    requests.set(value.key, value);
    while (requests.size > KEPT_REQUESTS) requests.delete(requests.keys().next().value);
    showRequest(value);
    showRequests();
    showCurves([...requests.values()]);
  }
}

function showLink(state, words) {
  const link = find("link");
  if (link.textContent !== words) link.textContent = words;
  link.dataset.state = state;
}

function showTotals(gauges) {
  const boxes = Object.entries(TOTALS).map(([name, words]) => {
    const values = Object.values(gauges).filter((replica) => name in replica);
    if (values.length === 0) return null;
    const box = document.createElement("div");
    const title = document.createElement("dt");
    title.textContent = words;
    const number = document.createElement("dd");
    number.textContent = values.reduce((sum, replica) => sum + replica[name], 0).toLocaleString("en");
    box.append(title, number);
    return box;
  });
  find("totals").replaceChildren(...boxes.filter(Boolean));
}

function showRequests() {
  const latest = [...requests.values()].slice(-SHOWN_REQUESTS).reverse();
  find("requests").replaceChildren(...latest.map(rowOf));
}

function rowOf(request) {
  const row = document.createElement("tr");
  row.dataset.state = request.state;
  row.dataset.requestId = request.request_id;
  const decision = request.decision;
  const placed = decision === null ? "–" : [...new Set(decision.encoders ?? [decision.encoder]), decision.decoder];
  const images = request.num_images === 1 ? "1 image" : `${request.num_images} images`;
  row.append(
    cell(request.request_id.slice(0, 8), request.num_images ? images : "text only"),
    cell(request.state, request.error),
    cell(decision === null ? placed : placed.filter(Boolean).join(" → "), decision?.reason),
    number("First token", request.ttft_ms === null ? "–" : `${request.ttft_ms.toFixed(0)} ms`),
    number("Tokens", request.num_output_tokens || "–", request.num_input_tokens ? `${request.num_input_tokens} in` : null),
    number("Tokens/s", request.tokens_per_s ?? "–"),
  );
  return row;
}

function number(label, value, small) {
  const made = cell(value, small);
  made.className = "number";
  made.dataset.label = label; // shown where the table is too narrow for its head
  return made;
}

function cell(words, small) {
  const made = document.createElement("td");
  made.textContent = words;
  if (small) {
    const line = document.createElement("small");
    line.textContent = small;
    made.append(line);
  }
  return made;
}
