// The headline table at one budget, by family or in one column's order. Controls have a group of their own, and so have
// policies that ignore the budget.

// The order of each table; in the page's address its names begin with the prefix.
const orders = {
  headline: { prefix: "", title: null, descending: true },
  means: { prefix: "mean-", title: null, descending: true },
};
const CONTROLS = "controls", OWN_MEMORY = "not at equal memory";

function groupOf(cell) {
  if (cell.role === "control") return CONTROLS;
  if (cell.own_memory) return OWN_MEMORY;
  return orders.headline.title === null ? policyOf.get(cell.label).family : "";
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

/** The line and marker of a policy in the figures; at its left end the marker hides no dash. */
function keyOf(look, dashes = dashesOf(look)) {
  return make("svg", { viewBox: "0 0 28 12", "aria-hidden": "true", class: "key series", ...coloursOf(look) },
    make("line", { x1: 1, x2: 27, y1: 6, y2: 6, "stroke-dasharray": dashes }),
    make("path", { d: SHAPES[look.marker], transform: "translate(5 6) scale(4)" }));
}

/** The lines in the order of their table. `keys`: {title: function from a line to its value, null if undefined}. */
function sorted(lines, { title, descending }, keys) {
  const key = keys[title];
  if (!key) return lines;
  return [...lines].sort((a, b) => {
    const [x, y] = [key(a), key(b)];
    if (x === null || y === null) return (x === null) - (y === null);
    return (descending ? -1 : 1) * (x < y ? -1 : x > y ? 1 : 0);
  });
}

/** A title that may continue on the next line behind a dot. */
function breakable(title) {
  return title.split(/(?<=\.)/).flatMap((piece, i) => i ? [make("wbr"), piece] : [piece]);
}

/** A heading that sorts its table, first the best value: the largest where `best` is 1. */
function headingOf(table, title, meaning, best, name = title) {
  const order = orders[table], chosen = order.title === title;
  const sort = () => {
    const isLast = chosen && order.descending !== best > 0; // the third click gives the first order again
    order.descending = chosen ? !order.descending : best > 0;
    order.title = isLast ? null : title;
    drawTables();
    writeAddress();
    document.querySelector(`#${table} button[data-title="${title}"]`).focus();
  };
  const arrow = chosen ? (order.descending ? " ↓" : " ↑") : "";
  return make("th", { scope: "col", "data-value": name, "aria-sort": chosen ? (order.descending ? "descending" : "ascending") : "none" },
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
  const head = make("tr", {}, headingOf("headline", "policy", "name, and parameters where cells of that name differ", -1),
    make("th", { scope: "col" }, "heads"),
    ...columns.map((column) => headingOf("headline", column.title, column.meaning, column.best, column.name)));
  const live = columns.filter((column) => column.title.startsWith("live.")).length;
  const kinds = make("tr", { class: "kinds" }, make("td", { colspan: 2 }),
    make("th", { scope: "colgroup", colspan: columns.length - live }, "offline, open loop"),
    make("th", { scope: "colgroup", colspan: live }, "live model"));
  const keys = Object.fromEntries(columns.map(({ title }, at) => [title, (cell) => cell.values[at][0]]));
  const cells = sorted(budget.cells.filter((cell) => passes(cell.label)), orders.headline,
    { policy: (cell) => cell.label, ...keys });
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
