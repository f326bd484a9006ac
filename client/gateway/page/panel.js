// The living panel: requests with their decisions, gauges, and the time to first token, fed by /scheduler/events.

import { headers, readEvents } from "./stream.js";

const SVG = "http://www.w3.org/2000/svg";
const SHOWN_REQUESTS = 12;
const SHOWN_POINTS = 40;
const AGAIN_MS = 2000;
const GAUGES = {
  vlm_relay_in_flight_requests: "requests served",
  vlm_relay_waiting_requests: "requests waiting",
  vlm_relay_running_sequences: "sequences decoding",
  vlm_relay_waiting_sequences: "sequences waiting",
  vlm_relay_free_kv_blocks: "KV blocks free",
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
  if (kind === "request") {
    requests.set(value.key, value);
    while (requests.size > SHOWN_POINTS) requests.delete(requests.keys().next().value);
    showRequests();
    showCurves();
  }
  if (kind === "gauges") showGauges(value);
}

function showLink(state, words) {
  const link = find("link");
  if (link.textContent !== words) link.textContent = words;
  link.dataset.state = state;
}

function showGauges(values) {
  const shown = Object.entries(GAUGES).filter(([name]) => name in values);
  find("gauges").replaceChildren(
    ...shown.map(([name, words]) => {
      const box = document.createElement("div");
      const title = document.createElement("dt");
      title.textContent = words;
      const number = document.createElement("dd");
      number.textContent = values[name].toLocaleString("en");
      box.dataset.name = name;
      box.append(title, number);
      return box;
    }),
  );
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
  const placed = decision === null ? "–" : [decision.encoder, decision.decoder].filter(Boolean).join(" → ");
  const images = request.num_images === 1 ? "1 image" : `${request.num_images} images`;
  row.append(
    cell(request.request_id.slice(0, 8), images),
    cell(request.state, request.error),
    cell(placed, decision?.reason),
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

function showCurves() {
  const known = [...requests.values()];
  showCurve("ttft", known.map((request) => request.ttft_ms));
  showCurve("tpot", known.map((request) => request.tokens_per_s && 1000 / request.tokens_per_s));
}

function showCurve(id, values) {
  const times = values.filter((ms) => ms !== null && ms > 0);
  if (times.length === 0) return;
  const highest = Math.max(...times);
  const width = 300 / Math.max(times.length, 12);
  const curve = find(id);
  curve.replaceChildren(
    ...times.map((ms, place) => {
      const bar = document.createElementNS(SVG, "rect");
      const height = Math.max(1, (ms / highest) * 58);
      bar.setAttribute("x", String(place * width + 0.5));
      bar.setAttribute("y", String(60 - height));
      bar.setAttribute("width", String(width - 1));
      bar.setAttribute("height", String(height));
      return bar;
    }),
  );
  const words = `latest ${inMs(times[times.length - 1])}, highest ${inMs(highest)}`;
  curve.setAttribute("aria-label", `the last ${times.length} answers: ${words}`);
  find(`${id}-words`).textContent = words;
}

function inMs(ms) {
  return `${ms < 10 ? ms.toFixed(1) : ms.toFixed(0)} ms`;
}
