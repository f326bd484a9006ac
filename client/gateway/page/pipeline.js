// The pipeline as it lives: replicas on their devices, the links between them, and every request where it is.
//
//   wait ──▶ encode (a card per replica: slots) ──▶ decode (a card per replica: sequences, KV cache)
//
// A request is a chip that moves from card to card. Without a plan, the cards are those that gauges and decisions name.

const SVG = "http://www.w3.org/2000/svg";
const GONE_MS = 1500; // an ended request is seen for so long
const MOVE_MS = 450;
const USED_MS = 2500; // a link that was used is marked for so long
const LABELLED_WIRES = 6; // with more, only those in use are named
const WAIT = "wait";
const ENDED = ["answered", "failed", "left"];

const find = (id) => document.getElementById(id);
const cards = new Map(); // replica -> {root, words, bar, chips, stage, place, room}
const chips = new Map(); // request key -> its element
const wires = []; // {id, line, label}
const usedUntil = new Map(); // id of a wire -> when its mark ends
let links = [];
let limits = null;

/** Draws the cards of a plan: {replicas, links, limits}. */
export function showPipeline(plan) {
  limits = plan.limits;
  links = plan.links;
  for (const [name, card] of cards) {
    if (name !== WAIT && !plan.replicas.some((replica) => replica.name === name)) {
      card.root.remove();
      cards.delete(name);
    }
  }
  for (const replica of plan.replicas) Object.assign(cardOf(replica.name, replica.stage), replica);
  for (const card of cards.values()) describe(card);
  find("links").hidden = links.length === 0;
  find("link-list").replaceChildren(...links.map((link) => item(linkInWords(link))));
  drawWires();
}

/** Shows {replica: {metric: value}} on the cards. */
export function showGauges(gauges) {
  for (const [name, values] of Object.entries(gauges)) {
    const isEncoder = "vlm_relay_embedding_misses_total" in values || "vlm_relay_leases" in values;
    const isDecoder = "vlm_relay_running_sequences" in values;
    if (isEncoder) showEncoder(cardOf(name, "encode"), values);
    else if (isDecoder) showDecoder(cardOf(name, "decode"), values);
    else if ("vlm_relay_waiting_requests" in values) showWaiting(values);
  }
}

/** Forgets all requests: another gateway may count them anew. */
export function forgetRequests() {
  for (const chip of chips.values()) chip.remove();
  chips.clear();
}

/** Moves a request to where it is now. */
export function showRequest(request) {
  const decision = request.decision;
  const isNew = !chips.has(request.key);
  if (isNew && ENDED.includes(request.state)) return; // it was over before we looked
  const chip = chips.get(request.key) ?? chipOf(request);
  chip.dataset.state = request.state;
  const tokens = request.num_output_tokens ? `, ${request.num_output_tokens} tokens` : "";
  chip.title = [`${request.request_id}: ${request.state}${tokens}`, decision?.reason].filter(Boolean).join("\n");
  chip.querySelector(".unseen").textContent = `, ${request.state}${tokens}`;
  if (ENDED.includes(request.state)) {
    setTimeout(() => {
      chip.remove();
      chips.delete(request.key);
    }, GONE_MS);
    return;
  }
  move(chip, homeOf(request));
  if (decision !== null) {
    find("latest").textContent = `${request.request_id.slice(0, 8)}: ${decision.reason ?? ""}`;
    if (request.state === "prefilling") for (const encoder of new Set(decision.encoders)) markWire(encoder, decision.decoder);
  }
}

function homeOf(request) {
  const decision = request.decision;
  if (decision === null) return cardOf(WAIT, WAIT);
  if (request.state === "encoding") return cardOf(decision.encoder, "encode");
  return cardOf(decision.decoder, "decode");
}

function chipOf(request) {
  const chip = document.createElement("li");
  chip.className = "chip";
  chip.dataset.requestId = request.request_id;
  chip.style.setProperty("--hue", String((Number(request.key) * 47) % 360));
  const state = document.createElement("span");
  state.className = "unseen";
  chip.append(request.request_id.slice(0, 4), state);
  chips.set(request.key, chip);
  return chip;
}

function move(chip, card) {
  if (chip.parentElement === card.chips) return;
  const before = chip.isConnected ? chip.getBoundingClientRect() : null;
  card.chips.append(chip);
  if (before === null || matchMedia("(prefers-reduced-motion: reduce)").matches) return;
  const after = chip.getBoundingClientRect();
  const way = `translate(${before.left - after.left}px, ${before.top - after.top}px)`;
  chip.animate([{ transform: way }, { transform: "none" }], { duration: MOVE_MS, easing: "ease-in-out" });
}

function cardOf(name, stage) {
  const known = cards.get(name);
  if (known) return known;
  const root = document.createElement("li");
  root.className = "replica";
  root.dataset.replica = name;
  const title = document.createElement("b");
  const device = document.createElement("span");
  const words = document.createElement("span");
  const bar = document.createElement("meter");
  const held = document.createElement("ul");
  device.className = "hint";
  words.className = "load";
  held.className = "chips";
  held.setAttribute("aria-label", `requests at ${name}`);
  bar.setAttribute("aria-label", `${name}: how full it is`);
  bar.hidden = true;
  root.append(title, device, words, bar, held);
  const card = { root, title, device, words, bar, chips: held, name, stage, place: null, hardware: null, room: null };
  cards.set(name, card);
  describe(card);
  find(`stage-${stage}`).append(root);
  if (name !== WAIT) drawWires();
  return card;
}

function describe(card) {
  card.title.textContent = card.name === WAIT ? "queue" : card.name;
  card.device.textContent = [card.place, card.hardware].filter(Boolean).join(" · ");
}

function showEncoder(card, values) {
  const leases = values.vlm_relay_leases ?? 0;
  const slots = values.vlm_relay_embedding_slots ?? card.room;
  const words = slots ? `${leases} of ${slots} slots in use` : `${leases} slots in use`;
  fill(card, values, words, leases, slots);
}

function showDecoder(card, values) {
  const running = values.vlm_relay_running_sequences ?? 0;
  const waiting = values.vlm_relay_waiting_sequences ?? 0;
  const used = values.vlm_relay_kv_cache_usage_ratio ?? 0;
  const sequences = card.room ? `${running} of ${card.room} running` : `${running} running`;
  const words = `${sequences}${waiting ? `, ${waiting} waiting` : ""}, KV cache ${Math.round(used * 100)}%`;
  fill(card, values, words, Math.max(used, card.room ? running / card.room : 0), 1);
}

function showWaiting(values) {
  const waiting = values.vlm_relay_waiting_requests;
  const served = values.vlm_relay_in_flight_requests ?? 0;
  const words = limits ? `${served} of ${limits.max_in_flight} served, ${waiting} waiting` : `${served} served, ${waiting} waiting`;
  const full = limits ? (served + waiting) / (limits.max_in_flight + limits.max_waiting) : null;
  fill(cardOf(WAIT, WAIT), {}, words, full, limits ? 1 : null);
}

function fill(card, values, words, value, most) {
  const isDown = (values.vlm_relay_deaths_total ?? 0) > (values.vlm_relay_recoveries_total ?? 0);
  card.root.classList.toggle("down", isDown);
  card.words.textContent = isDown ? "down, being restarted" : words;
  card.bar.hidden = isDown || !most;
  card.bar.value = most ? Math.min(1, value / most) : 0;
}

function linkInWords(link) {
  const rate = link.gigabytes_per_s === null ? "" : `, about ${Math.round(link.gigabytes_per_s)} GB/s one way`;
  return `${link.first} – ${link.second}: ${link.link}${rate}`;
}

function item(words) {
  const made = document.createElement("li");
  made.textContent = words;
  return made;
}

function nameOfLink(encoder, decoder) {
  if (encoder.place === null || decoder.place === null) return "";
  if (encoder.place === decoder.place) return "same device";
  const ends = [encoder.place, decoder.place];
  return links.find(({ first, second }) => ends.includes(first) && ends.includes(second))?.link ?? "";
}

function drawWires() {
  const drawing = find("wires");
  const frame = find("pipeline").getBoundingClientRect();
  const encoders = [...cards.values()].filter((card) => card.stage === "encode");
  const decoders = [...cards.values()].filter((card) => card.stage === "decode");
  const isNamed = encoders.length * decoders.length <= LABELLED_WIRES;
  wires.length = 0;
  drawing.replaceChildren();
  for (const encoder of encoders) {
    for (const decoder of decoders) {
      const from = encoder.root.getBoundingClientRect();
      const to = decoder.root.getBoundingClientRect();
      const [x1, y1] = [from.right - frame.left, from.top + from.height / 2 - frame.top];
      const [x2, y2] = [to.left - frame.left, to.top + to.height / 2 - frame.top];
      const line = document.createElementNS(SVG, "path");
      const middle = (x1 + x2) / 2;
      line.setAttribute("d", `M${x1} ${y1}C${middle} ${y1} ${middle} ${y2} ${x2} ${y2}`);
      const label = document.createElementNS(SVG, "text");
      label.textContent = nameOfLink(encoder, decoder);
      label.setAttribute("x", String(x1 + 6)); // at its own end: in the middle the lines cross
      label.setAttribute("y", String(y1 + Math.sign(y2 - y1) * 14 - 4));
      label.classList.toggle("named", isNamed);
      drawing.append(line, label);
      const wire = { id: `${encoder.name} ${decoder.name}`, line, label };
      wires.push(wire);
      mark(wire);
    }
  }
}

function markWire(encoder, decoder) {
  const name = `${encoder} ${decoder}`;
  usedUntil.set(name, performance.now() + USED_MS);
  const wire = wires.find(({ id }) => id === name);
  if (wire) mark(wire);
}

function mark({ id, line, label }) {
  const restMs = (usedUntil.get(id) ?? 0) - performance.now();
  for (const part of [line, label]) part.classList.toggle("used", restMs > 0);
  if (restMs > 0) setTimeout(() => mark({ id, line, label }), restMs + 1);
}

cardOf(WAIT, WAIT);
new ResizeObserver(drawWires).observe(find("pipeline"));
