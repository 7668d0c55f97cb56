// The texts of the live model, each beside that of the full cache.

/** How many letters two texts begin with alike. */
function alike(one, other) {
  let at = 0;
  while (at < one.length && at < other.length && one[at] === other[at]) at++;
  return at;
}

/** A text with visible line feeds; empty lines take no room. */
function withLineFeeds(text) {
  if (!text) return "(nothing: the model ended its answer at once)";
  return text.replace(/\n+/g, (feeds) => "↵".repeat(feeds.length) + "\n");
}

function drawWriting(trace, budget) {
  const cells = budget.cells.filter((cell) => typeof cell.written === "string" && cell.label !== "full");
  document.getElementById("writing").hidden = !cells.length;
  document.querySelector("a[href='#writing']").hidden = !cells.length;
  const entries = cells.flatMap((cell) => {
    const at = alike(cell.written, trace.written ?? cell.written);
    const rest = at < cell.written.length ? make("mark", {}, withLineFeeds(cell.written.slice(at))) : "";
    const same = at || !rest ? withLineFeeds(cell.written.slice(0, at)) : "";
    return [make("dt", {}, cell.label), make("dd", {}, same, rest)];
  });
  document.getElementById("written").replaceChildren(
    make("dt", {}, "full cache"), make("dd", {}, trace.written === null
      ? "not generated: kvreplay live RUN -p full --generate N adds it" : withLineFeeds(trace.written)), ...entries);
}
