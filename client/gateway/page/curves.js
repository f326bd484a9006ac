// The curves of the latest answers: time to first token, and time per token.

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 300;
const HEIGHT = 60;
const LEAST_PLACES = 12; // few answers do not fill the width

/** Draws both curves from requests in order of arrival; those without a time are left out. */
export function showCurves(requests) {
  showCurve("ttft", requests.map((request) => request.ttft_ms));
  showCurve("tpot", requests.map((request) => request.tokens_per_s && 1000 / request.tokens_per_s));
}

function showCurve(id, values) {
  const times = values.filter((ms) => ms !== null && ms > 0);
  if (times.length === 0) return;
  const highest = Math.max(...times);
  const step = WIDTH / (Math.max(times.length, LEAST_PLACES) - 1);
  const points = times.map((ms, place) => [place * step, HEIGHT - 2 - (ms / highest) * (HEIGHT - 6)]);
  const line = points.map(([x, y], place) => `${place ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");
  const [lastX] = points[points.length - 1];
  const curve = document.getElementById(id);
  curve.replaceChildren(
    path("area", `${line}L${lastX.toFixed(1)} ${HEIGHT}L0 ${HEIGHT}Z`),
    path("line", line),
    // Lines of no length with round ends: dots that stay round however the drawing is stretched.
    path("dots", points.map(([x, y]) => `M${x.toFixed(1)} ${y.toFixed(1)}h0`).join("")),
  );
  const middle = [...times].sort((a, b) => a - b)[Math.floor((times.length - 1) / 2)];
  const words = `latest ${inMs(times[times.length - 1])}, median ${inMs(middle)}, highest ${inMs(highest)}`;
  curve.setAttribute("aria-label", `the last ${times.length} answers: ${words}`);
  document.getElementById(`${id}-words`).textContent = words;
}

function path(name, shape) {
  const made = document.createElementNS(SVG, "path");
  made.setAttribute("class", name);
  made.setAttribute("d", shape);
  return made;
}

function inMs(ms) {
  return `${ms < 10 ? ms.toFixed(1) : ms.toFixed(0)} ms`;
}
