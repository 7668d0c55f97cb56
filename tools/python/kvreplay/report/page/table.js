// The headline table at one budget.

const sorting = { column: null, descending: true };

function drawTable(trace, budget) {
  const columns = trace.columns.map((i) => page.columns[i]);
  const cells = [...budget.cells];
  if (sorting.column !== null) {
    const at = trace.columns.indexOf(sorting.column);
    const key = (cell) => (sorting.column < 0 ? cell.label : at < 0 ? null : cell.values[at][0]);
    cells.sort((a, b) => {
      const [x, y] = [key(a), key(b)];
      if (x === null || y === null) return (x === null) - (y === null);
      return (sorting.descending ? -1 : 1) * (x < y ? -1 : x > y ? 1 : 0);
    });
  }
  const heading = (title, meaning, column, best) => {
    const chosen = sorting.column === column;
    const order = chosen ? (sorting.descending ? "descending" : "ascending") : "none";
    const sort = () => {
      sorting.descending = chosen ? !sorting.descending : best > 0;
      sorting.column = column;
      drawTable(trace, budget);
      document.querySelector(`#headline button[data-column="${column}"]`).focus();
    };
    const arrow = chosen ? (sorting.descending ? " ↓" : " ↑") : "";
    return make("th", { scope: "col", "aria-sort": order },
      make("button", { type: "button", title: meaning, "data-column": column, onclick: sort }, title + arrow));
  };
  const head = make("tr", {}, heading("policy", "name, and parameters where cells of that name differ", -1, -1),
    make("th", { scope: "col" }, "heads"),
    ...columns.map((column, i) => heading(column.title, column.meaning, trace.columns[i], column.best)));
  const rows = cells.map((cell) => make("tr", { class: cell.role },
    make("th", { scope: "row" }, named(cell)), make("td", {}, cell.heads),
    ...cell.values.map(([, text, best]) =>
      make("td", best ? { class: "best" } : {}, text, make("span", { class: "mark" }, best ? "*" : "\u00a0")))));
  const failed = budget.failed.map((cell) => make("tr", { class: "failed" }, make("th", { scope: "row" }, cell.label),
    make("td", { colspan: columns.length + 1 }, `failed: ${cell.error}`)));
  document.getElementById("headline").replaceChildren(
    make("caption", {}, `budget ${budget.budget}`), make("thead", {}, head), make("tbody", {}, ...rows, ...failed));
  document.getElementById("budget-line").textContent = budget.line;
  document.getElementById("own-memory").textContent = budget.own_memory;
  document.getElementById("skill").textContent = trace.skill;
}
