"use strict";
// The page's content, and what is computed from it. Sets of a cell are bits [layers * rows, ceil(P / 8)].

const page = JSON.parse(document.getElementById("data").textContent);

const inflated = new Map();

/** The bytes of a plane; null for a plane that the page does not hold. */
function bytesOf(place) {
  if (place === null || place === undefined) return Promise.resolve(null);
  if (!inflated.has(place)) inflated.set(place, inflate(page.planes[place]));
  return inflated.get(place);
}

async function inflate(text) {
  const packed = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

/** Sets, ranks and rule of a cell beside it, as `bits`, `rankLevels` and `rule`. */
async function load(cell) {
  cell.bits = await bytesOf(cell.sets);
  cell.rankLevels = await bytesOf(cell.ranks);
  const rule = await bytesOf(cell.by_rule);
  cell.rule = rule && new Int32Array(rule.buffer);
}

/** Numbers of the sets that a view shows. `layer` is an index or -1 for all, `head` one of the finest heads or -1. */
function shownSets(trace, cell, layer, head, finest) {
  const layers = layer < 0 ? trace.layers.map((_, i) => i) : [layer];
  const rows = head < 0 ? [...Array(cell.rows).keys()] : [Math.floor((head * cell.rows) / finest)];
  return layers.flatMap((i) => rows.map((row) => i * cell.rows + row));
}

/** How many of these sets keep each token. */
function keptBy(bits, sets, tokens) {
  const width = (tokens + 7) >> 3;
  const counts = new Uint32Array(8 * width);
  for (const set of sets) {
    for (let byte = 0; byte < width; byte++) {
      for (let rest = bits[set * width + byte], at = 8 * byte; rest; rest >>= 1, at++) counts[at] += rest & 1;
    }
  }
  return counts.subarray(0, tokens);
}

/** Whether a set keeps a token. */
function keeps(bits, set, token, tokens) {
  return (bits[set * ((tokens + 7) >> 3) + (token >> 3)] >> (token & 7)) & 1;
}

/** Mean rank of each token as a share of its layer, 0 the best; null where no layer of the view has ranks. */
function ranksOf(cell, layer, tokens) {
  if (!cell.rankLevels) return null;
  const rows = cell.ranked.map((_, i) => i).filter((i) => layer < 0 || cell.ranked[i] === layer);
  return rows.length ? meanOf(rows, tokens, (row, token) => (cell.rankLevels[row * tokens + token] + 0.5) / 256) : null;
}

/** Later attention that each token receives, mean over the layers of the view. */
function attentionOf(trace, layer, tokens) {
  const layers = layer < 0 ? trace.layers.map((_, i) => i) : [layer];
  const value = Float64Array.from({ length: 256 }, (_, k) =>
    k ? trace.attention.most * 10 ** ((-6 * (255 - k)) / 254) : 0);
  return meanOf(layers, tokens, (i, token) => value[trace.attention.bytes[i * tokens + token]]);
}

function meanOf(rows, tokens, value) {
  const means = new Float64Array(tokens);
  for (const row of rows) for (let token = 0; token < tokens; token++) means[token] += value(row, token);
  return means.map((sum) => sum / rows.length);
}

/** A text without characters that control, or that turn the text around them. */
function plain(text) {
  return text.replace(/[\0-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]/g, "\ufffd");
}

/** An element with attributes and children; texts are never read as HTML. */
function make(tag, attributes = {}, ...children) {
  const drawn = ["svg", "path", "line", "text", "g", "polyline", "title", "rect", "image"].includes(tag);
  const made = drawn ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name.startsWith("--")) made.style.setProperty(name, value);
    else made.setAttribute(name, value);
  }
  made.append(...children.map((child) => (child instanceof Node ? child : plain(String(child)))));
  return made;
}

/** The options of a choice. Its value is that of the page's address, else the one before, where these still exist. */
function fill(select, options) {
  const values = [requested.get(select.id), select.value];
  requested.delete(select.id);
  select.replaceChildren(...options.map(([value, name]) => make("option", { value }, name)));
  const value = values.find((one) => options.some(([known]) => String(known) === one));
  if (value !== undefined) select.value = value;
}

/** A short number for people: three digits. */
function brief(value) {
  return Number(value.toPrecision(3)).toLocaleString("en", { maximumSignificantDigits: 3 });
}

function percent(share) {
  return `${share < 0.1 ? Number((100 * share).toPrecision(2)) : Math.round(100 * share)}\u00a0%`;
}

const $ = (id) => document.getElementById(id);
const policyOf = new Map(page.policies.map((policy) => [policy.label, policy]));
const named = (cell) => (cell.role === "control" ? `(${cell.label})` : cell.label);
