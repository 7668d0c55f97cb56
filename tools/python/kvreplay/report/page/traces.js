// Means over all traces of the run, and the verdicts of `kvreplay compare`, at one budget.

const WHISKER = 160; // pixels

function drawTraces(budget) {
  const compared = page.over_traces;
  $("traces").hidden = !compared;
  if (!compared) return;
  fill($("mean-metric"), compared.metrics.map(({ name, title, meaning, judged }) =>
    [name, `${title}${meaning && `: ${meaning}`}${judged ? "" : " (means only)"}`]));
  const { judged } = compared.metrics.find(({ name }) => name === $("mean-metric").value);
  const lines = compared.lines.filter((line) => line.budget === budget.budget && line.metric === $("mean-metric").value
    && passes(line.label));
  const ends = lines.flatMap(({ mean, low, high }) => [mean, low, high]).filter((one) => one !== null);
  const [least, most] = [Math.min(...ends), Math.max(...ends)];
  const x = (value) => 6 + ((value - least) / (most - least || 1)) * (WHISKER - 12);
  const whisker = ({ label, mean, low, high }) => mean === null ? "" : make("svg", { viewBox: `0 0 ${WHISKER} 14`,
    class: "whisker series", "aria-hidden": "true", ...coloursOf(policyOf.get(label)) },
    low !== null && make("line", { x1: x(low), x2: x(high), y1: 7, y2: 7 }),
    make("path", { d: SHAPES.o, transform: `translate(${x(mean)} 7) scale(4)` }));
  const titles = ["heads", "traces", "mean", "95 % interval", ...(judged ? ["difference", "95 % interval", "p", "p Holm",
    "better/same/worse"] : [])];
  const rowOf = (line) => make("tr", { "data-label": line.label },
    make("th", { scope: "row" }, make("button", { type: "button", class: "name",
      onclick: (event) => selectPolicy(line.label, event.shiftKey) }, keyOf(policyOf.get(line.label)), line.label)),
    ...titles.map((_, i) => make("td", {}, line.texts[i] ?? "")), make("td", { class: "drawn" }, whisker(line)));
  const bodies = [["", false], [OWN_MEMORY, true]].map(([title, own]) => {
    const rows = lines.filter((line) => line.own_memory === own).map(rowOf);
    const group = title && make("tr", { class: "group" },
      make("th", { scope: "rowgroup", colspan: titles.length + 2 }, make("span", {}, title)));
    return rows.length ? make("tbody", {}, group, ...rows) : "";
  });
  $("means").replaceChildren(make("thead", {}, make("tr", {}, ...["policy", ...titles, "mean and interval"].map((title) =>
    make("th", { scope: "col" }, title)))), ...bodies.filter(Boolean));
  $("compared").textContent = plain(`${compared.traces} traces of ${compared.prompts} prompts. Baseline: `
    + `${compared.baseline}. Intervals: bootstrap over prompts, seed ${compared.seed}. p: sign flips of prompts. `
    + `*: Holm-corrected p below 0.05, over ${compared.comparisons} comparisons. `
    + `These are the numbers of ${compared.command}.`);
  $("compare-notes").replaceChildren(...compared.notes.map((note) => make("li", {}, note)));
  markSelected();
}
