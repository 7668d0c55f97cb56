// The texts of the live model, each beside that of the full cache.

/** How many letters two texts begin with alike. */
function alike(one, other) {
  let at = 0;
  while (at < one.length && at < other.length && one[at] === other[at]) at++;
  return at;
}

function drawWriting(trace, budget) {
  const cells = budget.cells.filter((cell) => typeof cell.written === "string" && cell.label !== "full");
  document.getElementById("writing").hidden = trace.written === null || !cells.length;
  if (trace.written === null) return;
  const entries = cells.flatMap((cell) => {
    const at = alike(cell.written, trace.written);
    const rest = at < cell.written.length ? make("mark", {}, cell.written.slice(at)) : "";
    return [make("dt", {}, cell.label), make("dd", {}, cell.written.slice(0, at), rest)];
  });
  document.getElementById("written").replaceChildren(
    make("dt", {}, "full cache"), make("dd", {}, trace.written), ...entries);
}
