// Lines over budgets or layers, one for each policy, with a legend whose buttons hide and show them.

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

/** The unit in which the largest value is at least one, and how many of it make one. */
function unitFor(units, values) {
  const most = Math.max(...values);
  return units.find(([count]) => most * count >= 1) ?? units.at(-1) ?? [1, ""];
}

/**
 * series: {label, free: whether no budget binds it, points: [[x, y, y in words or nothing]]};
 * axis: {x: label, y: label, units: of y, ticks: [[x, name]] or null, logarithmic}.
 */
function drawLines(box, series, axis) {
  box.replaceChildren();
  series = series.map((one) => ({ ...one, points: one.points.filter(([, y]) => y !== null) }))
    .filter((one) => one.points.length);
  if (!series.length) {
    box.append(make("p", { class: "quiet" }, axis.nothing));
    return;
  }
  const [count, unit] = unitFor(axis.units, series.flatMap((one) => one.points.map(([, y]) => y)));
  series = series.map((one) => ({ ...one, points: one.points.map(([x, y, words]) =>
    [x, y * count, words ?? `${brief(y * count)} ${unit}`.trim()]) }));
  const shown = series.filter((one) => !hidden.has(one.label));
  const width = Math.max(260, Math.min(box.clientWidth, 900)), height = Math.min(340, Math.max(230, width * 0.5));
  const [left, right, top, bottom] = [54, 14, 10, 42];
  const scale = axis.logarithmic ? Math.log : (x) => x;
  const xs = series.flatMap((one) => one.points.map(([x]) => scale(x)));
  const ys = (shown.length ? shown : series).flatMap((one) => one.points.map(([, y]) => y));
  let [low, high, least, most] = [Math.min(...xs), Math.max(...xs), Math.min(...ys), Math.max(...ys)];
  const edge = 0.03 * (high - low) || 0.5;
  [low, high] = [low - edge, high + edge];
  const lift = 0.05 * (most - least) || 0.05 * Math.abs(most) || 1;
  [least, most] = [least >= 0 ? Math.max(0, least - lift) : least - lift, most + lift];
  const x = (value) => left + ((scale(value) - low) / (high - low)) * (width - left - right);
  const y = (value) => height - bottom - ((value - least) / (most - least)) * (height - top - bottom);

  const drawing = make("svg", { viewBox: `0 0 ${width} ${height}`, role: "img",
    "aria-label": `${axis.y} over ${axis.x}, one line per policy` });
  for (const tick of ticks(least, most, 5)) {
    drawing.append(make("line", { class: "grid", x1: left, x2: width - right, y1: y(tick), y2: y(tick) }),
      make("text", { x: left - 7, y: y(tick) + 4, "text-anchor": "end" }, String(tick)));
  }
  const whole = () => ticks(Math.min(...xs), Math.max(...xs), 7).filter(Number.isInteger);
  const marks = axis.ticks ?? whole().map((one) => [one, String(one)]);
  for (const [at, name] of marks) {
    drawing.append(make("line", { class: "tick", x1: x(at), x2: x(at), y1: height - bottom, y2: height - bottom + 4 }),
      make("text", { x: x(at), y: height - bottom + 17, "text-anchor": "middle" }, name));
  }
  drawing.append(make("line", { class: "tick", x1: left, x2: width - right, y1: height - bottom, y2: height - bottom }),
    make("text", { x: (left + width - right) / 2, y: height - 6, "text-anchor": "middle" }, axis.x));
  const dashes = ({ label, free }) => (free ? "9 3 2 3" : dashesOf(policyOf.get(label)));
  for (const one of [...shown].reverse()) {
    const { label, points } = one;
    const look = policyOf.get(label);
    const colours = { "--series": look.colour, "--on-dark": look.on_dark };
    // Two points are no curve: as in the figures, no line joins them.
    const corners = points.length > 2 ? points.map(([a, b]) => `${x(a)},${y(b)}`).join(" ") : "";
    const group = make("g", { class: "series", ...colours, "data-label": label },
      corners && make("polyline", { points: corners, "stroke-dasharray": dashes(one) }));
    for (const [a, b, words] of points) {
      const size = points.length > 8 ? 2 : 4;
      const placed = `translate(${x(a)} ${y(b)}) scale(${size})`;
      group.append(make("path", { d: SHAPES[look.marker], transform: placed },
        make("title", {}, `${label}: ${axis.name(a)}, ${words}`)));
    }
    drawing.append(group);
  }
  const legend = make("ul", { class: "series-legend", "aria-label": "Policies; a button hides or shows its line" });
  for (const one of series) {
    const { label } = one, look = policyOf.get(label);
    const toggle = () => {
      hidden.has(label) ? hidden.delete(label) : hidden.add(label);
      drawCharts();
      [...box.querySelectorAll("button")].find((button) => button.dataset.label === label).focus();
    };
    const lift = (on) => () => drawing.querySelectorAll(".series").forEach((line) =>
      line.classList.toggle("faint", on && line.dataset.label !== label));
    const pressed = String(!hidden.has(label));
    legend.append(make("li", {}, make("button", { type: "button", "aria-pressed": pressed, "data-label": label,
      "--series": look.colour, "--on-dark": look.on_dark, onclick: toggle,
      onpointerenter: lift(true), onpointerleave: lift(false), onfocus: lift(true), onblur: lift(false) },
      make("svg", { viewBox: "0 0 28 12", "aria-hidden": "true", class: "series" },
        make("line", { x1: 1, x2: 27, y1: 6, y2: 6, "stroke-dasharray": dashes(one) }),
        make("path", { d: SHAPES[look.marker], transform: "translate(14 6) scale(4)" })),
      named(look))));
  }
  box.append(make("p", { class: "axis" }, axis.y + (unit && ` (${unit})`)), drawing, legend);
  const free = series.filter((one) => one.free).map(({ label }) => named(policyOf.get(label)));
  if (free.length) {
    box.append(make("p", { class: "quiet free" }, `Dash and dot: not at equal memory: ${free.join(", ")}.`));
  }
}

/** A metric over the budgets of a trace. */
function drawCurve(box, trace, column) {
  const at = trace.columns.indexOf(column);
  const series = page.policies.map(({ label }) => {
    const cells = trace.budgets.flatMap((budget) =>
      budget.cells.filter((cell) => cell.label === label).map((cell) => [budget.tokens, cell]));
    return { label, free: cells.some(([, cell]) => cell.own_memory),
      points: cells.map(([tokens, cell]) => [tokens, ...cell.values[at].slice(0, 2)]) };
  });
  const sizes = trace.budgets.map((budget) => budget.tokens);
  const names = new Map(trace.budgets.map((budget) => [budget.tokens, budget.budget]));
  drawLines(box, series, {
    x: "budget (mean tokens per layer and head, as asked)", y: page.columns[column].meaning,
    units: page.columns[column].units,
    ticks: [...names], name: (tokens) => `budget ${names.get(tokens)}`,
    logarithmic: Math.max(...sizes) >= 4 * Math.min(...sizes), nothing: "No cell has this metric.",
  });
}

/** Kept tokens (column 0) or a metric by layer, at one budget. */
function drawLayers(box, trace, budget, column) {
  // What no budget binds would flatten the others.
  const cells = column === 0 ? budget.cells.filter((cell) => !cell.own_memory) : budget.cells;
  const series = cells.map((cell) => {
    const values = column === 0 ? cell.kept : cell.by_layer[column];
    return { label: cell.label, free: cell.own_memory, points: values ? values.map((value, i) => [trace.layers[i], value]) : [] };
  });
  drawLines(box, series, {
    x: "layer",
    y: column === 0 ? "tokens kept in each layer, mean over heads; policies at equal memory only" : page.columns[column].meaning,
    units: page.columns[column].units, name: (layer) => `layer ${layer}`,
    nothing: "No cell has this metric by layer; use kvreplay replay --detail layer.",
  });
}
