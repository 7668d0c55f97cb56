// The choices, and the views that follow from each.

const shown = { trace: null, budget: null, drawing: 0 };

function cellOf(label) {
  return shown.budget.cells.find((cell) => cell.label === label);
}

function metricOptions(columns) {
  return columns.map((i) => [page.columns[i].title, `${page.columns[i].title}: ${page.columns[i].meaning}`]);
}

function columnOf(id) {
  return page.columns.findIndex((column) => column.title === $(id).value);
}

async function chooseTrace() {
  shown.trace = page.traces.find((trace) => trace.name === $("trace").value);
  const { trace } = shown, { columns } = trace;
  $("line").textContent = plain([trace.name, trace.model, trace.line].join("   "));
  const opens = $("budget").value === "" && !requested.has("budget");
  fill($("budget"), trace.budgets.map((budget) => [budget.budget, `${budget.budget} (${budget.tokens} tokens)`]));
  if (opens && trace.opens_at !== null) $("budget").value = trace.opens_at;
  fill($("layer"), [[-1, "all"], ...trace.layers.map((layer, i) => [i, layer])]);
  const cells = trace.budgets.flatMap((budget) => budget.cells);
  const byLayer = columns.filter((i) => cells.some((cell) => cell.by_layer[i]) && i !== 0);
  fillMetric("curve-metric", metricOptions(columns));
  fillMetric("tradeoff-metric", metricOptions(columns.filter((i) => page.columns[i].best)));
  $("tradeoff").hidden = !cells.some((cell) => cell.front.length);
  fillMetric("layer-metric", [["kept", "kept: tokens kept"], ...metricOptions(byLayer)]);
  const isLive = (i) => page.columns[i].title.startsWith("live.");
  fillMetric("offline-metric", metricOptions(columns.filter((i) => !isLive(i))));
  fill($("live-metric"), metricOptions(columns.filter(isLive)));
  $("live").hidden = !columns.some(isLive);
  drawJumps(trace);
  if (trace.attention) trace.attention.bytes = await bytesOf(trace.attention.levels);
  await chooseBudget();
}

/** The options of a choice of metrics; the first choice is that of the table's ranking. */
function fillMetric(id, options) {
  const first = $(id).value === "" && !requested.has(id);
  fill($(id), options);
  const ranking = ["out.err", "recall"].find((one) => options.some(([title]) => title === one));
  if (first && ranking) $(id).value = ranking;
}

/** Leaves nothing of another trace on the page. */
function clear() {
  for (const id of ["headline", "budget-line", "own-memory", "skill", "first", "second", "head", "shade", "legend",
    "difference", "panes", "token", "written", "curve-chart", "tradeoff-chart", "layer-chart", "live-chart", "map-chart", "scale",
    "heatmaps", "unlike", "jumps", "means", "tokens", "found"]) $(id).replaceChildren();
}

async function chooseBudget() {
  const drawing = ++shown.drawing;
  shown.budget = shown.trace.budgets.find((budget) => budget.budget === $("budget").value);
  if (!shown.budget) {
    clear();
    document.documentElement.dataset.ready = String(drawing);
    return;
  }
  await Promise.all(shown.budget.cells.map(load));
  if (drawing !== shown.drawing) return;
  fillPolicies();
  drawWriting(shown.trace, shown.budget);
  await drawAll();
  document.documentElement.dataset.ready = String(drawing);
}

/** The policies to choose from; the page opens with the first two of page.opening that choose tokens at this budget. */
function fillPolicies() {
  const labels = shown.budget.cells.map((cell) => cell.label), options = labels.map((label) => [label, label]);
  const opens = $("first").value === "" && !requested.has("first");
  fill($("first"), options);
  fill($("second"), [["", "none"], ...options]);
  if (!opens) return;
  const [first, second] = page.opening.filter((label) => cellOf(label)?.choice && !cellOf(label).own_memory);
  if (first) $("first").value = first;
  if (second) $("second").value = second;
}

function drawTables() {
  drawTable(shown.trace, shown.budget);
  drawTraces(shown.budget);
}

/** Every view of a trace and a budget. */
async function drawAll() {
  if (!shown.budget) return;
  drawTables();
  drawSelection();
  drawCharts();
  await drawHeatmaps(shown.trace, shown.budget, $("variant").value);
}

/** The heads that can be chosen: those of the finest sets at this budget. */
function fillHeads() {
  const { trace, budget } = shown;
  const finest = Math.max(1, ...budget.cells.map((cell) => cell.rows));
  const kind = finest === trace.query_heads && finest > trace.kv_heads ? "query" : "KV";
  fill($("head"), [[-1, "all"], ...(finest > 1 ? Array.from({ length: finest }, (_, i) => [i, `${kind} ${i}`]) : [])]);
  return finest;
}

/** The views of the chosen policies, layer and head. */
function drawSelection() {
  if (!shown.budget) return;
  const finest = fillHeads(), { trace, budget } = shown;
  const labels = [$("first").value, $("second").value].filter(Boolean);
  const cells = labels.map(cellOf);
  const shades = [["kept", "share of sets"]];
  if (budget.cells.some((cell) => cell.rankLevels)) shades.push(["rank", "rank"]);
  if (trace.attention?.bytes) shades.push(["attention", "attention of evaluation queries"]);
  fill($("shade"), shades);
  const [layer, head] = [Number($("layer").value), Number($("head").value)];
  const isNew = reading.view?.trace !== trace;
  const view = { trace, budget, labels, cells, layer, head, finest, shade: $("shade").value };
  drawText(view);
  drawMap(view);
  const asked = requested.get("token"), token = Number(asked ?? (isNew ? firstToken(trace) : -1));
  requested.delete("token");
  if (token >= 0 && token < trace.tokens) jumpTo(token, asked !== undefined);
  markSelected();
  writeAddress();
}

/** Selects a policy in every view, or the one to compare it with. */
function selectPolicy(label, compared) {
  if (!cellOf(label)) return;
  if (!compared && $("second").value === label) $("second").value = $("first").value;
  $(compared ? "second" : "first").value = label;
  drawSelection();
}

/** Marks the selected policies in the table, the curves and the heatmaps. */
function markSelected() {
  const places = { [$("second").value]: "second", [$("first").value]: "first" };
  for (const one of document.querySelectorAll("tr[data-label], figure[data-label], g.series[data-label]")) {
    const place = places[one.dataset.label];
    one.classList.toggle("first", place === "first");
    one.classList.toggle("second", place === "second");
    one.querySelector("button.name")?.setAttribute("aria-pressed", String(Boolean(place)));
  }
}

function drawCharts() {
  if (!shown.budget) return;
  drawCurve($("curve-chart"), shown.trace, columnOf("curve-metric"));
  if (!$("tradeoff").hidden) drawTradeoff($("tradeoff-chart"), shown.trace, columnOf("tradeoff-metric"));
  drawLayers($("layer-chart"), shown.trace, shown.budget, columnOf("layer-metric"));
  if (!$("live").hidden) drawLive($("live-chart"), shown.trace, columnOf("offline-metric"), columnOf("live-metric"));
}

function setTheme(dark) {
  document.documentElement.style.colorScheme = dark ? "dark" : "light";
  $("theme").setAttribute("aria-pressed", String(dark));
  if (map.view) drawMap(map.view);
}

function listen() {
  const on = (ids, kind, draw) => ids.forEach((id) => $(id).addEventListener(kind, async () => {
    await draw();
    writeAddress();
  }));
  const dark = matchMedia("(prefers-color-scheme: dark)");
  $("theme").setAttribute("aria-pressed", String(dark.matches));
  $("theme").addEventListener("click", () => setTheme($("theme").getAttribute("aria-pressed") !== "true"));
  dark.addEventListener("change", () => setTheme(dark.matches));
  on(["trace"], "change", chooseTrace);
  on(["budget"], "change", chooseBudget);
  on(["first", "second", "layer", "head", "shade", "tokens"], "change", drawSelection);
  on(["find"], "input", drawSelection);
  on(["curve-metric", "tradeoff-metric", "layer-metric", "offline-metric", "live-metric"], "change", drawCharts);
  on(["policies"], "input", drawAll);
  on(["mean-metric"], "change", () => shown.budget && drawTraces(shown.budget));
  on(["variant"], "change", () => shown.budget && drawHeatmaps(shown.trace, shown.budget, $("variant").value));
  $("next").addEventListener("click", () => jumpToNext(reading.passing ?? []));
  $("find").addEventListener("keydown", (event) => event.key === "Enter" && jumpToNext(reading.passing ?? []));
  for (const link of document.querySelectorAll(".links a")) {
    link.addEventListener("click", (event) => {
      event.preventDefault(); // the fragment of the address is the page's state
      document.querySelector(link.getAttribute("href")).scrollIntoView();
    });
  }
  addEventListener("hashchange", open);
  const nav = document.querySelector("nav");
  new ResizeObserver(() => document.documentElement.style.setProperty("--nav-height", `${nav.offsetHeight}px`))
    .observe(nav);
  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth !== width) {
      drawCharts();
      if (map.view) drawMap(map.view);
    }
    width = innerWidth;
  });
}

/** Draws the page as its address says. */
function open() {
  readAddress();
  fill($("trace"), page.traces.map((trace) => [trace.name, trace.name]));
  fill($("variant"), Object.entries(page.variants));
  return chooseTrace();
}

function start() {
  $("title").textContent = plain(page.title);
  if (page.synthetic) $("synthetic").textContent = "SYNTHETIC trace. ";
  $("notes").replaceChildren(...page.notes.map((note) => make("li", {}, note)));
  $("warnings").replaceChildren(...page.warnings.map((warning) => make("li", {}, warning)));
  $("provenance").replaceChildren(
    ...page.provenance.flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)]));
  document.querySelectorAll("[data-copy]").forEach(addCopyButtons);
  document.querySelectorAll("[data-save]").forEach(addSaveButtons);
  fill($("variant"), Object.entries(page.variants));
  $("variant").value = "mean";
  listen();
  return open();
}

start();
