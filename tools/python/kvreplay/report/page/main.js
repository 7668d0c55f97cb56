// Choices, and what follows from each.

const $ = (id) => document.getElementById(id);
const shown = { trace: null, budget: null, drawing: 0 };

function cellOf(label) {
  return shown.budget.cells.find((cell) => cell.label === label);
}

async function chooseTrace() {
  shown.trace = page.traces[Number($("trace").value)];
  const { trace } = shown;
  $("line").textContent = plain([trace.name, trace.model, trace.line].join("   "));
  fill($("budget"), trace.budgets.map((budget, i) => [i, `${budget.budget} (${budget.tokens} tokens)`]));
  fill($("layer"), [[-1, "all"], ...trace.layers.map((layer, i) => [i, layer])]);
  fill($("curve-metric"), trace.columns.map((i) => [i, `${page.columns[i].title}: ${page.columns[i].meaning}`]));
  const recall = page.columns.findIndex((column) => column.title === "recall");
  if (!shown.metricChosen && trace.columns.includes(recall)) $("curve-metric").value = recall;
  const cells = trace.budgets.flatMap((budget) => budget.cells);
  const byLayer = trace.columns.filter((i) => cells.some((cell) => cell.by_layer[i]));
  fill($("layer-metric"), [[0, "kept: tokens kept"], ...byLayer.filter((i) => i !== 0)
    .map((i) => [i, `${page.columns[i].title}: ${page.columns[i].meaning}`])]);
  if (trace.attention) trace.attention.bytes = await bytesOf(trace.attention.levels);
  await chooseBudget();
}

/** Leaves nothing of another trace on the page. */
function clear() {
  for (const id of ["headline", "budget-line", "own-memory", "skill", "first", "second", "head", "shade", "legend",
    "difference", "panes", "token", "written", "curve-chart", "layer-chart", "scale", "heatmaps", "unlike"]) $(id).replaceChildren();
}

async function chooseBudget() {
  const drawing = ++shown.drawing;
  shown.budget = shown.trace.budgets[Number($("budget").value)];
  if (!shown.budget) {
    clear();
    document.documentElement.dataset.ready = String(drawing);
    return;
  }
  await Promise.all(shown.budget.cells.map(load));
  if (drawing !== shown.drawing) return;
  const labels = shown.budget.cells.map((cell) => cell.label);
  fill($("first"), labels.map((label) => [label, label]));
  fill($("second"), [["", "none"], ...labels.map((label) => [label, label])]);
  drawTable(shown.trace, shown.budget);
  drawWriting(shown.trace, shown.budget);
  drawReading();
  drawCharts();
  await drawHeatmaps(shown.trace, shown.budget, $("variant").value);
  document.documentElement.dataset.ready = String(drawing);
}

/** The heads that can be chosen: those of the finest sets at this budget. */
function fillHeads() {
  const { trace, budget } = shown;
  const finest = Math.max(1, ...budget.cells.map((cell) => cell.rows));
  const kind = finest === trace.query_heads && finest > trace.kv_heads ? "query" : "KV";
  fill($("head"), [[-1, "all"], ...(finest > 1 ? Array.from({ length: finest }, (_, i) => [i, `${kind} ${i}`]) : [])]);
  return finest;
}

function drawReading() {
  if (!shown.budget) return;
  const finest = fillHeads(), { trace, budget } = shown;
  const labels = [$("first").value, $("second").value].filter(Boolean);
  const cells = labels.map(cellOf);
  const shades = [["kept", "share of sets"]];
  if (budget.cells.some((cell) => cell.rankLevels)) shades.push(["rank", "rank"]);
  if (trace.attention?.bytes) shades.push(["attention", "attention of evaluation queries"]);
  fill($("shade"), shades);
  const [layer, head] = [Number($("layer").value), Number($("head").value)];
  drawText({ trace, budget, labels, cells, layer, head, finest, shade: $("shade").value });
}

function drawCharts() {
  if (!shown.budget) return;
  drawCurve($("curve-chart"), shown.trace, Number($("curve-metric").value));
  drawLayers($("layer-chart"), shown.trace, shown.budget, Number($("layer-metric").value));
}

function setTheme(dark) {
  document.documentElement.style.colorScheme = dark ? "dark" : "light";
  $("theme").setAttribute("aria-pressed", String(dark));
}

function start() {
  $("title").textContent = plain(page.title);
  if (page.synthetic) $("synthetic").textContent = "SYNTHETIC trace. ";
  $("notes").replaceChildren(...page.notes.map((note) => make("li", {}, note)));
  $("warnings").replaceChildren(...page.warnings.map((warning) => make("li", {}, warning)));
  $("provenance").replaceChildren(
    ...page.provenance.flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)]));
  fill($("trace"), page.traces.map((trace, i) => [i, trace.name]));
  fill($("variant"), Object.entries(page.variants));
  $("variant").value = "mean";
  const dark = matchMedia("(prefers-color-scheme: dark)");
  $("theme").setAttribute("aria-pressed", String(dark.matches));
  $("theme").addEventListener("click", () => setTheme($("theme").getAttribute("aria-pressed") !== "true"));
  $("trace").addEventListener("change", chooseTrace);
  $("budget").addEventListener("change", chooseBudget);
  for (const id of ["first", "second", "layer", "head", "shade"]) $(id).addEventListener("change", drawReading);
  $("curve-metric").addEventListener("change", () => { shown.metricChosen = true; drawCharts(); });
  $("layer-metric").addEventListener("change", drawCharts);
  $("variant").addEventListener("change", () => {
    if (shown.budget) drawHeatmaps(shown.trace, shown.budget, $("variant").value);
  });
  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth !== width) drawCharts();
    width = innerWidth;
  });
  return chooseTrace();
}

start();
