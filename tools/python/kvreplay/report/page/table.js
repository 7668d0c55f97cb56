// The headline table at one budget, by family or in one column's order. Controls have a group of their own, and so have
// policies that ignore the budget.

const sorting = { title: null, descending: true };
const CONTROLS = "controls", OWN_MEMORY = "not at equal memory";

function groupOf(cell) {
  if (cell.role === "control") return CONTROLS;
  if (cell.own_memory) return OWN_MEMORY;
  return sorting.title === null ? policyOf.get(cell.label).family : "";
}

/** Whether the filter of policies keeps a label: one of its words, split at commas, is in the name or the family. */
function passes(label) {
  const words = $("policies").value.toLowerCase().split(",").map((word) => word.trim()).filter(Boolean);
  const { family } = policyOf.get(label);
  return !words.length || words.some((word) => label.toLowerCase().includes(word) || family.includes(word));
}

function familiesInOrder() {
  return page.families.filter((family) => family !== CONTROLS);
}

/** The line and marker of a policy in the figures. */
function keyOf(look, dashes = dashesOf(look)) {
  return make("svg", { viewBox: "0 0 28 12", "aria-hidden": "true", class: "key series", ...coloursOf(look) },
    make("line", { x1: 1, x2: 27, y1: 6, y2: 6, "stroke-dasharray": dashes }),
    make("path", { d: SHAPES[look.marker], transform: "translate(14 6) scale(4)" }));
}

function sorted(trace, cells) {
  if (sorting.title === null) return cells;
  const at = trace.columns.findIndex((i) => page.columns[i].title === sorting.title);
  const key = (cell) => (sorting.title === "policy" ? cell.label : at < 0 ? null : cell.values[at][0]);
  return [...cells].sort((a, b) => {
    const [x, y] = [key(a), key(b)];
    if (x === null || y === null) return (x === null) - (y === null);
    return (sorting.descending ? -1 : 1) * (x < y ? -1 : x > y ? 1 : 0);
  });
}

/** A title that may continue on the next line behind a dot. */
function breakable(title) {
  return title.split(/(?<=\.)/).flatMap((piece, i) => i ? [make("wbr"), piece] : [piece]);
}

function headingOf(title, meaning, best, name = title) {
  const chosen = sorting.title === title;
  const sort = () => {
    const isLast = chosen && sorting.descending !== best > 0; // the third click gives the families again
    sorting.descending = chosen ? !sorting.descending : best > 0;
    sorting.title = isLast ? null : title;
    drawTable(shown.trace, shown.budget);
    writeAddress();
    document.querySelector(`#headline button[data-title="${title}"]`).focus();
  };
  const arrow = chosen ? (sorting.descending ? " ↓" : " ↑") : "";
  return make("th", { scope: "col", "data-value": name, "aria-sort": chosen ? (sorting.descending ? "descending" : "ascending") : "none" },
    make("button", { type: "button", title: meaning, "data-title": title, onclick: sort }, ...breakable(title), arrow));
}

function rowOf(cell) {
  const name = make("button", { type: "button", class: "name", "data-label": cell.label,
    title: "select; with Shift: compare with this policy" }, keyOf(policyOf.get(cell.label)), named(cell));
  const values = cell.values.map(([value, text, best]) => make("td",
    { "data-value": value ?? "", ...(best && { class: "best" }) }, text,
    make("span", { class: "mark" }, best ? "*" : "\u00a0")));
  return make("tr", { class: cell.role, "data-label": cell.label, onmousedown: keepSelection,
    onclick: (event) => selectPolicy(cell.label, event.shiftKey) }, make("th", { scope: "row", "data-value": cell.label }, name),
    make("td", {}, cell.heads), ...values);
}

function noMatch(columns) {
  return make("tr", { class: "failed" }, make("td", { colspan: columns }, "No policy matches the filter."));
}

/** A click with Shift compares policies; the browser would select the text between two clicks. */
function keepSelection(event) {
  if (event.shiftKey) event.preventDefault();
}

function drawTable(trace, budget) {
  const columns = trace.columns.map((i) => page.columns[i]);
  const head = make("tr", {}, headingOf("policy", "name, and parameters where cells of that name differ", -1),
    make("th", { scope: "col" }, "heads"),
    ...columns.map((column) => headingOf(column.title, column.meaning, column.best, column.name)));
  const live = columns.filter((column) => column.title.startsWith("live.")).length;
  const kinds = make("tr", { class: "kinds" }, make("td", { colspan: 2 }),
    make("th", { scope: "colgroup", colspan: columns.length - live }, "offline, open loop"),
    make("th", { scope: "colgroup", colspan: live }, "live model"));
  const cells = sorted(trace, budget.cells.filter((cell) => passes(cell.label)));
  const titles = new Set(["", ...familiesInOrder(), OWN_MEMORY, CONTROLS]);
  const bodies = [...titles].map((title) => {
    const rows = cells.filter((cell) => groupOf(cell) === title).map(rowOf);
    const group = title && make("tr", { class: "group" }, make("th", { scope: "rowgroup", colspan: columns.length + 2 },
      make("span", {}, title)));
    return rows.length ? make("tbody", {}, group, ...rows) : "";
  });
  const none = cells.length ? [] : [noMatch(columns.length + 2)];
  const failed = budget.failed.map((cell) => make("tr", { class: "failed" }, make("th", { scope: "row" }, cell.label),
    make("td", { colspan: columns.length + 1 }, `failed: ${cell.error}`)));
  $("headline").replaceChildren(make("thead", {}, ...(live ? [kinds] : []), head),
    ...bodies.filter(Boolean), make("tbody", {}, ...none, ...failed));
  $("budget-line").textContent = (page.over_traces || page.traces.length > 1 ? `${trace.name}: ` : "") + budget.line;
  $("own-memory").textContent = cells.some((cell) => groupOf(cell) === OWN_MEMORY) ? budget.own_memory : "";
  $("skill").textContent = trace.skill;
  markSelected();
}
