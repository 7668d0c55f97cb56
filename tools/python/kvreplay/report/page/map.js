// Kept tokens by layer and position, and the attention to each position below: one drawing with a shared axis.

const MAP = { left: 54, right: 14, label: 16, heading: 22, gap: 8, profile: 110, axis: 40 };
const LETTER = 7.8; // pixels, the width of a letter in headings; those of other texts are narrower
const KEPT_SHARE = 0.5; // of the sets: the tokens that the profile shows as kept

const map = { view: null, panels: [], plot: 0, tokens: 0 };

function isDark() {
  return $("theme").getAttribute("aria-pressed") === "true";
}

function colourOf(label) {
  const look = policyOf.get(label);
  return isDark() ? look.on_dark : look.colour;
}

/** An image [layers, tokens] in a policy's colour. Its opacity is the root of the share of sets that keep a token. */
function imageOf(view, cell, colour) {
  const { trace, head, finest } = view, layers = trace.layers.length, tokens = trace.boundary;
  const key = `${head} ${finest} ${colour}`;
  if (cell.map?.key === key) return cell.map.url;
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [tokens, layers];
  const context = canvas.getContext("2d"), image = context.createImageData(tokens, layers);
  const rgb = [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));
  for (let i = 0; i < layers; i++) {
    const sets = shownSets(trace, cell, i, head, finest), counts = keptBy(cell.bits, sets, tokens);
    for (let token = 0; token < tokens; token++) {
      image.data.set([...rgb, 255 * Math.sqrt(counts[token] / sets.length)], 4 * (i * tokens + token));
    }
  }
  context.putImageData(image, 0, 0);
  cell.map = { key, url: canvas.toDataURL() };
  return cell.map.url;
}

/** The map of one policy, from `top`; its lower edge. */
function drawPanel(drawing, view, number, top) {
  const { trace } = view, cell = view.cells[number], label = view.labels[number], layers = trace.layers.length;
  top = drawWords(drawing, label, top);
  if (!cell?.bits) {
    drawing.append(make("text", { x: MAP.left, y: top + 12 }, whyPlain(view, cell)));
    return top + 20;
  }
  const height = Math.max(24, layers * Math.min(8, Math.max(3, Math.round(180 / layers))));
  const box = { x: MAP.left, y: top, width: map.plot, height };
  drawing.append(make("image", { ...box, href: imageOf(view, cell, colourOf(label)), preserveAspectRatio: "none",
    "image-rendering": trace.boundary > map.plot ? "auto" : "pixelated" }), make("rect", { ...box, class: "frame" }));
  const named = (height / layers) * ((layers - 1) >> 1) < 16 ? [0] : [0, (layers - 1) >> 1, layers - 1];
  for (const i of new Set(named)) {
    drawing.append(make("text", { x: MAP.left - 6, y: top + ((i + 0.5) / layers) * height + 4, "text-anchor": "end" },
      String(trace.layers[i])));
  }
  map.panels.push({ top, height, label });
  return top + height + MAP.gap;
}

/** Classes of the profile's bars, by which policies keep a token in most of the sets shown: name, words and colours. */
function profileKinds(view) {
  const kept = view.cells.map((cell) => shareOf(view, cell));
  const [a, b] = view.labels;
  const has = (number, i) => kept[number] !== undefined && kept[number] !== null && kept[number][i] >= KEPT_SHARE;
  const kinds = [["neither", b ? "evicted by both" : `evicted by ${a}`, ["var(--neither)"]],
    ["first", `kept by ${a}`, [colourOf(a)]]];
  if (b) kinds.push(["second", `kept by ${b}`, [colourOf(b)]], ["both", "kept by both", [colourOf(a), colourOf(b)]]);
  return { kinds, of: (i) => (has(0, i) ? (has(1, i) ? "both" : "first") : has(1, i) ? "second" : "neither") };
}

/** Text in lines that fit into a width, broken behind spaces and commas. */
function linesOf(words, width) {
  const most = Math.floor(width / LETTER), lines = [""];
  for (const word of words.split(/(?<=[ ,])/)) {
    if (lines.at(-1) && lines.at(-1).length + word.trim().length > most) lines.push("");
    lines.push(lines.pop() + word);
  }
  return lines;
}

/** Text in lines that fit into the plot, from `top`; the lower edge. */
function drawWords(drawing, words, top) {
  const lines = linesOf(words, map.plot);
  lines.forEach((line, i) => {
    drawing.append(make("text", { x: MAP.left, y: top + 14 + 16 * i, class: "heading" }, line));
  });
  return top + MAP.heading + 16 * (lines.length - 1);
}

/** A bar for the attention to each token, logarithmic; its lower edge. */
function drawProfile(drawing, view, top) {
  const { trace, layer } = view;
  if (!trace.attention?.bytes) return top;
  const received = attentionOf(trace, layer, trace.boundary), most = received.reduce((a, b) => Math.max(a, b), 0);
  const { kinds, of } = profileKinds(view);
  const words = `attention, summed over evaluation queries, ${layer < 0 ? "mean over layers" : `layer ${trace.layers[layer]}`}`
    + ", mean over heads, logarithmic";
  top = drawWords(drawing, words, top);
  let x = MAP.left;
  for (const [, whole, colours] of kinds) {
    const most = Math.floor((map.plot - 16) / 7), name = whole.length > most ? `${whole.slice(0, most - 1)}…` : whole;
    if (x > MAP.left && x + 16 + 7 * name.length > MAP.left + map.plot) [x, top] = [MAP.left, top + 16];
    const part = 10 / colours.length;
    drawing.append(...colours.map((fill, k) => make("rect", { x, y: top + 10 - (k + 1) * part, width: 10, height: part, fill })),
      make("text", { x: x + 14, y: top + 9 }, name));
    x += 30 + 7 * name.length;
  }
  top += 18;
  const bars = Object.fromEntries(kinds.map(([kind]) => [kind, []]));
  const width = map.plot / trace.boundary;
  received.forEach((one, i) => {
    const height = one > 0 ? MAP.profile * Math.max(0, 1 + Math.log10(one / most) / DECADES) : 0;
    if (height) bars[of(i)].push([MAP.left + (i + 0.5) * width, height]);
  });
  for (const [kind, , colours] of kinds) {
    colours.forEach((stroke, k) => { // of two colours, one above the other
      const d = bars[kind].map(([x, height]) => {
        const part = height / colours.length;
        return `M${x.toFixed(1)} ${(top + MAP.profile - k * part).toFixed(1)}v${(-part).toFixed(1)}`;
      });
      drawing.append(make("path", { class: `profile ${kind}`, d: d.join(""), stroke, fill: "none",
        "stroke-width": Math.max(1, 0.85 * width) }));
    });
  }
  [[0, brief(most)], [MAP.profile / 2, brief(most / 100)]].forEach(([at, name]) =>
    drawing.append(make("text", { x: MAP.left - 6, y: top + at + 8, "text-anchor": "end" }, name)));
  map.panels.push({ top, height: MAP.profile });
  return top + MAP.profile;
}

/** Needle, question and answer in all panels, with names above that do not overlap. */
function drawSpans(drawing, trace) {
  const ends = [0, 0];
  const spans = trace.spans.filter((span) => OUTLINED.includes(span.kind) && span.begin < trace.boundary);
  for (const span of spans.sort((a, b) => a.begin - b.begin)) {
    const x = xOf(span.begin), width = Math.max(2, xOf(Math.min(span.end, trace.boundary)) - x);
    for (const { top, height } of map.panels) {
      drawing.append(make("rect", { class: `span span-${span.kind}`, x, y: top, width, height }));
    }
    const length = 7 * span.kind.length, start = Math.min(x, MAP.left + map.plot - length);
    const row = start > ends[0] ? 0 : 1;
    if (start <= ends[row]) continue;
    ends[row] = start + length;
    const look = { class: `span-name span-${span.kind}`, x: start, y: 12 + MAP.label * row };
    drawing.append(make("text", look, span.kind));
  }
}

function xOf(token) {
  return MAP.left + (token / map.tokens) * map.plot;
}

function drawMap(view) {
  const box = $("map-chart"), { trace } = view, width = Math.max(300, box.clientWidth);
  Object.assign(map, { view, panels: [], plot: width - MAP.left - MAP.right, tokens: trace.boundary });
  const drawing = make("svg", { role: "img",
    "aria-label": `Kept tokens by layer and position: ${view.labels.join(" and ")}; attention to each position` });
  let top = 2 * MAP.label + 2;
  view.cells.forEach((_, number) => (top = drawPanel(drawing, view, number, top)));
  const bottom = drawProfile(drawing, view, top);
  drawSpans(drawing, trace);
  for (const tick of ticks(0, trace.boundary, width < 600 ? 4 : 10)) {
    drawing.append(make("line", { class: "tick", x1: xOf(tick), x2: xOf(tick), y1: bottom, y2: bottom + 4 }),
      make("text", { x: xOf(tick), y: bottom + 17, "text-anchor": "middle" }, String(tick)));
  }
  drawing.append(make("text", { x: MAP.left + map.plot / 2, y: bottom + 34, "text-anchor": "middle" }, "position"),
    make("g", { id: "cursor" }));
  drawing.setAttribute("viewBox", `0 0 ${width} ${bottom + MAP.axis}`);
  drawing.addEventListener("pointermove", (event) => tellOfMap(placeOnMap(event, drawing)));
  drawing.addEventListener("click", (event) => selectOnMap(placeOnMap(event, drawing)));
  box.replaceChildren(drawing);
  drawCursor();
}

/** The chosen token and layer on the map. */
function drawCursor() {
  const cursor = $("cursor");
  if (!cursor) return;
  const { trace, layer } = map.view, parts = [], x = xOf(reading.at + 0.5);
  for (const { top, height, label } of map.panels) {
    const size = height / trace.layers.length;
    if (layer >= 0 && label) {
      const place = { x: MAP.left, y: top + layer * size, width: map.plot, height: size };
      parts.push(make("rect", { class: "chosen-layer", ...place }));
    }
    if (reading.at >= 0 && reading.at < map.tokens) {
      parts.push(make("line", { class: "chosen-token", x1: x, x2: x, y1: top, y2: top + height }));
    }
  }
  cursor.replaceChildren(...parts);
}

/** The token, the layer and the policy at the pointer; -1 and nothing outside. */
function placeOnMap(event, drawing) {
  const frame = drawing.getBoundingClientRect(), scale = drawing.viewBox.baseVal.width / frame.width;
  const [x, y] = [(event.clientX - frame.left) * scale, (event.clientY - frame.top) * scale];
  const token = Math.floor(((x - MAP.left) / map.plot) * map.tokens);
  const panel = map.panels.find(({ top, height }) => y >= top && y < top + height);
  const layer = panel?.label ? Math.floor(((y - panel.top) / panel.height) * map.view.trace.layers.length) : -1;
  return { token: token >= 0 && token < map.tokens ? token : -1, layer, label: panel?.label };
}

function tellOfMap({ token, layer, label }) {
  const { view } = map, { trace } = view;
  if (token < 0) return;
  const words = [`token ${token}${trace.text ? ` “${visible(trace.text[token]).trim()}”` : ""}`];
  if (label) {
    const cell = view.cells[view.labels.indexOf(label)];
    const sets = shownSets(trace, cell, layer, view.head, view.finest);
    const count = sets.filter((set) => keeps(cell.bits, set, token, trace.boundary)).length;
    words.unshift(label, `layer ${trace.layers[layer]}`);
    words.push(sets.length === 1 ? (count ? "kept" : "not kept") : `${count} of ${sets.length} sets`);
  } else if (trace.attention?.bytes) {
    words.push(`attention ${brief(attentionOf(trace, view.layer, trace.boundary)[token])}`);
  }
  $("map-place").textContent = plain(words.join(", "));
}

function selectOnMap({ token, layer }) {
  if (token < 0) return;
  if (layer >= 0) $("layer").value = String(layer);
  jumpTo(token);
  drawSelection();
}
