// Means over all traces of the run, and the verdicts of `kvreplay compare`, at one budget.

const WHISKER = 160; // pixels
// The title of each column, and the names of its numbers, which are columns in CSV. Columns of one number sort the table.
const MEANS = [["heads", "heads"], ["traces", "traces"], ["mean", "mean"], ["95 % interval", "low", "high"]];
const VERDICTS = [["difference", "difference"], ["95 % interval of difference", "difference_low", "difference_high"], ["p", "p"],
  ["p Holm", "p_holm"], ["better/same/worse", "wins", "ties", "losses"]];

function drawTraces(budget) {
  const compared = page.over_traces;
  for (const part of [$("traces"), document.querySelector("[href='#traces']")]) part.hidden = !compared;
  if (!compared) return;
  fill($("mean-metric"), compared.metrics.map((metric) => [metric.name,
    `${metric.title}${metric.meaning && `: ${metric.meaning}`}${metric.has_verdicts ? "" : " (means only)"}`]));
  const metric = compared.metrics.find(({ name }) => name === $("mean-metric").value);
  const columns = metric.has_verdicts ? [...MEANS, ...VERDICTS] : MEANS;
  const keys = Object.fromEntries(columns.map(([title, name]) => [title, (line) => line.numbers[name]]));
  const lines = sorted(compared.lines.filter((line) => line.budget === budget.budget && line.metric === metric.name
    && passes(line.label)), orders.means, { policy: (line) => line.label, ...keys });
  const ends = lines.flatMap(({ numbers: { mean, low, high } }) => [mean, low, high]).filter((one) => one !== null);
  const [least, most] = [Math.min(...ends), Math.max(...ends)];
  const x = (value) => 6 + ((value - least) / (most - least || 1)) * (WHISKER - 12);
  const whisker = ({ label, numbers: { mean, low, high } }) => mean === null ? "" : make("svg", {
    viewBox: `0 0 ${WHISKER} 14`, class: "whisker series", "aria-hidden": "true", ...coloursOf(policyOf.get(label)) },
    low !== null && make("line", { x1: x(low), x2: x(high), y1: 7, y2: 7 }),
    make("path", { d: SHAPES.o, transform: `translate(${x(mean)} 7) scale(4)` }));
  const rowOf = (line) => make("tr", { "data-label": line.label, onmousedown: keepSelection,
    onclick: (event) => selectPolicy(line.label, event.shiftKey) },
    make("th", { scope: "row" }, make("button", { type: "button", class: "name" },
      keyOf(policyOf.get(line.label)), line.label)),
    ...columns.map(([, ...names], i) => make("td", {
      "data-values": JSON.stringify(names.map((name) => line.numbers[name] ?? "")) }, line.texts[i] ?? "")),
    make("td", { class: "drawn" }, whisker(line)));
  const bodies = [["", false], [OWN_MEMORY, true]].map(([title, own]) => {
    const rows = lines.filter((line) => line.own_memory === own).map(rowOf);
    const group = title && make("tr", { class: "group" },
      make("th", { scope: "rowgroup", colspan: columns.length + 2 }, make("span", {}, title)));
    return rows.length ? make("tbody", {}, group, ...rows) : "";
  });
  const headings = columns.map(([title, ...names]) => names.length > 1
    ? make("th", { scope: "col", "data-values": JSON.stringify(names) }, title)
    : headingOf("means", title, "", ["mean", "difference"].includes(title) ? metric.best : -1, ...names));
  const head = make("tr", {}, headingOf("means", "policy", "", -1), ...headings,
    make("th", { scope: "col", class: "drawn" }, "mean and interval"));
  $("means").replaceChildren(make("thead", {}, head), ...bodies.filter(Boolean),
    lines.length ? "" : make("tbody", {}, noMatch(columns.length + 2)));
  $("compared").textContent = plain(`${compared.traces} traces of ${compared.prompts} prompts. Baseline: `
    + `${compared.baseline}. Intervals: Student's t over prompts. p: sign flips of prompts, seed ${compared.seed}. `
    + `*: Holm-corrected p below 0.05, over ${compared.comparisons} comparisons. `
    + `These are the numbers of ${compared.command}.`);
  $("compare-notes").replaceChildren(...compared.notes.map((note) => make("li", {}, note)));
  markSelected();
}
