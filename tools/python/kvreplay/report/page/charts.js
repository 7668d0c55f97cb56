// Lines over budgets or layers, one for each policy, and points of two metrics. The legend hides and shows policies.

const hidden = new Set();
// Markers as the figures draw them, in a square of 2.
const SHAPES = {
  o: "M-1 0A1 1 0 1 0 1 0A1 1 0 1 0-1 0Z", s: "M-.9-.9H.9V.9H-.9Z", D: "M0-1.2L1.2 0L0 1.2L-1.2 0Z",
  "^": "M0-1.1L1.1.9H-1.1Z", v: "M0 1.1L1.1-.9H-1.1Z", P: "M-.4-1.1H.4V-.4H1.1V.4H.4V1.1H-.4V.4H-1.1V-.4H-.4Z",
  X: "M-1-.5L-.5-1L0-.5L.5-1L1-.5L.5 0L1 .5L.5 1L0 .5L-.5 1L-1 .5L-.5 0Z", "<": "M-1.1 0L.9-1.1V1.1Z",
  ">": "M1.1 0L-.9-1.1V1.1Z", p: "M0-1.1L1.05-.34L.65.89H-.65L-1.05-.34Z", d: "M0-1.3L.8 0L0 1.3L-.8 0Z",
  h: "M0-1.1L.95-.55V.55L0 1.1L-.95.55V-.55Z",
  "*": "M0-1.3L.33-.45L1.24-.4L.53.17L.76 1.05L0 .55L-.76 1.05L-.53.17L-1.24-.4L-.33-.45Z",
};

/** The colours of a policy for CSS: on white and on a dark ground. */
function coloursOf(look) {
  return { "--series": look.colour, "--on-dark": look.on_dark };
}

/** In pixels; a look has them in widths of its line. */
function dashesOf(look) {
  return look.dashes.map((dash) => 2 * dash).join(" ");
}

/** Round numbers that span [low, high]. */
function ticks(low, high, most) {
  const rough = (high - low) / most || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((digit) => digit * power).find((one) => one >= rough * 0.999);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + 1e-9 * step; i++) {
    found.push(Number((i * step).toPrecision(12)));
  }
  return found;
}

/** Round numbers that span [low, high] of a logarithmic axis, at most `most` where it has a power of ten. */
function logarithmicTicks(low, high, most) {
  const spanned = (digits) => {
    const found = [];
    for (let power = Math.floor(Math.log10(low)); 10 ** power <= high; power++) {
      found.push(...digits.map((digit) => Number((digit * 10 ** power).toPrecision(12))));
    }
    return found.filter((one) => one >= low * 0.999 && one <= high * 1.001);
  };
  const some = [[1, 2, 3, 4, 6, 8], [1, 2, 5], [1, 3]].map(spanned);
  return some.find((one) => one.length <= most) ?? spanned([1]);
}

/** The unit in which the largest value is at least one, and how many of it make one. */
function unitFor(units, values) {
  const most = Math.max(...values);
  return units.find(([count]) => most * count >= 1) ?? units.at(-1) ?? [1, ""];
}

/** The scales of a drawing: its size, and functions from values to pixels. */
function scalesOf(box, series, drawn, { logarithmic, second }) {
  const width = Math.max(260, Math.min(box.clientWidth, 1100)), height = Math.min(360, Math.max(230, width * 0.45));
  const [left, right, top, bottom] = [54, 14, 10, second ? 84 : 42];
  const scale = logarithmic ? Math.log : (x) => x;
  const xs = series.flatMap((one) => one.points.map(({ x }) => scale(x)));
  const ys = (drawn.length ? drawn : series).flatMap((one) => one.points.map(({ y }) => y));
  let [low, high, least, most] = [Math.min(...xs), Math.max(...xs), Math.min(...ys), Math.max(...ys)];
  const edge = 0.03 * (high - low) || 0.5;
  const ends = [low, high];
  [low, high] = [low - edge, high + edge];
  const lift = 0.05 * (most - least) || 0.05 * Math.abs(most) || 1;
  [least, most] = [least >= 0 ? Math.max(0, least - lift) : least - lift, most + lift];
  return { width, height, left, right, bottom, least, most, ends,
    x: (value) => left + ((scale(value) - low) / (high - low)) * (width - left - right),
    y: (value) => height - bottom - ((value - least) / (most - least)) * (height - top - bottom) };
}

/** `marks`: [[x, words]]; `second`: {ticks, x: name} of an axis below the first one, or nothing. */
function drawAxes(drawing, scales, marks, name, second) {
  const { width, height, left, right, bottom, x, y } = scales;
  for (const tick of ticks(scales.least, scales.most, 5)) {
    drawing.append(make("line", { class: "grid", x1: left, x2: width - right, y1: y(tick), y2: y(tick) }),
      make("text", { x: left - 7, y: y(tick) + 4, "text-anchor": "end" }, String(tick)));
  }
  drawing.append(make("line", { class: "tick", x1: left, x2: width - right, y1: height - bottom, y2: height - bottom }));
  const drawMarks = (from, some, title) => {
    for (const [at, words] of some) {
      drawing.append(make("line", { class: "tick", x1: x(at), x2: x(at), y1: from, y2: from + 4 }),
        make("text", { x: x(at), y: from + 17, "text-anchor": "middle" }, words));
    }
    drawing.append(make("text", { x: (left + width - right) / 2, y: from + 36, "text-anchor": "middle" }, title));
  };
  drawMarks(height - bottom, marks, name);
  if (second) drawMarks(height - bottom + 42, second.ticks, second.x);
}

/** The steps of the Pareto front, from the least memory on. */
function frontOf(series, scales) {
  const corners = series.flatMap((one) => one.points.filter(({ isOnFront }) => isOnFront)).sort((a, b) => a.x - b.x)
    .map(({ x, y }) => [scales.x(x), scales.y(y)]);
  const steps = corners.flatMap(([x, y], i) => (i ? [[x, corners[i - 1][1]], [x, y]] : [[x, y]]));
  return make("polyline", { class: "front", points: steps.join(" ") });
}

/** One policy's line and markers; a click on them selects the policy. */
function seriesOf({ label, points, dashes, free }, scales, axis) {
  const look = policyOf.get(label);
  const corners = !axis.scatter && !(axis.front && free) && points.length > 1
    ? points.map(({ x, y }) => `${scales.x(x)},${scales.y(y)}`).join(" ") : "";
  const group = make("g", { class: "series", ...coloursOf(look), "data-label": label,
    onclick: (event) => selectPolicy(label, event.shiftKey) },
    corners && make("polyline", { points: corners, "stroke-dasharray": dashes }));
  for (const { x, y, words, isOnFront } of points) {
    const place = `translate(${scales.x(x)} ${scales.y(y)})`, size = points.length > 8 ? 2 : 4;
    if (isOnFront) group.append(make("path", { class: "ring", d: SHAPES.o, transform: `${place} scale(7)` }));
    group.append(make("path", { d: SHAPES[look.marker], transform: `${place} scale(${size})` },
      make("title", {}, `${label}: ${words}`)));
  }
  return group;
}

/** The legend by family: a button hides or shows its policy, the name of a family all of its policies. */
function legendOf(series, drawing, refocus) {
  const families = new Map();
  for (const one of series) {
    const look = policyOf.get(one.label), family = look.role === "control" ? CONTROLS : look.family;
    families.set(family, [...(families.get(family) ?? []), one]);
  }
  const toggle = (labels, name) => () => {
    const all = labels.every((label) => !hidden.has(label));
    for (const label of labels) all ? hidden.add(label) : hidden.delete(label);
    drawCharts();
    writeAddress();
    refocus(name);
  };
  const lift = (label, on) => () => drawing.querySelectorAll(".series").forEach((line) =>
    line.classList.toggle("faint", on && line.dataset.label !== label));
  const legend = make("ul", { class: "series-legend", "aria-label": "Policies; a button hides or shows its line" });
  for (const family of [...familiesInOrder(), CONTROLS].filter((one) => families.has(one))) {
    const members = families.get(family), labels = members.map(({ label }) => label);
    const buttons = [make("button", { type: "button", "data-name": family,
      "aria-pressed": String(labels.some((label) => !hidden.has(label))), onclick: toggle(labels, family) }, family)];
    for (const { label, dashes } of members) {
      const look = policyOf.get(label);
      buttons.push(make("button", { type: "button", "aria-pressed": String(!hidden.has(label)),
        "data-label": label, "data-name": label, onclick: toggle([label], label), onpointerenter: lift(label, true),
        onpointerleave: lift(label, false), onfocus: lift(label, true), onblur: lift(label, false) },
        keyOf(look, dashes), named(look)));
    }
    legend.append(make("li", { class: "family" }, make("ul", {}, ...buttons.map((button) => make("li", {}, button)))));
  }
  return legend;
}

/**
 * series: {label, free: whether it ignores the budget, points: [{x, y, text: of y, or nothing, isOnFront}]};
 * axis: {x, y: labels, units: of y, ticks: [[x, name]] or null, name: of an x, logarithmic, scatter, front: whether the
 * Pareto front is drawn, second: an x axis below}.
 */
function drawLines(box, series, axis) {
  box.replaceChildren();
  series = series.map((one) => ({ ...one, points: one.points.filter(({ y }) => y !== null && y !== undefined) }))
    .filter((one) => one.points.length);
  const passing = series.filter((one) => passes(one.label));
  if (!passing.length) {
    const reason = series.length ? "No policy with this metric matches the filter." : axis.nothing;
    box.append(make("p", { class: "quiet" }, reason));
    return;
  }
  series = passing;
  const [count, unit] = unitFor(axis.units, series.flatMap((one) => one.points.map(({ y }) => y)));
  series = series.map((one) => ({ ...one,
    dashes: one.free ? "2 3 9 3 2 3" : dashesOf(policyOf.get(one.label)),
    points: one.points.map(({ x, y, text, isOnFront }) => ({ x, y: y * count, isOnFront,
      words: `${axis.name(x)}, ${text ?? `${brief(y * count)} ${unit}`.trim()}` })) }));
  const drawn = series.filter((one) => !hidden.has(one.label));
  const scales = scalesOf(box, series, drawn, axis);
  const drawing = make("svg", { viewBox: `0 0 ${scales.width} ${scales.height}`, role: "img",
    "aria-label": `${axis.y} over ${axis.x}, ${axis.scatter ? "points" : "one line"} per policy` });
  const rounds = ticks(...scales.ends, 7).filter((one) => axis.scatter || Number.isInteger(one));
  drawAxes(drawing, scales, axis.ticks ?? rounds.map((one) => [one, String(one)]), axis.x, axis.second);
  if (axis.front) drawing.append(frontOf(series, scales));
  for (const one of [...drawn].reverse()) drawing.append(seriesOf(one, scales, axis));
  const legend = legendOf(series, drawing, (name) =>
    [...box.querySelectorAll("button")].find((button) => button.dataset.name === name).focus());
  box.append(make("p", { class: "axis" }, axis.y + (unit && ` (${unit})`)), drawing, legend);
  const free = series.filter((one) => one.free).map(({ label }) => named(policyOf.get(label)));
  if (free.length && !axis.front) {
    box.append(make("p", { class: "quiet free" }, `Dash and two dots: not at equal memory: ${free.join(", ")}.`));
  }
  markSelected();
}

/** The cells of a policy at all budgets of a trace, each with its budget. */
function cellsOf(trace, label) {
  return trace.budgets.flatMap((budget) =>
    budget.cells.filter((cell) => cell.label === label).map((cell) => [budget, cell]));
}

/** A metric over the budgets of a trace. */
function drawCurve(box, trace, column) {
  const at = trace.columns.indexOf(column);
  const series = page.policies.map(({ label }) => {
    const cells = cellsOf(trace, label);
    return { label, free: cells.some(([, cell]) => cell.own_memory),
      points: cells.map(([{ tokens }, { values }]) => ({ x: tokens, y: values[at][0], text: values[at][1] })) };
  });
  const sizes = trace.budgets.map((budget) => budget.tokens);
  const names = new Map(trace.budgets.map((budget) => [budget.tokens, budget.budget]));
  drawLines(box, series, {
    x: "budget (spaced by tokens per layer and head)", y: page.columns[column].meaning,
    units: page.columns[column].units,
    ticks: [...names], name: (tokens) => `budget ${names.get(tokens)}`,
    logarithmic: Math.max(...sizes) >= 4 * Math.min(...sizes), nothing: "No cell has this metric.",
  });
}

/** A metric over the memory of kept keys and values, with the Pareto front over all budgets of a trace. */
function drawTradeoff(box, trace, column) {
  const at = trace.columns.indexOf(column), { meaning, units } = page.columns[column];
  const series = page.policies.map(({ label }) => {
    const cells = cellsOf(trace, label).filter(([, { bytes }]) => bytes !== null);
    const points = cells.map(([{ budget }, { bytes, values, front }]) => ({ x: bytes, y: values[at][0],
      text: `budget ${budget}, ${values[at][1]}`, isOnFront: front.includes(column) })).sort((a, b) => a.x - b.x);
    // A policy that ignores the budget has one point.
    return { label, free: cells.some(([, cell]) => cell.own_memory),
      points: points.filter(({ x, y }, i) => x !== points[i - 1]?.x || y !== points[i - 1]?.y) };
  });
  const sizes = series.flatMap(({ points }) => points.map(({ x }) => x));
  const [low, high] = [Math.min(...sizes), Math.max(...sizes)], bits = 16 / trace.full_bytes;
  const [count, unit] = unitFor(page.columns.find(({ name }) => name === "kv_bytes").units, sizes);
  const marks = (factor) => logarithmicTicks(low * factor, high * factor, 7).map((one) => [one / factor, String(one)]);
  drawLines(box, series, {
    x: `memory of kept keys and values (${unit})`, y: meaning, units, ticks: marks(count), logarithmic: true, front: true,
    name: (bytes) => `${brief(bytes * count)} ${unit}`, nothing: "No cell has this metric.",
    second: trace.full_bytes && { ticks: marks(bits), x: "bits per number (full cache: 16)" },
  });
}

/** Kept tokens (column 0) or a metric by layer, at one budget. */
function drawLayers(box, trace, budget, column) {
  // The lines of policies that ignore the budget would flatten the others.
  const cells = column === 0 ? budget.cells.filter((cell) => !cell.own_memory) : budget.cells;
  const series = cells.map((cell) => ({ label: cell.label, free: cell.own_memory,
    points: ((column === 0 ? cell.kept : cell.by_layer[column]) ?? []).map((y, i) => ({ x: trace.layers[i], y })) }));
  drawLines(box, series, {
    x: "layer",
    y: column === 0 ? "tokens kept in each layer, mean over heads; policies at equal memory only"
      : page.columns[column].meaning,
    units: page.columns[column].units, name: (layer) => `layer ${layer}`,
    nothing: "No cell has this metric by layer; use kvreplay replay --detail layer.",
  });
}

/** An offline metric and one of the live model, a point for each policy and budget. */
function drawLive(box, trace, offline, live) {
  const [x, y] = [offline, live].map((column) => trace.columns.indexOf(column));
  const { title, meaning } = page.columns[offline];
  const series = page.policies.map(({ label }) => {
    const cells = cellsOf(trace, label).filter(([, { values }]) => values[x][0] !== null);
    return { label, free: cells.some(([, cell]) => cell.own_memory),
      points: cells.map(([budget, { values }]) => ({ x: values[x][0], y: values[y][0],
        text: `budget ${budget.budget}, ${page.columns[live].title} ${values[y][1]}` })) };
  });
  drawLines(box, series, { x: title, y: `${page.columns[live].meaning}; across: ${meaning}`, units: page.columns[live].units,
    ticks: null, name: (value) => `${title} ${brief(value)}`, scatter: true, nothing: "No cell has both metrics." });
}
